"""Variants as they would run: keys from files, sizes by a budget, what trains, and what is refused before anything runs."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from compare.small_comparison import HEADWISE, keys, training, write_room

from midus_hf.compare.options import Comparison
from midus_hf.compare.plan import check, plan
from midus_hf.compare.runs import Run, Variant
from midus_hf.config.yaml_options import from_mapping
from midus_hf.training.arguments import TrainArguments
from upscalers import upscale


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    return write_room(tmp_path_factory.mktemp("room"))


@pytest.fixture
def planned(room, tmp_path):
    """Return a function that plans and checks the variants of a file, and returns the comparison and the variants."""

    def plan_and_check(variants, **changes) -> tuple[Comparison, list[Variant]]:
        comparison, result = plan(from_mapping(Comparison, keys(room, tmp_path / "out", variants, **changes)))
        check(comparison, result)
        return comparison, result

    return plan_and_check


def written(path: Path, keys) -> str:
    path.write_text(yaml.safe_dump(keys))
    return str(path)


def test_recipe_is_read_without_keys_that_the_comparison_sets(room, planned, tmp_path):
    path = tmp_path / "file.yaml"
    (report,) = planned({"hml": {"upscale": HEADWISE, "train": {"learning_rate": 0.5}}})[1]
    recipe = written(path, {**HEADWISE, "base": "other", "output": "elsewhere", "seed": 7, "overwrite": True})
    (result,) = planned({"hml": {"upscale": recipe, "train": {"learning_rate": 0.5}}})[1]
    assert result == report and result.upscale == HEADWISE
    ours = {"model_name_or_path": "other", "seed": 7, "eval_text": "text", "resume_from_checkpoint": True}
    recipe = written(path, {"learning_rate": 0.5, **ours})
    assert planned({"hml": {"upscale": HEADWISE, "train": recipe}})[1] == [report]
    # A file for all variants, of which a variant's keys win.
    shared = written(path, {**training(room), "model_name_or_path": "other", "output_dir": "elsewhere"})
    of_all = keys(room, room / "out", {"a": {"train": {"learning_rate": 0.5}}, "b": {}}) | {"train": shared}
    comparison, variants = plan(from_mapping(Comparison, of_all))
    usual = {**training(room), "trainable": "all"}
    assert comparison.train == training(room)
    assert [variant.train for variant in variants] == [{**usual, "learning_rate": 0.5}, usual]


def test_variants_of_the_docs_are_planned(planned):
    page = Path("docs/compare.md").read_text(encoding="utf-8")
    shown = yaml.safe_load(page.split("```yaml\n", 1)[1].split("```", 1)[0])
    variants = {name: options for name, options in shown["variants"].items() if "upscale" not in options}
    variants["matched"]["train"]["trainable"] = [0, 1]
    result = {variant.name: variant.train for variant in planned(variants)[1]}
    assert result["lora"]["adapters"] == {"r": 32, "lora_alpha": 64} and "trainable" not in result["lora"]
    assert result["full"]["trainable"] == "all" and result["matched"]["trainable"] == [0, 1]


# Variants at the rate 3e-4, and the rate of their values; None where values have none of their own.
_VALUES_AT = {
    "a memory": ({"upscale": HEADWISE}, 3e-3),
    "blocks of a bank": ({"upscale": {"method": "hier-ffn", "options": {"sizes": [4, 2], "branching": 2}}}, 3e-3),
    "roles of a memory": ({"upscale": HEADWISE, "train": {"trainable": ["value"]}}, 3e-3),
    "a memory and all else": ({"upscale": HEADWISE, "train": {"trainable": "all"}}, None),
    "a mapping": ({"upscale": HEADWISE, "rates": [{"learning_rate": 3e-4}]}, None),
    "values with a rate in train": ({"upscale": HEADWISE, "train": {"value_learning_rate": 1e-4}}, None),
    "keys and values with a rate in train": ({"upscale": HEADWISE, "train": {"key_value_learning_rate": 1e-4}}, None),
    "no values": ({"upscale": {"method": "moda"}}, None),
    "layers": ({"upscale": {"method": "llama-pro"}}, None),
    "adapters": ({"train": {"adapters": {"r": 2}}}, None),
    "the base": ({}, None),
}


@pytest.mark.parametrize("case", _VALUES_AT)
def test_values_learn_ten_times_as_fast_at_a_plain_rate(planned, case):
    options, values = _VALUES_AT[case]
    comparison, (variant,) = planned({"a": options}, rates=[3e-4])
    rate = {"learning_rate": 3e-4} | ({} if values is None else {"value_learning_rate": values})
    assert variant.rates == [rate] == comparison.rates_of("a")
    train = Run(variant, rate, 0).training_keys(comparison, "model", Path("run"))
    shared = {key: value for key, value in variant.train.items() if key.endswith("value_learning_rate")}
    given = from_mapping(TrainArguments, train)
    assert (given.learning_rate, given.value_learning_rate) == (3e-4, values or shared.get("value_learning_rate"))


@pytest.mark.parametrize("memory_type", ["midus-hml", "headwise"])
def test_parts_of_an_upscaled_base_learn_at_the_rates_of_new_parts(room, planned, tmp_path, memory_type):
    upscale(base=str(room / "base"), output=tmp_path / "base", **HEADWISE)
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"type": "midus-hml"', f'"type": "{memory_type}"'))
    variants = {
        "new": {"train": {"trainable": "new"}},
        "recorded": {"train": {"trainable": "auto"}},
        "adapters": {"train": {"adapters": {"r": 2}}},
        "all": {},
    }
    _, result = planned(variants, base=str(tmp_path / "base"), rates=[1e-3])
    apart = [{"learning_rate": 1e-3, "value_learning_rate": 1e-2}]
    expected = {"new": apart, "recorded": apart, "adapters": apart, "all": [{"learning_rate": 1e-3}]}
    assert {one.name: one.rates for one in result} == expected


REFUSED = {
    "an option of upscale": (
        {"upscale": {**HEADWISE, "num_new_layer": 2}},
        "variants.a.upscale has no option 'num_new_layer'. Expected one of: method, num_new_layers, ",
    ),
    "no method": (
        {"upscale": {"num_new_layers": 2}}, "variants.a.upscale has no 'method'; name one, as 'upscale methods' lists them."
    ),
    "an option of the method": (
        {"upscale": {**HEADWISE, "options": {"m": 2}}}, "variants.a.upscale: method midus-hml has no option 'm'"
    ),
    "options that are no mapping": (
        {"upscale": {**HEADWISE, "options": [1]}}, "variants.a.upscale.options is [1]; expected a mapping."
    ),
    "a base of its own": (
        {"upscale": {**HEADWISE, "base": "other"}},
        "variants.a.upscale has 'base', which the comparison sets for each run; leave it out.",
    ),
    "windows of its own": (
        {"train": {"sequence_length": 16}},
        "variants.a.train.sequence_length is 16, and that of train is 32; expected the same, since all texts are measured alike. Set",
    ),
    "a seed of its own": (
        {"train": {"seed": 1}}, "variants.a.train has 'seed', which the comparison sets for each run; leave it out."
    ),
    "an unknown key of runs": ({"train": {"max_step": 3}}, "variants.a, as a run of midus train: config has no option 'max_step'."),
    **{
        f"{steps} steps": (
            {"train": {"max_steps": steps, "num_train_epochs": 1}},
            f"variants.a has max_steps {steps}; expected at least 1, the budget that variants are compared at. Set train.max_steps.",
        )
        for steps in (None, -1)
    },
    "a rate that is none": (
        {"rates": [{"per_device_train_batch_size": 4}]},
        "variants.a has a rate 'per_device_train_batch_size'; expected one of: learning_rate, memory_learning_rate, ",
    ),
    "a number and its mapping": (
        {"upscale": HEADWISE, "rates": [1e-3, {"learning_rate": 1e-3, "value_learning_rate": 1e-2}]},
        "rates has 0.001,value=0.01 twice; expected rates that differ",
    ),
    **{
        f"an absent file of {part}": (
            {part: "absent.yaml"},
            f"variants.a.{part} names a file: config is 'absent.yaml', which cannot be read (No such file or directory)",
        )
        for part in ("upscale", "train")
    },
    "a stream": ({"train": {"streaming": True}}, "variants.a has streaming, and texts of a comparison are read whole, to be"),
    "an absent corpus": ({"train": {"corpus": "absent.txt"}}, "variants.a.train.corpus is 'absent.txt', which does not exist"),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_variant_is_refused_before_anything_runs(planned, tmp_path, variant, message):
    with pytest.raises(ValueError) as refusal:
        planned({"a": variant})
    assert str(refusal.value).startswith(message), refusal.value
    assert not (tmp_path / "out").exists()


SHARES = "which shares text with domain.plants, "
# Of all variants; ROOM and FILES are the folders that the fixtures write.
REFUSED_OF_ALL = [
    ({"domain": {"plants": "absent.txt"}}, "domain.plants is 'absent.txt', which does not exist; expected a file or a folder"),
    ({"variants": {"a": {"upscale": HEADWISE}}, "base": "absent"}, "variants.a.upscale: "),
    ({"output_dir": "FILES/short.txt"}, "output_dir is 'FILES/short.txt', a file; expected a folder."),
    ({"base": "FILES/bare"}, "base is 'FILES/bare', whose config or tokenizer cannot be loaded: "),
    ({"base": "ROOM/corpus"}, "base is 'ROOM/corpus', a folder without config.json; expected that of a saved model."),
    ({"train": {"corpus": "absent.txt"}}, "train.corpus is 'absent.txt', which does not exist; expected"),
    ({"train": {"eval_text": "text"}}, "train has 'eval_text', which the comparison sets for each run; leave it out."),
    (
        {"variants": {"a": {}, "b": {"train": {"corpus": "FILES/rows.jsonl"}}}},
        "variants.b.train.corpus 'FILES/rows.jsonl' has no column 'text', only body; set",
    ),
    ({"variants": {"a": {"train": "FILES/windows.yaml"}}}, "variants.a.train.sequence_length is 16, and that of train is 32;"),
    ({"retention": {"stars": "FILES/short.txt"}}, "retention.stars has 6 tokens; expected at least one sequence of 32 tokens"),
    (
        {"retention": {"stars": "ROOM/base/../plants.txt"}},
        f"retention.stars is 'ROOM/base/../plants.txt', {SHARES}'ROOM/plants.txt'; expected texts that differ.",
    ),
    ({"validation": {"herbs": "ROOM/plants.txt"}}, f"validation.herbs is 'ROOM/plants.txt', {SHARES}'ROOM/plants.txt'; expected"),
    ({"validation": {"herbs": "FILES/copy.txt"}}, f"validation.herbs is 'FILES/copy.txt', {SHARES}"),
    (
        {"variants": {"a": {}, "b": {"train": {"corpus": "ROOM/herbs.txt"}}}},
        "validation.herbs is 'ROOM/herbs.txt', which b trains on, since its corpus is 'ROOM/herbs.txt'; expected text that no",
    ),
    *(
        (
            {kind: {"read": f"ROOM/{text}"}},
            f"{kind}.read is 'ROOM/{text}', which a trains on, since its corpus is 'ROOM/corpus'; expected text that no variant",
        )
        for kind in ("domain", "retention", "validation")
        for text in ("corpus", "corpus/1.txt")
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(room, tmp_path_factory) -> Path:
    """A folder with texts and a base that cannot be compared."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(room / "base", folder / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    shutil.copyfile(room / "plants.txt", folder / "copy.txt")
    (folder / "short.txt").write_text("short")
    (folder / "rows.jsonl").write_text('{"body": "Roses are red."}\n')
    (folder / "windows.yaml").write_text("sequence_length: 16\n")
    return folder


@pytest.mark.parametrize(("changes", "message"), REFUSED_OF_ALL, ids=str)
def test_wrong_comparison_is_refused_before_anything_runs(room, planned, files, changes, message):
    def placed(words: str) -> str:
        return words.replace("ROOM", str(room)).replace("FILES", str(files))

    changes = json.loads(placed(json.dumps(changes)))
    with pytest.raises(ValueError) as refusal:
        planned(changes.pop("variants", {"a": {}}), **changes)
    assert str(refusal.value).startswith(placed(message)), refusal.value


def test_windows_and_columns_of_a_variant_are_its_runs(planned, tmp_path, files):
    (variant,) = planned({"a": {"train": written(tmp_path / "file.yaml", {"sequence_length": 3.2e1})}})[1]
    assert variant.train["sequence_length"] == 32
    planned({"a": {}, "b": {"train": {"corpus": str(files / "rows.jsonl"), "text_column": "body"}}})

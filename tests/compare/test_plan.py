"""Variants as they would run: keys from files, sizes by a budget, what trains, and what is refused before anything runs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from compare.small_comparison import HEADWISE, keys, training, write_room
from evaluation.byte_models import byte_tokenizer
from evaluation.questions import write_questions

from benchmarks.models import CONFIGS
from midus_hf.compare.plan import TEXT_KINDS, Comparison, Variant, check, plan, rate_name
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import from_mapping, options_from_files, read_mapping
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers import upscale


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    """A room with two more texts, a copy of another and one without the column `text`."""
    room = write_room(tmp_path_factory.mktemp("room"))
    (room / "copy.txt").write_text((room / "plants.txt").read_text())
    (room / "rows.jsonl").write_text('{"body": "Roses are red."}\n')
    return room


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
    path, rate = tmp_path / "file.yaml", {"learning_rate": 0.5}
    report = planned({"hml": {"upscale": HEADWISE, "train": rate}})[1]
    recipe = written(path, {**HEADWISE, "base": "other", "output": "elsewhere", "seed": 7, "overwrite": True})
    assert planned({"hml": {"upscale": recipe, "train": rate}})[1] == report
    assert report[0].upscale == HEADWISE
    ours = {"model_name_or_path": "other", "seed": 7, "eval_text": "text", "resume_from_checkpoint": True}
    recipe = written(path, {**rate, **ours})
    assert planned({"hml": {"upscale": HEADWISE, "train": recipe}})[1] == report
    # A file for all variants; keys of a variant win.
    shared = written(path, {**training(room), "model_name_or_path": "other", "output_dir": "elsewhere"})
    of_all = keys(room, room / "out", {"a": {"train": rate}, "b": {}}) | {"train": shared}
    comparison, variants = plan(from_mapping(Comparison, of_all))
    usual = {**training(room), "trainable": "all"}
    assert comparison.train == training(room)
    assert [variant.train for variant in variants] == [{**usual, **rate}, usual]


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
    "the base": ({}, None),
}


@pytest.mark.parametrize("case", _VALUES_AT)
def test_values_learn_ten_times_as_fast_at_a_plain_rate(planned, case):
    options, values = _VALUES_AT[case]
    comparison, (variant,) = planned({"a": options}, rates=[3e-4])
    rate = {"learning_rate": 3e-4} | ({} if values is None else {"value_learning_rate": values})
    assert variant.rates == [rate] == comparison.list_rates("a")


def test_null_is_a_rate_that_the_run_measures(planned):
    rates = [None, 1e-3, {"learning_rate": 1e-2, "value_learning_rate": None}]
    _, (variant,) = planned({"a": {"upscale": HEADWISE}}, rates=rates)
    assert [*map(rate_name, variant.rates)] == ["measured", "0.001,value=0.01", "0.01,value=measured"]
    assert variant.rates[0] == {"learning_rate": None}


def test_upscaled_base_learns_at_the_rates_of_new_parts(room, planned, tmp_path):
    upscale(base=str(room / "base"), output=tmp_path / "base", **HEADWISE)
    config = tmp_path / "base" / "config.json"
    config.write_text(config.read_text().replace('"type": "midus-hml"', '"type": "headwise"'))  # its earlier name
    trained = ({"trainable": "new"}, {"trainable": "auto"}, {"adapters": {"r": 2}}, {})
    variants = {str(number): {"train": keys} for number, keys in enumerate(trained)}
    _, result = planned(variants, base=str(tmp_path / "base"), rates=[1e-3])
    plain = {"learning_rate": 1e-3}
    assert [one.rates for one in result] == [[{**plain, "value_learning_rate": 1e-2}]] * 3 + [[plain]]


# Options of the variant `a`, or of all; ROOM is the folder of the fixture.
REFUSED_VARIANT = {
    "option of upscale": ({"upscale": {**HEADWISE, "num_new_layer": 2}}, "upscale has no option 'num_new_layer'. Expected one of: m"),
    "no method": ({"upscale": {"num_new_layers": 2}}, "upscale is {'num_new_layers': 2}; expected a method"),
    "corpus without a reader": ({"upscale": {**HEADWISE, "corpus": "a"}}, "upscale: corpus is 'a', and method 'midus-hml' reads no"),
    "options not a mapping": ({"upscale": {**HEADWISE, "options": [1]}}, "upscale is .*expected a method.* and a mapping of options"),
    "option of the method": ({"upscale": {**HEADWISE, "options": {"m": 2}}}, "upscale: method midus-hml has no option 'm'"),
    "base": ({"upscale": {**HEADWISE, "base": "other"}}, "upscale has 'base', which the comparison sets for each run; leave it"),
    "seed": ({"train": {"seed": 1}}, "train has 'seed', which the comparison sets for each run; leave it out"),
    "windows": ({"train": {"sequence_length": 16}}, "sequence_length 16 .*expected 32, as train has"),
    "stream": ({"train": {"streaming": True}}, "streaming True; expected .* no streaming"),
    "no steps": ({"train": {"max_steps": None}}, "has max_steps None; expected at least 1.*Set train.max_steps"),
    "steps below 1": ({"train": {"max_steps": 0}}, "has max_steps 0; expected at least 1.*Set train.max_steps"),
    "rate of 0": ({"rates": [1, 0]}, "as a run of midus train: .*learning_rate is 0.0; expected"),
    "rate twice": ({"rates": [1e-3, 1.0000001e-3]}, "has rates 0.001, 0.001; expected rates whose names differ"),
    "file of train": ({"train": "absent.yaml"}, "train names a file: config is 'absent.yaml', which cannot be read"),
    "corpus": ({"train": {"corpus": "absent.txt"}}, "train.corpus is 'absent.txt', which does not exist; expected"),
    "column": ({"train": {"corpus": "ROOM/rows.jsonl"}}, "train.corpus 'ROOM/rows.jsonl' has no column 'text', only body; set"),
    "corpus is measured": ({"train": {"corpus": "ROOM/herbs.txt"}}, "validation.herbs .*shares text with variants.a.train.corpus"),
}  # fmt: skip
NAME = "names a variant or text; expected letters, digits"
REFUSED = {
    "no variants": ({"variants": {}}, "variants is empty; expected one or more"),
    "variant named base": ({"variants": {"base": {}}}, "variants has 'base'.*choose another name"),
    **{f"variant named {name}": ({"variants": {name: {}}}, f"'{re.escape(name)}' {NAME}") for name in (".a", "a+one-row")},
    "text named a/b": ({"retention": {"a/b": "text"}}, f"'a/b' {NAME}"),
    "no domain": ({"domain": {}}, "domain is empty, without tasks; expected one of them"),
    "no domain for controls": ({"domain": {}, "tasks": {"names": ["piqa"]}}, "domain is empty.*or controls: false"),
    "no validation": ({"rates": [1e-3, 1e-4], "validation": {}}, "validation is empty.*validation.NAME=PATH, or one rate"),
    "text twice": ({"retention": {"plants": "other.txt"}}, "plants, .*; expected a different name for each"),
    **{f"seeds {seeds}": ({"seeds": seeds}, "seeds is .*; expected one or more different") for seeds in ([1, 1], [-1], [])},
    "key of its own": ({"train": {"eval_text": "text"}}, "train has 'eval_text', which the comparison sets for each run; leave it"),
    "absent base": ({"base": "absent/absent/absent"}, "base is 'absent/absent/absent', which does not exist; expected"),
    "output": ({"output_dir": "ROOM/rows.jsonl"}, "output_dir is 'ROOM/rows.jsonl', a file; expected a folder"),
    "absent text": ({"domain": {"plants": "absent.txt"}}, "domain.plants is 'absent.txt', which does not exist; expected"),
    "text without the column": ({"retention": {"rows": "ROOM/rows.jsonl"}}, "retention.rows .*has no column 'text', only body; set"),
    "text in two places": ({"retention": {"stars": "ROOM/base/../plants.txt"}}, "domain.plants .*shares text with retention.stars"),
    "copied text": ({"validation": {"herbs": "ROOM/copy.txt"}}, "domain.plants .*shares text with validation.herbs"),
    "text in the corpus": ({"domain": {"read": "ROOM/corpus/1.txt"}}, "domain.read .*shares text with train.corpus"),
    "corpus in a text": (
        {"train": {"corpus": "ROOM/corpus/1.txt"}, "retention": {"read": "ROOM/corpus"}},
        "retention.read .*shares text with train.corpus",
    ),
}  # fmt: skip
REFUSED |= {f"a: {case}": ({"variants": {"a": value}}, message) for case, (value, message) in REFUSED_VARIANT.items()}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_comparison_is_refused_before_anything_runs(room, planned, tmp_path, changes, message):
    changes, message = (json.loads(json.dumps(each).replace("ROOM", str(room))) for each in (changes, message))
    with pytest.raises(RequestError, match=message):
        planned(changes.pop("variants", {"a": {}}), **changes)
    assert not (tmp_path / "out").exists()


def test_corpus_of_a_variant_is_read_by_its_own_column(room, planned):
    planned({"a": {}, "b": {"train": {"corpus": str(room / "rows.jsonl"), "text_column": "body"}}})


RECIPES = sorted((Path(__file__).parents[2] / "configs" / "compare").glob("*.yaml"))
assert RECIPES
# Others have new parts of 8.9 M parameters, or as near as sizes come.
DEFAULT_SIZES = "qwen2.5-coder-1.5b-instruct"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_shipped_comparison_is_planned_on_its_base(recipe, room, tmp_path):
    (config,) = (path for path in CONFIGS.glob("*.json") if recipe.stem.startswith(path.stem))
    base, arguments = write_config(tmp_path / "base", json.loads(config.read_text())), read_mapping(recipe)
    byte_tokenizer().save_pretrained(base)
    words = [f"base={base}", f"output_dir={tmp_path / 'out'}", f"train.corpus={room / 'corpus'}"]
    for name in (f"{kind}.{name}" for kind in TEXT_KINDS for name in arguments.get(kind, {})):
        (tmp_path / f"{name}.txt").write_text(f"{name} grow. " * 40)
        words.append(f"{name}={tmp_path / name}.txt")
    if "tasks" in arguments:
        words.append(f"tasks.data={write_questions(tmp_path / 'questions')}")
    comparison, variants = plan(options_from_files(Comparison, [recipe], words))
    check(comparison, variants)
    assert comparison.seeds
    assert [variant.name for variant in variants] == list(comparison.variants)
    for variant in variants:
        if variant.upscale is not None and not variant.name.endswith("-one-row"):
            if recipe.stem == DEFAULT_SIZES:
                assert set(comparison.variants[variant.name].upscale) == {"method"}
            else:
                assert variant.trained_parameters == pytest.approx(8_900_000, rel=0.4), variant.name


# Of papers' settings: every row is planned on its base, and a later file makes them small.
FOLDER = Path(__file__).parents[2] / "configs" / "reproduce"
TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "small")
assert TABLES
LLAMAS = {"meta-llama/Llama-3.2-1B": LLAMA_3_2_1B, "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B}


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_a_papers_table_are_planned_on_their_base(table, tmp_path):
    is_mathpile = table.startswith("midus-5")
    arguments = options_from_files(Comparison, [FOLDER / f"{table}.yaml"], ["train.corpus=corpus"] * is_mathpile)
    folder = write_config(tmp_path / "base", LLAMAS[arguments.base])
    byte_tokenizer().save_pretrained(folder)
    comparison, variants = plan(dataclasses.replace(arguments, base=str(folder), output_dir=str(tmp_path / "out")))
    check(comparison, variants)
    assert (comparison.seeds, comparison.controls, comparison.domain) == ([0], False, {})
    assert comparison.tasks
    for variant in variants:
        assert variant.train["per_device_train_batch_size"] * variant.train["gradient_accumulation_steps"] == 64
        assert variant.train["max_steps"] == (8392 if is_mathpile else 11444)
        assert "bf16" not in variant.train, "the default follows the device"
        assert variant.train.get("trainable") == ("all" if variant.name == "Base" else None)


def test_later_file_makes_a_papers_table_small(room, tmp_path):
    words = [f"base={room / 'base'}", f"train.corpus={room / 'corpus'}", "train.sequence_length=64"]
    words += [f"domain.articles={room / 'stars.txt'}", "tasks.data=questions", f"output_dir={tmp_path / 'out'}"]
    arguments = options_from_files(Comparison, [FOLDER / "midus-1.yaml", FOLDER / "small.yaml"], words)
    # Others need more layers than the base has.
    few = {name: arguments.variants[name] for name in ("LESA", "MIDUS-HML")}
    comparison, variants = plan(dataclasses.replace(arguments, variants=few))
    check(comparison, variants)
    assert [(variant.name, variant.train["max_steps"]) for variant in variants] == [("LESA", 50), ("MIDUS-HML", 50)]
    assert comparison.texts == {"articles": str(room / "stars.txt")}
    assert "piqa" in comparison.tasks.names

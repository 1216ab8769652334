"""What a comparison may be told, what is refused and in which words, and that those that ship, of papers too, are planned."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from compare.small_comparison import write_room
from evaluation.byte_models import byte_tokenizer
from evaluation.questions import write_questions

from benchmarks.models import CONFIGS
from midus_hf.compare.options import TEXT_KINDS, Comparison
from midus_hf.compare.plan import check, plan
from midus_hf.config.yaml_options import from_mapping, options_from_files, read_mapping
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config

GIVEN = {
    "base": "base",
    "output_dir": "out",
    "variants": {"full": {"rates": [1e-4]}, "midus.hml-2": {"upscale": {"method": "midus-hml"}}},
    "train": {"corpus": "corpus", "max_steps": 10},
    "domain": {"plants": "plants.txt"},
}
QUOTES = "Rename it, or put a number in quotes."
VARIANT_NAME = f"expected letters, digits and the signs . _ -, the first a letter or a digit. {QUOTES}"
TWICE = "rates has 0.001 twice; expected rates that differ, since each names a folder."
REFUSED = {
    "no variants": ({"variants": {}}, "variants is empty; expected one or more."),
    "no domain": ({"domain": {}}, "domain is empty, and there are no tasks; expected one of them, to measure learning."),
    "several rates of all": (
        {"rates": [1e-3, 1e-4]},
        "validation is empty, and midus.hml-2 has several rates; expected text like the corpus that is neither trained on nor",
    ),
    "no domain for controls": (
        {"domain": {}, "tasks": {"names": ["piqa"]}}, "domain is empty, and controls are true; expected held-out text by which"
    ),
    "a variant called as the base": (
        {"variants": {"base": {}}}, "variants has 'base', which is the name of the base itself; choose another name."
    ),
    "no seeds": ({"seeds": []}, "seeds is empty; expected one or more."),
    "a variant's name": ({"variants": {"a/b": {}}}, f"variants has 'a/b'; {VARIANT_NAME}"),
    "a variant's first sign": ({"variants": {".a": {}}}, f"variants has '.a'; {VARIANT_NAME}"),
    "a variant called as a number": ({"variants": {2: {}}}, f"variants has 2; {VARIANT_NAME}"),
    "a variant called as a null control": ({"variants": {"a+one-row": {}}}, f"variants has 'a+one-row'; {VARIANT_NAME}"),
    "a text's name": ({"retention": {"a/b": "text"}}, f"retention has 'a/b'; {VARIANT_NAME}"),
    "a text twice": (
        {"retention": {"plants": "other.txt"}},
        "domain and retention both have a text 'plants'; expected a different name for each text.",
    ),
    "a seed twice": ({"seeds": [1, 1]}, "seeds is [1, 1]; expected different numbers from 0."),
    "a seed below 0": ({"seeds": [-1]}, "seeds is [-1]; expected different numbers from 0."),
    "no rates": ({"rates": []}, "rates is an empty list; expected one or more, or leave it out."),
    "a variant's rates": ({"variants": {"a": {"rates": []}}}, "rates is an empty list; expected one or more, or leave it out."),
    "a rate of 0": ({"rates": [0]}, "rates has 0.0; expected numbers above 0, or mappings from keys of rates to such numbers."),
    "a rate below 0": ({"rates": [{"learning_rate": -1}]}, "rates has {'learning_rate': -1.0}; expected numbers above 0"),
    "a rate without a key": ({"rates": [{}]}, "rates has {}; expected numbers above 0"),
    "a rate twice": ({"rates": [1e-3, 0.001]}, TWICE),
    "a mapping twice": ({"rates": [{"learning_rate": 1e-3}, {"learning_rate": 0.001}]}, TWICE),
    "rates that differ too little": ({"rates": [1e-3, 1.0000001e-3]}, TWICE),
    "no tasks": ({"tasks": {"names": []}}, "tasks.names is an empty list; expected one or more tasks. Leave tasks out for none."),
    "a variant's option": ({"variants": {"a": {"method": "solar"}}}, "config has no option 'variants.a.method'."),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_contradicting_options_are_refused(changes, message):
    with pytest.raises(ValueError) as refusal:
        from_mapping(Comparison, {**GIVEN, **changes})
    assert str(refusal.value).startswith(message)


RECIPES = sorted((Path(__file__).parents[2] / "configs" / "compare").glob("*.yaml"))
assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_shipped_comparison_is_planned_on_its_base(recipe, tmp_path):
    room = write_room(tmp_path)
    (tmp_path / "sized").mkdir()
    (base,) = (path for path in CONFIGS.glob("*.json") if recipe.stem.startswith(path.stem))
    shutil.copyfile(base, tmp_path / "sized" / "config.json")
    for path in (room / "base").glob("tokenizer*"):
        shutil.copyfile(path, tmp_path / "sized" / path.name)
    words = [f"base={tmp_path / 'sized'}", f"output_dir={tmp_path / 'out'}", f"train.corpus={room / 'corpus'}"]
    arguments = read_mapping(recipe)
    for kind in TEXT_KINDS:
        for name in arguments.get(kind, {}):
            (room / f"{name}.txt").write_text(f"{name} grow. " * 40)
            words.append(f"{kind}.{name}={room / name}.txt")
    if "tasks" in arguments:
        words.append(f"tasks.data={write_questions(tmp_path / 'questions')}")
    comparison, variants = plan(options_from_files(Comparison, [recipe], words))
    check(comparison, variants)
    assert comparison.seeds and [variant.name for variant in variants] == list(comparison.variants)
    for variant in variants:
        if variant.upscale is not None and not variant.name.endswith("-one-row"):
            assert variant.trained_parameters == pytest.approx(8_900_000, rel=0.4), variant.name


# Of papers' settings: every row is planned on its base, and a file behind them makes them small.
FOLDER = Path(__file__).parents[2] / "configs" / "reproduce"
TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "small")
assert TABLES
LLAMAS = {"meta-llama/Llama-3.2-1B": LLAMA_3_2_1B, "meta-llama/Llama-3.1-8B": LLAMA_3_1_8B}


def read(table: str, *settings: str, small: bool = False) -> Comparison:
    names = [table, *(["small"] if small else [])]
    return options_from_files(Comparison, [FOLDER / f"{name}.yaml" for name in names], settings)


@pytest.mark.parametrize("table", TABLES)
def test_rows_of_a_papers_table_are_planned_on_their_base(table, tmp_path, monkeypatch):
    is_mathpile = table.startswith("midus-5")
    arguments = read(table, "train.corpus=corpus") if is_mathpile else read(table)
    folder = write_config(tmp_path / "base", LLAMAS[arguments.base])
    byte_tokenizer().save_pretrained(folder)
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda names, data: None)
    planned, variants = plan(dataclasses.replace(arguments, base=str(folder), output_dir=str(tmp_path / "out")))
    check(planned, variants)
    assert (planned.seeds, planned.controls, planned.domain) == ([0], False, {}) and planned.tasks is not None
    for variant in variants:
        assert variant.train["per_device_train_batch_size"] * variant.train["gradient_accumulation_steps"] == 64
        assert variant.train["max_steps"] == (8392 if is_mathpile else 11444)
        assert "bf16" not in variant.train, "the default follows the device"
        assert variant.train.get("trainable") == ("all" if variant.name == "Base" else None)


def test_later_file_makes_a_papers_table_small(tmp_path, monkeypatch):
    room = write_room(tmp_path)
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda names, data: None)
    words = [f"base={room / 'base'}", f"train.corpus={room / 'corpus'}", "train.sequence_length=64"]
    words += [f"domain.articles={room / 'stars.txt'}", "tasks.data=questions"]
    arguments = read("midus-1", *words, small=True)
    # Others need more layers than the base has.
    few = {name: arguments.variants[name] for name in ("LESA", "MIDUS-HML")}
    planned, variants = plan(dataclasses.replace(arguments, variants=few))
    check(planned, variants)
    assert [variant.name for variant in variants] == ["LESA", "MIDUS-HML"]
    assert {variant.train["max_steps"] for variant in variants} == {50}
    assert planned.texts == {"articles": str(room / "stars.txt")} and "piqa" in planned.tasks.names

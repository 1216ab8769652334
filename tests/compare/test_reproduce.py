"""Tables of papers: every row's recipes, sizes and numbers, at every scale."""

import dataclasses
import json
import math

import pytest
import yaml
from compare.made_results import result

from midus_hf.compare.learning import spread
from midus_hf.compare.reproduce.report import as_json, stage_table, write_table
from midus_hf.compare.reproduce.repository import Repository
from midus_hf.compare.reproduce.table import (
    AVERAGE,
    SCALES,
    RowOptions,
    TableOptions,
    read_options_of,
    read_table,
    variant_name,
)
from midus_hf.compare.results import Measured, Point
from midus_hf.compare.runs import check_runs
from midus_hf.compare.variants import plan

REPOSITORY = Repository()
TABLES = [(paper, name) for paper, names in REPOSITORY.tables().items() for name in names]
LLAMAS = {
    "llama-3.2-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "llama-3.1-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Configs of the bases that tables name, which are all that planning reads."""
    folder = tmp_path_factory.mktemp("bases")
    for name, sizes in LLAMAS.items():
        (folder / name).mkdir()
        heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "torch_dtype": "bfloat16",
            **heads,
            **sizes,
        }
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def without_material(monkeypatch, bases):
    """Material that is a path and nothing else: what would be fetched is not looked at."""

    def fetched(self, value):
        text = json.dumps(value)
        return json.loads(
            text.replace('"material:smollm2"', json.dumps(str(bases / "llama-3.2-1b"))).replace('"material:', '"')
        )

    monkeypatch.setattr(Repository, "fetched", fetched)


@pytest.mark.parametrize(("paper", "name"), TABLES, ids="-".join)
def test_a_table_can_be_planned_at_its_own_scale(paper, name, bases, tmp_path, without_material):
    options = read_options_of(REPOSITORY, paper, name)
    overrides = [f"base={bases / options.base}"]
    if "mathpile" in options.scales:
        overrides.append("train.corpus=somewhere")
    table = read_table(REPOSITORY, paper, name, "paper", overrides)
    comparison, variants = plan(table.comparison(REPOSITORY, tmp_path / "out", list(options.rows)))
    check_runs(comparison, variants)
    assert [variant.name for variant in variants] == [variant_name(row) for row in options.rows]
    assert (comparison.fine_tune is not None) == (options.fine_tune is not None)
    measured = {column for column in options.columns if column != AVERAGE}
    assert set(table.scale.columns) == measured
    for variant, row in zip(variants, options.rows.values(), strict=True):
        assert (variant.upscale is None) == (row.upscale is None)
        recipe = yaml.safe_load(open(REPOSITORY.recipe("train", row.train, options.base), encoding="utf-8"))
        expected = {**recipe, **table.scale.train, **row.changes}
        for key in ("max_steps", "learning_rate", "per_device_train_batch_size"):
            assert variant.train[key] == expected[key]
        assert "bf16" not in variant.train, "the paper's scale has the default, which follows the device"


@pytest.mark.parametrize("scale", ["small", "tiny"])
@pytest.mark.parametrize("name", [name for paper, name in TABLES if not name.startswith("5")])
def test_a_table_of_texts_and_choices_can_be_planned_smaller(name, scale, tmp_path, without_material, bases):
    table = read_table(REPOSITORY, "midus", name, scale, [f"base={bases / 'llama-3.2-1b'}"])
    comparison, variants = plan(table.comparison(REPOSITORY, tmp_path / "out", list(table.options.rows)))
    check_runs(comparison, variants)
    assert set(table.scale.columns) <= set(table.options.columns)
    assert {variant.train["max_steps"] for variant in variants} == {50 if scale == "small" else 2}
    assert comparison.texts == {"Wiki-PPL": "articles/excerpts"}


# Whose printed average is not that of the row, as the table's file says.
MISPRINTED = {("2", "SOLAR", "tuned")}


@pytest.mark.parametrize(
    ("paper", "name"), [(paper, name) for paper, name in TABLES if not name.startswith("5")], ids="-".join
)
def test_the_paper_s_averages_are_those_of_its_rows(paper, name):
    """Numbers that were copied wrongly would not be."""
    for row, options in read_options_of(REPOSITORY, paper, name).rows.items():
        for stage in ("continued", "tuned"):
            numbers = getattr(options, stage)
            if numbers is not None:
                is_right = numbers[-1] == pytest.approx(sum(numbers[1:-1]) / (len(numbers) - 2), abs=0.0075)
                assert is_right == ((name, row, stage) not in MISPRINTED)


def test_numbers_are_per_cent_perplexities_and_the_mean_of_what_was_measured():
    table = read_table(REPOSITORY, "midus", "1", "small")
    run = result("MIDUS-HML", [0.5])
    point = Point(1, 100, 1.0, {"Wiki-PPL": math.log(20.0)})
    tuned = Measured({"Wiki-PPL": math.log(30.0)}, {"piqa": {"acc": 0.5, "acc_norm": 0.6}})
    tasks = {"piqa": {"acc": 0.7, "acc_norm": 0.75}, "mmlu": {"acc": 0.25}}
    run = dataclasses.replace(run, curve=[point], tasks=tasks, tuned=tuned)
    assert table.number("Wiki-PPL", "continued", run) == pytest.approx(20.0)
    assert table.number("Wiki-PPL", "tuned", run) == pytest.approx(30.0)
    assert table.number("PIQA", "continued", run) == 75.0
    assert table.number("ARC", "continued", run) is None, "there are no questions at this scale"
    assert table.number(AVERAGE, "continued", run) == pytest.approx((75.0 + 25.0) / 2)
    assert table.number(AVERAGE, "tuned", run) == 60.0
    assert table.number("PIQA", "tuned", dataclasses.replace(run, tuned=None)) is None
    other = dataclasses.replace(run, tasks={"piqa": {"acc_norm": 0.65}}, seed=1)
    assert table.spread("PIQA", "continued", [run, other]) == spread([75.0, 65.0])


def test_the_word_perplexity_of_a_task_is_no_accuracy():
    table = read_table(REPOSITORY, "midus", "1", "paper")
    run = dataclasses.replace(
        result("Base", [0.5]), tasks={"wikitext": {"word_perplexity": 13.2}, "piqa": {"acc": 0.5}}
    )
    assert table.number("Wiki-PPL", "continued", run) == 13.2
    assert table.number(AVERAGE, "continued", run) == 50.0


def test_a_table_is_told_with_the_paper_s_numbers_below_ours(tmp_path):
    table = read_table(REPOSITORY, "midus", "3", "tiny")
    point = Point(1, 100, 1.0, {"Wiki-PPL": math.log(20.0)})
    runs = [
        dataclasses.replace(result("HML", [0.5], seed=seed), curve=[point], tasks={"piqa": {"acc": share}})
        for seed, share in enumerate((0.5, 0.7))
    ]
    failures = {"PKM/recipe/seed-0": "midus train ended with status 1"}
    results = {"HML": runs, "PKM": []}
    words = stage_table(table, "continued", results, failures)
    assert [row[0] for row in words.rows] == ["PKM", "paper", "HML", "paper"], (
        "rows that were not asked for are left out"
    )
    assert words.rows[0][-1] == "failed"
    ours, printed = words.rows[2:]
    piqa = words.head.index("PIQA")
    assert (ours[piqa], printed[piqa], ours[-1]) == ("60.00 ± 14.14", "75.08", "2")
    assert (ours[words.head.index("ARC")], printed[words.head.index("ARC")]) == ("-", "66.16")
    told = as_json(table, results, failures)
    (row,) = [row for row in told["rows"] if row["row"] == "HML"]
    assert row["continued"]["PIQA"] == {"mean": 60.0, "deviation": pytest.approx(200**0.5), "paper": 75.08}
    files = write_table(tmp_path, table, results, failures)
    assert "Not measured at this scale: ARC, LogiQA, Wino, CSQA, BoolQ, MMLU." in files[0].read_text()
    assert "PKM/recipe/seed-0" in files[1].read_text()


@pytest.mark.parametrize(
    ("paper", "name", "scale", "overrides", "message"),
    [
        ("midas", "1", "tiny", (), "paper is 'midas'; expected one of: midus."),
        ("midus", "4", "tiny", (), "table is '4'; of midus there are: 1, 2, 3, 6, 7, 8, 9, 10, 11, 5-1b, 5-8b."),
        ("midus", "1", "large", (), "scale is 'large'; expected one of: paper, small, tiny."),
        ("midus", "5-1b", "tiny", (), "scale is 'tiny'; of this table there are: paper."),
        ("midus", "1", "tiny", ("seed=1",), "has no option 'seed'. Did you mean 'seeds'"),
    ],
)
def test_what_there_is_not_is_refused(paper, name, scale, overrides, message):
    with pytest.raises(ValueError) as refused:
        read_table(REPOSITORY, paper, name, scale, overrides)
    assert message in str(refused.value)


def test_material_is_fetched_by_name_wherever_it_stands(monkeypatch, tmp_path):
    import material.fetch as material

    monkeypatch.setitem(material.FETCH, "smollm2", lambda: tmp_path)
    found = REPOSITORY.fetched({"base": "material:smollm2", "list": ["material:smollm2", 3], "plain": "smollm2"})
    assert found == {"base": str(tmp_path), "list": [str(tmp_path), 3], "plain": "smollm2"}
    with pytest.raises(ValueError, match="there is no material 'smollm3'"):
        REPOSITORY.fetched("material:smollm3")


def test_a_folder_that_is_no_clone_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="is no clone of the repository, which has the recipes of tables in configs/reproduce"
    ):
        Repository(tmp_path)


def test_a_row_has_a_number_for_each_column():
    row = RowOptions(train="x", continued=[1.0])
    with pytest.raises(ValueError, match=r"rows\.a has 1 numbers; expected 2, one per column\."):
        TableOptions(title="t", base="b", columns=["x", "y"], rows={"a": row}, scales="s")


def test_every_scale_has_a_name():
    assert SCALES == ("paper", "small", "tiny")

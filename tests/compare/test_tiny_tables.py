"""A table at the scale `tiny`, in this process: upscaled, trained, fine-tuned and evaluated by the commands, on real texts."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from compare.small_comparison import InProcess

from material.fetch import FETCH
from midus_hf.compare.measuring import measure_base, measure_run
from midus_hf.compare.reproduce.report import stage_table
from midus_hf.compare.reproduce.repository import Repository
from midus_hf.compare.reproduce.table import read_table
from midus_hf.compare.results import read_result
from midus_hf.compare.runs import check_runs, runs_of
from midus_hf.compare.variants import plan
from midus_hf.compare.workplace import BASE, Workplace

pytestmark = [
    pytest.mark.material,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"),
]
ROW = "MIDUS-HML"


@pytest.fixture(scope="module")
def excerpts(tmp_path_factory):
    """Real texts are shorter here: to read all of them takes longer than everything else."""
    folder = tmp_path_factory.mktemp("excerpts")
    paths = {name: folder / f"{Path(name).name}.jsonl" for name in ("chats/held_out",)}
    for name, path in paths.items():
        path.write_text("".join(FETCH[name]().read_text(encoding="utf-8").splitlines(keepends=True)[:40]))
    paths["addresses/train"] = sorted(FETCH["addresses/train"]().iterdir())[0]
    with patch.dict(FETCH, {name: lambda path=path: path for name, path in paths.items()}):
        yield


@pytest.fixture(scope="module")
def done(excerpts, tmp_path_factory):
    """A row of MIDUS's first table, whose models stay: the table, its comparison, the result, the folder."""
    repository, output = Repository(), tmp_path_factory.mktemp("table")
    table = read_table(repository, "midus", "1", "tiny")
    comparison, (variant,) = plan(dataclasses.replace(table.comparison(repository, output, [ROW]), keep_models=True))
    check_runs(comparison, [variant])
    place, commands = Workplace(output), InProcess()
    (output / BASE).mkdir()
    measure_base(comparison, place, commands)
    (run,) = runs_of(variant, comparison)
    place.run_folder(run).mkdir(parents=True)
    measure_run(run, comparison, place, commands)
    return table, comparison, read_result(place.run_folder(run)), place.run_folder(run)


def test_each_stage_is_measured_on_its_own_model(done):
    table, comparison, result, folder = done
    (text,) = comparison.texts.values()
    for stage, model in (("continued", "trained"), ("tuned", "tuned")):
        words = [folder / model, "--text", text, "--sequence-length", 32, "--json"]
        measured = json.loads(InProcess().run("eval", "midus eval", *words).output)["models"][0]["perplexity"]
        assert table.number("Wiki-PPL", stage, result) == pytest.approx(measured["perplexity"], rel=1e-9)
        assert 0 <= table.number("PIQA", stage, result) <= 100
    assert result.starts_at_base and result.tuned.losses != result.end.losses
    tuned = yaml.safe_load((folder / "tuned" / "train_config.yaml").read_text())
    assert (tuned["model_name_or_path"], tuned["trainable"], tuned["max_steps"]) == (str(folder / "trained"), "all", 2)


def test_the_table_tells_both_stages(done):
    table, _, result, _ = done
    for stage in table.options.stages:
        words = stage_table(table, stage, {ROW: [result]}, {})
        assert [row[0] for row in words.rows] == [ROW, "paper"]
        ours = dict(zip(words.head, words.rows[0], strict=True))
        assert ours["seeds"] == "1" and ours["ARC"] == "-" and float(ours["Wiki-PPL"]) > 1

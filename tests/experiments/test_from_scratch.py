"""Small models from the beginning: what is compared is of equal cost, and a run that is repeated goes on."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from experiments import from_scratch
from experiments.from_scratch import (
    CLAIMS,
    CONFIGS,
    RESULTS,
    Result,
    config_of,
    make_start,
    models_of,
    read_results,
    table_rows,
)
from midus_hf.cli.midus import main as midus_main

WORDS = "abbey able abode about above abrupt".split()


def parameters_of(model: str) -> int:
    config = AutoConfig.from_pretrained(config_of(model))
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in made.parameters())


def flops_of(model: str, capsys) -> float:
    capsys.readouterr()
    midus_main(["flops", str(config_of(model)), "--sequence-length", "256", "--json"])
    return json.loads(capsys.readouterr().out)["forward"]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.model} for {claim.beside}")
def test_compared_models_are_equal_in_what_the_table_says(claim, capsys):
    if "FLOPs" in claim.equal:
        assert flops_of(claim.model, capsys) == pytest.approx(flops_of(claim.beside, capsys), rel=0.02)
    if "parameters" in claim.equal and "twice" not in claim.equal:
        assert parameters_of(claim.model) == pytest.approx(parameters_of(claim.beside), rel=0.01)
    if "twice" in claim.equal:
        assert parameters_of(claim.model) == pytest.approx(2 * parameters_of(claim.beside), rel=0.01)


@pytest.fixture
def dictionary(tmp_path, monkeypatch):
    """A dictionary of a few words, and runs in this process."""
    for part in ("train", "validation", "held_out"):
        rows = [
            {"name": word, "text": f"{word}: {' '.join(WORDS)} {number}"} for number, word in enumerate(WORDS * 20)
        ]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(from_scratch, "gcide", lambda: tmp_path)
    here = SimpleNamespace(run=lambda command, check: midus_main(command[3:]))
    monkeypatch.setattr(from_scratch, "subprocess", here)
    return tmp_path


@pytest.fixture
def run(dictionary, tmp_path, monkeypatch):
    """Train a model for four steps with seed 3."""

    def run(model: str) -> None:
        words = ["--work", f"{tmp_path}/work", "--results", f"{tmp_path}/results", "--only", model, "--seeds", "3"]
        words += ["--max_steps", "4", "--sequence_length", "32", "--per_device_train_batch_size", "2"]
        monkeypatch.setattr(sys, "argv", ["from_scratch", *words])
        from_scratch.main()

    return run


def test_a_result_has_the_losses_on_the_way(run, tmp_path, capsys):
    run("dense")
    (result,) = read_results(tmp_path / "results")["dense"]
    assert result.seed == 3
    assert result.tokens == [64, 128, 192, 256]
    assert len(result.validation) == len(result.held_out) == 4
    assert result.learning_rate == 4e-3
    capsys.readouterr()
    run("dense")
    assert "$" not in capsys.readouterr().out, "a run whose result is there is not repeated"


def test_entries_fetch_blocks_by_their_topics(run, tmp_path):
    run("hier-ffn-document-mask")
    (result,) = read_results(tmp_path / "results")["hier-ffn-document-mask"]
    start, trained = (tmp_path / "work" / f"hier-ffn-document-mask-3{end}" for end in ("-start", ""))
    blocks = [
        (folder / "memory_bank" / "hier-ffn" / "level-1.safetensors").read_bytes() for folder in (start, trained)
    ]
    assert blocks[0] != blocks[1], "blocks are trained"
    assert len(result.held_out) == 4
    rows = [json.loads(line) for line in (tmp_path / "work" / "assigned" / "held_out.jsonl").open()]
    assert len({tuple(row["memory_ids"]) for row in rows}) > 1
    recipe = yaml.safe_load((tmp_path / "work" / "hier-ffn-document-mask-3" / "train_config.yaml").read_text())
    assert recipe["document_mask"] is True
    assert recipe["generic_share"] == 0


@pytest.mark.parametrize("model", ["dense", "olmoe", "ultramem-v2"])
def test_projections_into_the_stream_start_smaller_once(model, tmp_path):
    tokenizer = Tokenizer(WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    start = AutoModelForCausalLM.from_pretrained(make_start(model, 3, tmp_path))
    for layer in start.model.layers:
        down = layer.mlp.experts.down_proj if model == "olmoe" else layer.mlp.down_proj.weight
        for projection in (layer.self_attn.o_proj.weight, down):
            assert projection.std().item() == pytest.approx(start.config.initializer_range / 4, rel=0.02)
        assert layer.self_attn.q_proj.weight.std().item() == pytest.approx(start.config.initializer_range, rel=0.02)


def test_control_has_one_row(run, tmp_path):
    run("ultramem-v2+one-row")
    trained = AutoConfig.from_pretrained(tmp_path / "work" / "ultramem-v2+one-row-3")
    assert trained.memory[0]["n"] == trained.memory[0]["k"] == 1
    assert "ultramem-v2+one-row" in read_results(tmp_path / "results")


def result(model: str, seed: int, loss: float) -> Result:
    return Result(model, seed, 1, 1e-3, [1], [loss], [loss], "")


def test_a_row_needs_both_models_with_a_seed():
    results = {"moda": [result("moda", 0, 4.0), result("moda", 1, 4.2)], "dense-564": [result("dense-564", 0, 4.1)]}
    heading, row = table_rows(results)
    assert heading[0] == "model"
    assert row[:2] == ["moda", "dense-564"]
    assert row[-3:] == ["4.000", "4.100", "-0.100"]


def test_only_models_that_can_be_compared_are_drawn_together(monkeypatch):
    figures = []
    monkeypatch.setattr(from_scratch, "as_png", figures.append)
    models = ["dense-564", "moda", "ultramem-v2+one-row", "olmo2-moda", "hier-ffn-document-mask"]
    from_scratch.draw({model: [result(model, 0, 4.0)] for model in models})
    panels = [[line.get_label() for line in axes.get_lines()] for axes in figures[0].axes]
    assert panels == [["dense-564", "moda"], ["olmo2-moda"], ["hier-ffn-document-mask"]]


def test_page_has_the_table_of_the_results():
    page = (CONFIGS.parent.parent / "experiments" / "learning.md").read_text()
    for row in table_rows(read_results(RESULTS)):
        assert f"| {' | '.join(row)} |" in page


def test_models_that_others_are_compared_with_are_trained_first():
    names = models_of(CLAIMS)
    assert names[0] == "dense"
    assert names.index("olmoe") < names.index("ultramem-v2")
    assert {path.stem for path in CONFIGS.glob("*.json")} == {config_of(name).stem for name in names}

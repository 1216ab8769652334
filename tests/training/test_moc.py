"""A few steps of midus-train move what Mixture of Chapters read, and nothing that is frozen."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_tiny_model
from training.tiny_run import tiny_config, tiny_tokenizer

from midus_hf.training.run.train import train
from midus_hf.training.run.training_log import read_log
from tests.upscalers.checkpoints import load
from upscalers.runs.upscale import upscale

SMALL = {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 4, "layers": [1, 3]}
BANK = "model.memory_tables.chapters.0.bank"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Gives a tiny checkpoint with chapters."""

    def checkpoint(family: str = "llama", **options) -> Path:
        folder = tmp_path_factory.mktemp("moc")
        base = save_tiny_model(family, folder / "base")
        upscale(base=base, method="moc", output=folder / "model", options={**SMALL, **options}, verify=False)
        tiny_tokenizer().save_pretrained(folder / "model")
        return folder / "model"

    return checkpoint


def run(model: Path, corpus: Path, output: Path, **changes) -> tuple[dict, dict]:
    """Tensors before and after a short run."""
    train(tiny_config(model, corpus, output, **{"max_steps": 3, **changes}))
    return load_file(model / "model.safetensors"), load_file(output / "model.safetensors")


def moved(before: dict, after: dict) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_tensor_of_the_memory_moves_and_the_base_does_not(family, made, corpus, tmp_path):
    before, after = run(made(family), corpus, tmp_path / "out")
    assert moved(before, after) == {name for name in before if ".memor" in name}


def rows_with_gradient(model, tokens: torch.Tensor) -> set[int]:
    """Chapters of the bank that get a gradient."""
    model.zero_grad()
    model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
    gradient = model.get_parameter(BANK).grad.unflatten(0, (12, 2)).flatten(1)
    return {chapter for chapter in range(12) if gradient[chapter].any()}


@pytest.mark.parametrize("routing", ["sequence", "chunk", "token"])
def test_rows_of_chapters_that_nobody_chose_get_no_gradient(routing, made):
    model = load(made(routing=routing, layers=[1]), torch.float64)
    with torch.no_grad():
        model.model.layers[1].memories["chapters"].output_projection.weight.normal_()
        model.model.layers[1].memories["chapters"].router_weight.mul_(100)
    tokens = torch.arange(3, 9)[None]
    routed = model(tokens, output_router_logits=True).router_logits[0]
    chosen = set((routed[:, 1:].topk(2).indices + 1).flatten().tolist())
    assert rows_with_gradient(model, tokens) == {0} | chosen
    assert len(chosen) < 11, "so that there are chapters that nobody chose"


def test_a_step_without_decay_moves_rows_of_chosen_chapters_alone(made, corpus, tmp_path):
    """Biases leave the router no choice: of twelve chapters it opens two, beside the one that all read."""
    model = load(made())
    with torch.no_grad():
        for layer, favourites in ((1, [3, 7]), (3, [7, 11])):
            memory = model.model.layers[layer].memories["chapters"]
            memory.router_bias[favourites] = 100.0
            memory.output_projection.weight.normal_()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    before, after = run(tmp_path / "model", corpus, tmp_path / "out", trainable=["value"], max_steps=4)
    assert moved(before, after) == {BANK}
    rows = (before[BANK] != after[BANK]).any(1).unflatten(0, (12, 2))
    assert [chapter for chapter in range(12) if rows[chapter].any()] == [0, 3, 7, 11]


PROJECTIONS = {"norm_weight", *(f"{kind}_projection.weight" for kind in ("query", "key", "value", "output"))}
ROUTER = {"router_weight", "router_bias"}


@pytest.mark.parametrize(
    ("trainable", "names"),
    [(["router"], ROUTER), (["projection", "norm", "router"], PROJECTIONS | ROUTER)],
    ids=["the router alone", "all but the bank"],
)
def test_a_frozen_bank_stays_as_it_is(trainable, names, made, corpus, tmp_path):
    before, after = run(made(), corpus, tmp_path / "out", trainable=trainable)
    prefix = "memories.chapters."
    assert {name.partition(prefix)[2] for name in moved(before, after)} == names
    assert torch.equal(before[BANK], after[BANK])


def test_losses_of_routers_are_in_the_loss(made, corpus, tmp_path):
    first = {}
    for coefficient in (0.0, 10.0):
        output = tmp_path / str(coefficient)
        options = {"router_aux_loss_coef": coefficient, "router_z_loss_coef": 0.0}
        train(tiny_config(made(**options), corpus, output, max_steps=1))
        first[coefficient] = next(event["loss"] for event in read_log(output / "log.jsonl") if "loss" in event)
    # Even routing gives k = 2 times the coefficient; a router that chooses, somewhat more.
    assert 15 < first[10.0] - first[0.0] < 60


def test_activation_checkpointing_gives_the_same_weights(made, corpus, tmp_path):
    model = made(routing="token")
    results = [
        run(model, corpus, tmp_path / str(checkpointed), activation_checkpointing=checkpointed)[1]
        for checkpointed in (False, True)
    ]
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_the_config_keeps_its_entry(made, corpus, tmp_path):
    model = made(routing="token", weighting="logit_bias")
    run(model, corpus, tmp_path / "out", max_steps=1)
    before, after = (
        json.loads((folder / "config.json").read_text())["memory"] for folder in (model, tmp_path / "out")
    )
    assert before == after


def test_routing_by_prompts_is_refused_on_plain_text_before_anything_is_written(made, corpus, tmp_path):
    with pytest.raises(
        ValueError, match=r"routing is 'prompt', and plain text has no prompts; expected chats.*'chunk'"
    ):
        train(tiny_config(made(routing="prompt"), corpus, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_run_with_gradients_of_rows_moves_the_bank_as_a_dense_one_does(made, corpus, tmp_path):
    """In the first step rows that are read move alike; without decay the others keep their bytes, as in any run."""
    model, trained = made(memory_tokens=192, chapters=96, routing="sequence"), {}
    for is_sparse in (False, True):
        words = {"max_steps": 2, "warmup_ratio": 0, "sparse_values": is_sparse, "precision": "fp32"}
        before, trained[is_sparse] = run(model, corpus, tmp_path / str(is_sparse), **words)
    # The output projection starts at zero, so that the bank has a gradient from the second step on.
    torch.testing.assert_close(trained[True][BANK], trained[False][BANK], rtol=1e-3, atol=1e-5)
    unread = (trained[True][BANK] == before[BANK]).all(-1)
    assert unread.any() and not unread.all()

"""A few steps of midus train move what Mixture of Chapters read, and nothing that is frozen."""

from pathlib import Path

import pytest
import torch
from training.outcomes import logged, moved, weights
from training.tiny_run import tiny_tokenizer

from midus_hf.training.run import train
from tests.upscalers.checkpoints import load

BANK = "model.memory_tables.chapters.0.bank"


@pytest.fixture
def made(upscaled):
    """Gives a tiny checkpoint with chapters."""
    return lambda family="llama", **options: upscaled(family, "moc", **options)


@pytest.fixture
def run(config_for, tmp_path):
    """Return what trains for a few steps and gives the names of the tensors that moved."""

    def train_in(model: Path, output: str = "out", **changes) -> set[str]:
        train(config_for(output, model=model, **{"max_steps": 3, **changes}))
        return moved(model, tmp_path / output)

    return train_in


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_every_tensor_of_the_memory_moves_and_the_base_does_not(family, made, run):
    assert run(made(family)) == {name for name in weights(made(family)) if ".memor" in name}


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


def test_a_step_without_decay_moves_rows_of_chosen_chapters_alone(made, run, tmp_path):
    """Biases leave the router no choice: of twelve chapters it opens two, beside the one that all read."""
    model = load(made())
    with torch.no_grad():
        for layer, favourites in ((1, [3, 7]), (3, [7, 11])):
            memory = model.model.layers[layer].memories["chapters"]
            memory.router_bias[favourites] = 100.0
            memory.output_projection.weight.normal_()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    assert run(tmp_path / "model", trainable=["value"], max_steps=4) == {BANK}
    rows = (weights(tmp_path / "model")[BANK] != weights(tmp_path / "out")[BANK]).any(1).unflatten(0, (12, 2))
    assert [chapter for chapter in range(12) if rows[chapter].any()] == [0, 3, 7, 11]


PROJECTIONS = {"norm_weight", *(f"{kind}_projection.weight" for kind in ("query", "key", "value", "output"))}
ROUTER = {"router_weight", "router_bias"}


@pytest.mark.parametrize(
    ("trainable", "names"),
    [(["router"], ROUTER), (["projection", "norm", "router"], PROJECTIONS | ROUTER)],
    ids=["the router alone", "all but the bank"],
)
def test_a_frozen_bank_stays_as_it_is(trainable, names, made, run):
    assert {name.partition("memories.chapters.")[2] for name in run(made(), trainable=trainable)} == names


def test_losses_of_routers_are_in_the_loss(made, run, tmp_path):
    first = {}
    for coefficient in (0.0, 10.0):
        options = {"router_aux_loss_coef": coefficient, "router_z_loss_coef": 0.0}
        run(made(**options), str(coefficient), max_steps=1)
        first[coefficient] = logged(tmp_path / str(coefficient))[0]
    # Even routing gives k = 2 times the coefficient; a router that chooses, somewhat more.
    assert 15 < first[10.0] - first[0.0] < 60


def test_a_run_with_gradients_of_rows_moves_the_bank_as_a_dense_one_does(made, run, tmp_path):
    """In the first step rows that are read move alike; without decay the others keep their bytes, as in any run."""
    model = made(memory_tokens=192, chapters=96, routing="sequence")
    for is_sparse in (False, True):
        run(model, str(is_sparse), max_steps=2, warmup_steps=0, sparse_values=is_sparse)
    start, dense, by_rows = (weights(folder)[BANK] for folder in (model, tmp_path / "False", tmp_path / "True"))
    # The output projection starts at zero, so that the bank has a gradient from the second step on.
    torch.testing.assert_close(by_rows, dense, rtol=1e-3, atol=1e-5)
    unread = (by_rows == start).all(-1)
    assert unread.any() and not unread.all()

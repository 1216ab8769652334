"""Losses of routers are those of loops over tokens and chapters, whatever the rows hold."""

from functools import partial

import pytest
import torch
from memory.chapter_layers import by_loops, indices, layer, places_of, states

from midus_hf.memories.hosting.parts import TokenPlaces
from midus_hf.memories.hosting.service import RouterReports
from midus_hf.memories.moc.layer import balance_loss, z_loss


def counts(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize(
    "loss", [lambda logits, of: balance_loss(logits, torch.tensor([[3, 2], [0, 1], [1, 3]]), of), z_loss]
)
def test_router_losses_sum_in_float32_and_ignore_padding(loss):
    half = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert loss(half, counts(1, 2, 1)).dtype == torch.float32
    assert loss(half, counts(1, 2, 1)).item() == pytest.approx(loss(half.double(), counts(1, 2, 1)).item(), rel=1e-5)
    assert loss(half, counts(0, 0, 0)).item() == 0


def told(memory, hidden_states, **inputs):
    reports = RouterReports(needs_gradient=True)
    memory(hidden_states, report=partial(reports.store, "chapters", 0), **inputs)
    (logits,) = reports.logits()
    return logits, reports.loss()


def loss_by_loops(memory, reads) -> torch.Tensor:
    """The loss of a layer, one token and one chapter at a time; which chapters were chosen has no gradient."""
    options, tokens = memory.options, len(reads)
    candidates = range(0 if options.balance == "released" else options.shared_chapters, options.chapters)
    chosen, probability, squares = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0.0), 0.0
    for read in reads.values():
        powers = {chapter: read.logits[chapter].exp() for chapter in candidates}
        total = sum(powers.values())
        squares += total.log() ** 2 / tokens
        for chapter in candidates:
            chosen[chapter] += (chapter in read.chosen) / tokens
            probability[chapter] += powers[chapter] / total / tokens
    balance = len(candidates) * sum(chosen[chapter] * probability[chapter] for chapter in candidates)
    return options.router_aux_loss_coef * balance + options.router_z_loss_coef * squares


MASKS = {
    "whole": [[1] * 8] * 2,
    "right": [[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [0] * 8],
}
STARTS = torch.zeros(2, 8, dtype=torch.bool)
STARTS[0, 3] = STARTS[1, 7] = True
# Where the tokens of rows stand, and the indices of each document.
ROWS = {name: (places_of(mask), indices(mask)) for name, mask in MASKS.items()}
ROWS["documents"] = (TokenPlaces(None, STARTS), [[[0, 1, 2], [3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6], [7]]])


@pytest.mark.parametrize("options", [{}, {"balance": "released"}, {"shared_chapters": 0, "k": 3}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("routing", ["chunk", "token", "sequence"])
def test_layer_reports_the_loss_of_loops(routing, rows, options):
    memory = layer(routing=routing, router_aux_loss_coef=0.7, router_z_loss_coef=0.3, **options)
    with torch.no_grad():
        memory.router_weight.mul_(0.4)
    places, documents = ROWS[rows]
    hidden_states = states(len(documents))
    logits, loss = told(memory, hidden_states, tokens=places)
    assert logits.shape[-1] == 8
    expected = loss_by_loops(memory, by_loops(memory, hidden_states, documents))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    wanted = [hidden_states, memory.router_weight, memory.router_bias]
    for gradient, by_loop in zip(*(torch.autograd.grad(each, wanted) for each in (loss, expected)), strict=True):
        assert gradient.any()
        torch.testing.assert_close(gradient, by_loop, rtol=1e-5, atol=1e-7)


def test_loss_is_the_mean_of_layers_and_sum_of_memories():
    reports = RouterReports()
    assert reports.loss() is None
    assert reports.logits() == ()
    for layer_index, name, loss in ((3, "a", 5.0), (1, "a", 1.0), (2, "b", 10.0)):
        reports.store(name, layer_index, torch.full((1, 8), loss), torch.tensor(loss))
    assert reports.loss().item() == (5 + 1) / 2 + 10
    assert [logits[0, 0].item() for logits in reports.logits()] == [1, 10, 5], "in the order of layers"
    reports.store("a", 1, torch.zeros(1, 8), torch.tensor(3.0))  # a layer that is computed again
    assert reports.loss().item() == (5 + 3) / 2 + 10
    assert len(reports.logits()) == 3


def test_router_without_gradients_is_refused():
    message = r"memory 'chapters' in layer 0 runs without gradients .*; expected .*\{'use_reentrant': False\}\."
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        told(layer(), states())

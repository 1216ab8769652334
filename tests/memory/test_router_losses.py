"""Losses of routers, by numbers that are written out and by loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory.chapter_layers import WIDTH, by_loops, indices, layer, places_of, states

from midus_hf.memories.chapters.layer import balance_loss, z_loss
from midus_hf.memories.hosting.reports import RouterReports
from midus_hf.memories.hosting.token_places import TokenPlaces

ROUTINGS = ("chunk", "token", "sequence")

# Three stretches over four chapters, of probabilities 1/8, 1/8, 1/4, 1/2 or a rotation of these.
PROBABILITIES = torch.tensor(
    [[0.125, 0.125, 0.25, 0.5], [0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.125, 0.25]], dtype=torch.float64
)
LOGITS = PROBABILITIES.log() + torch.tensor([[0.0], [1.0], [-2.0]], dtype=torch.float64)  # log-sum-exp 0, 1, -2
CHOSEN = torch.tensor([[3, 2], [0, 1], [1, 3]])


def counts(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_balance_is_k_where_all_is_even_and_more_where_all_is_one():
    even, everyone = torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    assert balance_loss(even, everyone, counts(1, 1, 1, 1)).item() == pytest.approx(2)
    certain = torch.tensor([[50.0, 50.0, 0.0, 0.0]]).expand(4, 4)
    assert balance_loss(certain, torch.tensor([[0, 1]]).expand(4, 2), counts(1, 1, 1, 1)).item() == pytest.approx(4)


@pytest.mark.parametrize("loss", [lambda logits, of: balance_loss(logits, CHOSEN, of), z_loss])
def test_nothing_but_padding_gives_zero(loss):
    assert loss(LOGITS, counts(0, 0, 0)).item() == 0


def test_half_precision_is_summed_in_float32():
    half, of = LOGITS.bfloat16(), counts(1, 2, 1)
    for loss in (lambda logits, of: balance_loss(logits, CHOSEN, of), z_loss):
        assert loss(half, of).dtype == torch.float32
        assert loss(half, of).item() == pytest.approx(loss(half.double(), of).item(), rel=1e-5)


def test_gradients_pass_a_numerical_check_and_frequencies_are_constants():
    logits = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: balance_loss(logits, CHOSEN, counts(1, 2, 1)), logits)
    assert torch.autograd.gradcheck(lambda logits: z_loss(logits, counts(1, 2, 1)), logits)
    # d/dz_j of C * sum_i f_i p_i, with f fixed, is C * p_j * (f_j - sum_i f_i p_i).
    (gradient,) = torch.autograd.grad(balance_loss(logits[:1], CHOSEN[:1], counts(1)), logits)
    expected = [4 * p * (f - 0.75) for p, f in zip(PROBABILITIES[0].tolist(), (0, 0, 1, 1), strict=True)]
    assert gradient[0].tolist() == pytest.approx(expected)


def told(memory, hidden_states, **inputs):
    """What a layer tells of its router: logits and loss."""
    reports = RouterReports(needs_gradient=True)
    memory(hidden_states, report=reports.report_for("chapters", 0), **inputs)
    (logits,) = reports.logits()
    return logits, reports.loss()


def loss_by_loops(memory, reads) -> float:
    """The loss of a layer, one token and one chapter at a time."""
    options, tokens = memory.options, len(reads)
    candidates = range(0 if options.balance == "released" else options.shared_chapters, options.chapters)
    chosen, probability = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0.0)
    squares = 0.0
    for read in reads.values():
        powers = {chapter: math.exp(read.logits[chapter].item()) for chapter in candidates}
        total = sum(powers.values())
        squares += math.log(total) ** 2 / tokens
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


@pytest.mark.parametrize(
    "options",
    [{}, {"balance": "released"}, {"shared_chapters": 2}, {"shared_chapters": 0, "k": 3}],
    ids=str,
)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_layer_tells_the_loss_of_its_tokens(routing, mask, options):
    memory = layer(routing=routing, router_aux_loss_coef=0.7, router_z_loss_coef=0.3, **options)
    with torch.no_grad():
        memory.router_weight.mul_(0.4)
    hidden_states, mask = states(len(MASKS[mask])), MASKS[mask]
    logits, loss = told(memory, hidden_states, tokens=places_of(mask))
    assert logits.shape[-1] == 8
    assert loss.item() == pytest.approx(
        loss_by_loops(memory, by_loops(memory, hidden_states, indices(mask))), rel=1e-6
    )
    loss.backward()
    assert memory.router_weight.grad.any() and memory.router_bias.grad.any() and hidden_states.grad.any()
    assert memory.bank.grad is None


EVEN, COLLAPSED = torch.arange(6).view(3, 2), torch.tensor([[0, 1]] * 3)


def loss_of_choices(choices: torch.Tensor, shared_logit: float, **options) -> float:
    """The load-balance loss of a layer with one shared chapter and six routed ones, whose router chooses these, one token each."""
    memory = layer(
        routing="token", memory_tokens=14, chapters=7, router_aux_loss_coef=1.0, router_z_loss_coef=0.0, **options
    )
    wanted = torch.zeros(len(choices), 7, dtype=torch.float64).scatter_(1, choices + 1, 4.0)
    wanted[:, 0] = shared_logit
    hidden_states = states(1, len(choices)).detach()
    memory.router_weight.data = torch.linalg.lstsq(
        memory.route(hidden_states).pooled.states, wanted
    ).solution.T.contiguous()
    memory.router_bias.data.zero_()
    return told(memory, hidden_states)[1].item()


@settings(max_examples=25)
@given(shared_logit=st.floats(-20, 20))
def test_a_collapsed_router_costs_more_than_an_even_one_whatever_the_shared_logit(shared_logit):
    assert loss_of_choices(EVEN, shared_logit) == pytest.approx(2.0)
    collapsed = loss_of_choices(COLLAPSED, shared_logit)
    assert collapsed > 5.0
    assert collapsed == pytest.approx(loss_of_choices(COLLAPSED, 0.0))


@pytest.mark.parametrize("routing", ["chunk", "token", "sequence"])
def test_documents_count_by_their_tokens(routing):
    memory = layer(routing=routing, router_aux_loss_coef=0.7, router_z_loss_coef=0.3)
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[0, 3] = starts[1, 7] = True
    documents = [[[0, 1, 2], [3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 5, 6], [7]]]
    hidden_states = states()
    _, loss = told(memory, hidden_states, tokens=TokenPlaces(None, starts))
    assert loss.item() == pytest.approx(loss_by_loops(memory, by_loops(memory, hidden_states, documents)), rel=1e-6)


def test_padding_tells_nothing():
    memory, hidden_states = layer(), states(3).detach()
    mask = torch.tensor(MASKS["left"], dtype=torch.bool).unsqueeze(-1)
    _, loss = told(memory, hidden_states, tokens=places_of(MASKS["left"]))
    _, noisy = told(memory, torch.where(mask, hidden_states, 50.0), tokens=places_of(MASKS["left"]))
    torch.testing.assert_close(noisy, loss)


def test_a_report_is_the_mean_of_layers_and_the_sum_of_memories():
    reports = RouterReports()
    assert reports.loss() is None and reports.logits() == ()
    for layer_index, name, loss in ((3, "a", 5.0), (1, "a", 1.0), (2, "b", 10.0)):
        reports.report_for(name, layer_index).tell(torch.full((1, WIDTH), loss), torch.tensor(loss))
    assert reports.loss().item() == (5 + 1) / 2 + 10
    assert [logits[0, 0].item() for logits in reports.logits()] == [1, 10, 5], "in the order of layers"
    reports.report_for("a", 1).tell(torch.zeros(1, WIDTH), torch.tensor(3.0))  # a layer that is computed again
    assert reports.loss().item() == (5 + 3) / 2 + 10 and len(reports.logits()) == 3


def test_a_router_that_no_gradient_reaches_is_refused():
    message = (
        r"the router of memory 'chapters' in layer 0 runs without gradients in a pass that trains, as under reentrant activation "
        r"checkpointing; expected gradient_checkpointing_kwargs=\{'use_reentrant': False\}\."
    )
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        told(layer(), states())

"""The balance loss: 1 for even selection, more for collapsed, by an independent loop, and with gradients for keys."""

import math

import pytest
import torch
from memory.building import retrieving

from midus_hf.memory import balance
from midus_hf.memory.balance import balance_loss
from midus_hf.memory.headwise import HeadwiseMemory
from midus_hf.memory.retrieval import RetrievalMemory

HEADS, WIDTH = 3, 24


@pytest.fixture
def make(memory_type):
    """Makes a memory of each type, in turn, in float64."""

    def made(**options) -> RetrievalMemory:
        size = 15 if memory_type == "linear" else 6
        return retrieving(memory_type, hidden_size=WIDTH, num_heads=HEADS, size=size, **options).double()

    return made


def attention_output(tokens=11, seed=1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)


def keys_of(memory: RetrievalMemory) -> list[torch.nn.Parameter]:
    return [getattr(memory, name) for name in memory.names_of("key")]


def loss_by_loop(memory: RetrievalMemory, given: torch.Tensor) -> float:
    """The loss as it is written, one head, side, token and sub-key at a time."""
    queries = memory.queries(given, track_statistics=False).detach().flatten(0, -3).tolist()  # [S, H, width]
    keys = keys_of(memory)
    width = len(queries[0][0]) // len(keys)
    losses = []
    for head in range(HEADS):
        for side, side_keys in enumerate(keys):
            sub_keys = side_keys[head].tolist()
            selected, probability = [0.0] * len(sub_keys), [0.0] * len(sub_keys)
            for token in queries:
                asked = token[head][side * width : (side + 1) * width]
                scores = [sum(a * b for a, b in zip(asked, key, strict=True)) for key in sub_keys]
                for i in sorted(range(len(scores)), key=lambda i: -scores[i])[: memory.k]:
                    selected[i] += 1 / (memory.k * len(queries))
                powers = [math.exp(score / memory.temperature) for score in scores]
                for i, power in enumerate(powers):
                    probability[i] += power / sum(powers) / len(queries)
            losses.append(len(sub_keys) * sum(f * p for f, p in zip(selected, probability, strict=True)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.3}, {"query_norm": "layer"}, {"query_norm": "batch"}], ids=str
)
def test_it_is_what_a_loop_over_tokens_and_sub_keys_gives(make, options):
    memory, given = make(**options), attention_output()
    assert balance_loss(memory, given).item() == pytest.approx(loss_by_loop(memory, given), rel=1e-12)


def test_a_stretch_of_tokens_at_a_time_gives_the_same_loss_and_gradients(make, monkeypatch):
    memory, given = make(), attention_output()
    wanted = [*keys_of(memory), given]
    whole = balance_loss(memory, given)
    gradients = torch.autograd.grad(whole, wanted)
    monkeypatch.setattr(balance, "_MOST_SCORES", 4 * HEADS * sum(keys.shape[1] for keys in keys_of(memory)))
    longest = []
    score, made_by = memory.sub_key_scores, longest.append
    monkeypatch.setattr(memory, "sub_key_scores", lambda query: made_by(len(query)) or score(query))
    stretches = balance_loss(memory, given)
    assert max(longest) == 4
    torch.testing.assert_close(stretches, whole)
    torch.testing.assert_close(torch.autograd.grad(stretches, wanted), gradients)


def test_the_mean_of_several_processes_is_the_loss_of_their_whole_batch_and_so_are_gradients(make):
    memory, given = make(), attention_output()
    whole = balance_loss(memory, given)
    gradients = torch.autograd.grad(whole, [*keys_of(memory), given])
    parts, sent = given.split([4, 7], dim=1), []  # processes need not have as many tokens

    def send(message: torch.Tensor) -> torch.Tensor:
        sent.append(message)
        return message

    for part in parts:
        balance_loss(memory, part, send)
    losses = [balance_loss(memory, part, lambda _: torch.stack(sent).mean(0)) for part in parts]
    assert len(sent) == 2, "one message for each forward pass"
    mean = torch.stack(losses).mean()
    torch.testing.assert_close(mean, whole)
    torch.testing.assert_close(torch.autograd.grad(mean, [*keys_of(memory), given]), gradients)


def test_gradients_of_keys_and_input_are_right_and_not_zero(make):
    memory, given = make(temperature=0.5), attention_output(tokens=3)
    parameters = keys_of(memory)
    assert torch.autograd.gradcheck(lambda *_: balance_loss(memory, given), [*parameters, given])
    balance_loss(memory, given).backward()
    assert all(parameter.grad.any() for parameter in parameters) and given.grad.any()
    assert memory.value_bank.grad is None


def test_selections_are_a_constant_of_the_gradient(make):
    """A step against the gradient lowers the probability of what is selected most."""
    memory, given = make(), attention_output()
    before = balance_loss(memory, given)
    gradients = torch.autograd.grad(before, keys_of(memory))
    with torch.no_grad():
        for parameter, gradient in zip(keys_of(memory), gradients, strict=True):
            parameter -= 1e-2 * gradient
    assert balance_loss(memory, given) < before


def test_equal_scores_give_one(make):
    memory = make()
    with torch.no_grad():
        for parameter in keys_of(memory):
            parameter.zero_()
    assert balance_loss(memory, attention_output()).item() == pytest.approx(1)


def chooser(scale: float) -> HeadwiseMemory:
    """A memory of 4 sub-keys per side, of which a query of one-hot halves picks the one it names."""
    memory = retrieving("headwise", hidden_size=8, num_heads=1, size=4, k=1).double()
    with torch.no_grad():
        memory.row_keys.copy_(scale * torch.eye(4))
        memory.column_keys.copy_(scale * torch.eye(4))
    return memory


def test_selection_that_is_uniform_over_tokens_gives_one_and_collapsed_selection_gives_n():
    memory = chooser(scale=50.0)
    one_hot = torch.eye(4, dtype=torch.float64)
    even = torch.cat([one_hot, one_hot.roll(1, 0)], dim=-1)[None]  # [1, 4, 8]
    collapsed = even[:, :1].expand(1, 4, 8)
    half = torch.cat([even[:, :2], even[:, :2]], dim=1)
    assert balance_loss(memory, even).item() == pytest.approx(1)
    assert balance_loss(memory, half).item() == pytest.approx(2)
    assert balance_loss(memory, collapsed).item() == pytest.approx(4)
    assert 1 < balance_loss(chooser(scale=1.0), collapsed).item() < 4


def test_batch_norm_learns_nothing_from_it(make):
    memory = make(query_norm="batch").train()
    before = {name: buffer.clone() for name, buffer in memory.named_buffers()}
    balance_loss(memory, attention_output()).backward()
    memory.retrieve(attention_output())
    assert len(before) == 2
    assert all(torch.equal(buffer, before[name]) for name, buffer in memory.named_buffers())
    memory(attention_output())
    assert not any(torch.equal(buffer, before[name]) for name, buffer in memory.named_buffers())


def test_half_precision_is_scored_in_float32(make):
    memory, given = make(), attention_output()
    lowered = memory.to(torch.bfloat16)
    loss = balance_loss(lowered, given.detach().bfloat16())
    assert loss.dtype == torch.float32
    wide = balance_loss(lowered.double(), given.detach().bfloat16().double())
    assert loss.item() == pytest.approx(wide.item(), rel=2e-2)

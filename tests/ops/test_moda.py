"""Attention over the depth, and its union with attention over the sequence, against loops over every score."""

import itertools

import pytest
import torch

from midus_hf.ops.moda.op import depth_attention, joint_attention, joint_shares, sequence_lse, sequence_weights

# Query heads per key/value head, key/value heads, tokens, width.
SHAPES = [(1, 1, 3, 4), (3, 2, 4, 6)]


def drawn(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def heads_of(group, kv_heads, tokens, width, slots=3):
    """A query, a key, a value, keys and values of slots, and gates of heads."""
    query = drawn(2, group * kv_heads, tokens, width)
    key, value = (drawn(2, kv_heads, tokens, width, seed=seed) for seed in (1, 2))
    keys, values = (
        [drawn(2, kv_heads, tokens, width, seed=10 * part + slot) for slot in range(slots)] for part in (1, 2)
    )
    gate = drawn(group * kv_heads, seed=5).detach().sigmoid().requires_grad_()
    return query, key, value, keys, values, gate


def attend(query, key, value, keys, values, gate, scaling, softcap=None, added=False):
    """What each head reads of the sequence and of the slots of its own position, one score at a time.

    A gate `[H]` joins them; None stands for one softmax over both. As far as it is closed, what is read of the depth is
    dropped, or added.
    """
    batch, heads, tokens, width = query.shape
    group = heads // key.shape[1]

    def read(queries, slots):
        """Return the sum of exponentials, and what is read times that."""
        masses = []
        for slot, _ in slots:
            score = sum(queries[index] * slot[index] for index in range(width)) * scaling
            masses.append((score if softcap is None else softcap * torch.tanh(score / softcap)).exp())
        return sum(masses), sum(mass * slot for mass, (_, slot) in zip(masses, slots, strict=True))

    rows = []
    for row, head, token in itertools.product(range(batch), range(heads), range(tokens)):
        queries, of = query[row, head, token], head // group
        earlier = [(key[row, of, other], value[row, of, other]) for other in range(token + 1)]
        slots = [(one[row, of, token], other[row, of, token]) for one, other in zip(keys, values, strict=True)]
        (total, of_sequence), (depth_total, of_depth) = read(queries, earlier), read(queries, slots)
        both = (of_sequence + of_depth) / (total + depth_total)
        closed = of_sequence / total + (of_depth / depth_total if added else 0)
        rows.append(both if gate is None else (1 - gate[head]) * closed + gate[head] * both)
    return torch.stack(rows).view(batch, heads, tokens, width)


def joined(query, key, value, keys, values, gate, scaling, softcap=None, added=False):
    scores = (query.unflatten(1, (key.shape[1], -1)) @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    group = query.shape[1] // key.shape[1]
    sequence = scores.softmax(-1) @ value.repeat_interleave(group, 1)
    lse = sequence_lse(query, key, None, True, scaling, softcap)
    gate = None if gate is None else gate[:, None]
    return joint_attention(sequence, lse, *depth_attention(query, keys, values, scaling, softcap), gate, added)


JOININGS = ["added", "interpolated", "joint"]


@pytest.mark.parametrize("joining", JOININGS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_joint_attention_and_gradients_equal_loops(shape, softcap, joining):
    *heads, gate = heads_of(*shape)
    query, key, value, keys, values = heads
    leaves = (query, key, value, *keys, *values, *([] if joining == "joint" else [gate]))
    gate, added = None if joining == "joint" else gate, joining == "added"
    got, expected = (of(*heads, gate, 0.4, softcap, added) for of in (joined, attend))
    torch.testing.assert_close(got, expected)
    along = drawn(*got.shape, seed=9).detach()
    for pair in zip(*(torch.autograd.grad(output, leaves, along) for output in (got, expected)), strict=True):
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("mask", [None, "bool", "added", "per row"])
def test_sequence_lse_passes_gradcheck(mask, softcap, monkeypatch):
    monkeypatch.setattr("midus_hf.ops.moda.op._CHUNK", 2)
    query, key = drawn(2, 4, 5, 3), drawn(2, 2, 5, 3, seed=1)
    read = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    read |= torch.eye(5, dtype=torch.bool)
    masks = {"bool": read, "added": torch.where(read, 0.0, -1e4).double(), "per row": read[:, :, -1:] | True}

    def lse(query, key):
        return sequence_lse(query, key, masks.get(mask), mask is None, 0.5, softcap)

    assert torch.autograd.gradcheck(lse, (query, key), fast_mode=True)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_scores_are_summed_exactly(dtype, softcap):
    halves = [(drawn(1, heads, 64, 32, seed=heads).detach() * 3).to(dtype).requires_grad_() for heads in (4, 2)]
    exact = [half.detach().double().requires_grad_() for half in halves]
    sums, expected = (sequence_lse(*pair, None, True, 32**-0.5, softcap) for pair in (halves, exact))
    assert sums.dtype == torch.float32
    assert expected.abs().max() > 15  # where a half precision number is off by 0.06
    torch.testing.assert_close(sums.double(), expected, rtol=0, atol=1e-4)
    along = drawn(*expected.shape, seed=9).detach()
    (sums * along).sum().backward()
    (expected * along).sum().backward()
    for half, right in zip(halves, exact, strict=True):
        torch.testing.assert_close(half.grad, right.grad.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_row_without_sequence_reads_only_the_depth():
    query, key = drawn(1, 2, 3, 4), drawn(1, 1, 3, 4, seed=1)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask[:, :, 0] = False
    lse = sequence_lse(query, key, mask, False, 0.5)
    assert torch.equal(lse[:, :, 0], torch.full((1, 2), float("-inf"), dtype=torch.float64))
    lse[:, :, 1:].sum().backward()
    assert not query.grad[:, :, 0].any()
    assert query.grad[:, :, 1:].all()
    assert key.grad.isfinite().all()
    sequence, depth = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    joint = joint_attention(sequence, lse.detach().float(), depth, torch.zeros(1, 2, 3))
    assert torch.equal(joint[:, :, 0], depth[:, :, 0])


@pytest.mark.parametrize("empty", ["sequence", "depth", "both"])
def test_empty_parts_have_no_gradient_and_no_share(empty):
    """As rows of padding, whose queries read nothing of a sequence and no pack."""
    parts, is_empty = [drawn(1, 2, 3, 4, seed=seed) for seed in (1, 2)], torch.tensor([False, True, False])
    sums = [drawn(1, 2, 3, seed=seed) for seed in (3, 4)]
    for gate in (None, torch.full((3,), 0.5)):
        masked = [
            lse.masked_fill(is_empty, float("-inf")) if empty in (name, "both") else lse
            for name, lse in zip(("sequence", "depth"), sums, strict=True)
        ]
        joint = joint_attention(parts[0], masked[0], parts[1], masked[1], gate)
        gradients = torch.autograd.grad(joint.sum(), [*parts, *sums])
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert joint.isfinite().all()
        if empty != "sequence":
            assert torch.equal(joint[:, :, 1], parts[0][:, :, 1])
            assert not gradients[1][:, :, 1].any()
        assert not any(gradient[:, :, 1].any() for gradient in gradients[2:]) or empty == "sequence"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_closed_gate_changes_no_bit_and_open_gate_is_default(dtype):
    sequence, depth = (drawn(2, 3, 4, 5, seed=seed, dtype=dtype).detach() for seed in (1, 2))
    sums = [drawn(2, 3, 4, seed=seed, dtype=torch.float32).detach() * 40 for seed in (3, 4)]
    closed, opened, nothing = torch.zeros(3, 1), torch.ones(3, 1), torch.zeros_like(depth)
    interpolated = joint_attention(sequence, sums[0], depth, sums[1], closed)
    assert torch.equal(interpolated, sequence)
    assert interpolated.dtype == dtype
    assert torch.equal(joint_attention(sequence, sums[0], nothing, sums[1], closed, True), sequence)
    wide = torch.promote_types(dtype, torch.float32)
    both = (sequence.to(wide) + depth.to(wide)).to(dtype)
    assert torch.equal(joint_attention(sequence, sums[0], depth, sums[1], closed, True), both)
    of_one_softmax = joint_attention(sequence, sums[0], depth, sums[1])
    assert not torch.equal(of_one_softmax, sequence)
    for added in (False, True):
        assert torch.equal(of_one_softmax, joint_attention(sequence, sums[0], depth, sums[1], opened, added))


@pytest.mark.parametrize("joining", JOININGS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_joint_shares_equal_those_of_loops(shape, softcap, joining):
    query, key, _, keys, _, gate = heads_of(*shape)
    gate, added = None if joining == "joint" else gate, joining == "added"
    slots = [torch.zeros_like(key) for key in keys]
    for number, slot in enumerate(slots):  # values that tell which slot they are of
        slot[..., number] = 1
    read = attend(query, key, torch.zeros_like(key), keys, slots, gate, 0.4, softcap, added=added)[..., : len(keys)]
    nothing = [torch.zeros_like(key) for key in keys]
    of_sequence = attend(query, key, torch.ones_like(key), keys, nothing, gate, 0.4, softcap, added=added)[..., 0]
    lse = sequence_lse(query, key, None, True, 0.4, softcap)
    result = joint_shares(query, keys, lse, 0.4, softcap, None if gate is None else gate[:, None], added)
    for ours, loops in zip(result, (read, of_sequence), strict=True):
        torch.testing.assert_close(ours, loops.detach())
        assert not ours.requires_grad


def test_sequence_weights_are_a_softmax_or_zero():
    query, key = drawn(2, 4, 5, 3), drawn(2, 2, 5, 3, seed=1)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 0.5
    ahead = torch.ones(5, 5, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(ahead, float("-inf")).softmax(-1).detach()
    torch.testing.assert_close(sequence_weights(query, key, None, True, 0.5), expected)
    mask = ~ahead[None, None].clone()
    mask[:, :, 2] = False
    masked = sequence_weights(query, key, mask, False, 0.5)
    assert not masked[:, :, 2].any()
    torch.testing.assert_close(masked[:, :, [0, 1, 3, 4]], expected[:, :, [0, 1, 3, 4]])

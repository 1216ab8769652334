"""One kernel for sequence and depth, against one softmax over both in float64: outputs and every gradient."""

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from pairs import by_default

from benchmarks.depth_cost.fused import FusedAttention, fused_attention
from midus_hf.ops.depth.op import depth_attention
from midus_hf.ops.depth.reference import joint_attention

# The most precise that kernels are run with; GPUs have no room for tiles of float32, Triton's interpreter has.
EXACT = torch.float16 if DEVICE == "cuda" else torch.float32


def inputs(group=2, width=16, slots=3, tokens=5, dtype=EXACT, kv_heads=2, texts=2):
    """Return a query, key and value, and keys and values of slots: `[B, T, H, d]` in memory, seen as `[B, H, T, d]`."""
    generator = torch.Generator().manual_seed(0)

    def heads(count):
        return torch.randn(texts, tokens, count, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)

    made = {"query": heads(group * kv_heads), "key": heads(kv_heads), "value": heads(kv_heads)}
    return made | {f"{part} {slot}": heads(kv_heads) for part in ("keys", "values") for slot in range(slots)}


def slots_of(leaves, part):
    return [leaf for name, leaf in leaves.items() if name.startswith(f"{part} ")]


def reference(leaves):
    """Both by the reference, every score at once."""
    query, key = leaves["query"], leaves["key"]
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    scaling = query.shape[-1] ** -0.5
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
    sequence = scores.softmax(-1) @ leaves["value"].repeat_interleave(group, 1)
    keys, values = (slots_of(leaves, part) for part in ("keys", "values"))
    depth, depth_lse = depth_attention(query, keys, values, scaling, backend="reference")
    return joint_attention(sequence, scores.logsumexp(-1), depth, depth_lse, None, False)


def results(run, made, dtype):
    """Return the output and the gradient of each tensor, by name."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in made.items()}
    output = run(leaves)
    along = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, made["query"].dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), along.to(output.dtype))
    return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True))


def assert_equals_float64(made):
    dtype = made["query"].dtype
    expected = results(reference, made, torch.float64)
    computed = results(lambda leaves: FusedAttention.apply(*leaves.values()), made, dtype)
    for name, exact in expected.items():
        assert_close(name, computed[name], exact, dtype)


SIZES = [
    (1, 64, 5, 131, EXACT),  # three tiles of queries
    (1, 80, 3, 65, torch.bfloat16),
    (2, 256, 2, 41, EXACT),
    (3, 64, 70, 29, torch.float16),
    (4, 128, 7, 17, EXACT),
    (6, 96, 3, 23, EXACT),
    (7, 128, 3, 1, torch.bfloat16),
    (8, 80, 64, 9, torch.bfloat16),
    (64, 16, 2, 5, EXACT),
    (3, 128, 1, 43, EXACT),
]
MORE_SIZES = [
    (2, 96, 33, 3, EXACT),
    (4, 80, 3, 35, EXACT),
    (6, 256, 2, 11, torch.bfloat16),
    (7, 64, 33, 19, EXACT),
    (8, 64, 5, 33, EXACT),
    (5, 20, 3, 67, EXACT),
]


@pytest.mark.parametrize("group, width, slots, tokens, dtype", by_default(SIZES, [*SIZES, *MORE_SIZES]))
def test_every_size(group, width, slots, tokens, dtype):
    assert_equals_float64(inputs(group, width, slots, tokens, dtype))


LAYOUTS = {
    "heads first": lambda heads: heads.contiguous(),
    "one of several": lambda heads: torch.stack([heads, heads], dim=-2)[..., 1, :],
    "every other number": lambda heads: torch.stack([heads, heads], dim=-1)[..., 0],
    "behind one number": lambda heads: torch.cat([heads.new_zeros(1), heads.flatten()])[1:].view(heads.shape),
}


def test_slots_may_each_lie_otherwise():
    made = inputs(slots=7, tokens=13)
    layouts = list(LAYOUTS.values())
    for number in range(7):
        made[f"keys {number}"] = layouts[number % 4](made[f"keys {number}"])
        made[f"values {number}"] = layouts[number % 3](made[f"values {number}"])
    assert_equals_float64(made)


@pytest.mark.parametrize("far", [30.0, -30.0])
def test_slots_that_score_far_from_the_sequence_leave_nothing_that_is_no_number(far):
    """As in pretrained models: by e^30 and more, and by so much less that nothing is read of them."""
    made = inputs(tokens=9)
    made["query"] = abs(far) * made["query"]
    made |= {f"keys {slot}": far / 5 * made["query"][:, ::2] for slot in range(3)}
    computed = results(lambda leaves: FusedAttention.apply(*leaves.values()), made, EXACT)
    expected = results(reference, made, torch.float64)
    assert_close("output", computed["output"], expected["output"], torch.bfloat16)  # of scores in the hundreds
    assert all(tensor.isfinite().all() for tensor in computed.values())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"group": 65},
            r"cannot read sequence and depth: 65 query heads read each head of keys; expected 64 or fewer\.",
        ),
        ({"dtype": torch.float32}, r"heads are torch\.float32; expected bfloat16 or float16\."),
    ],
    ids=["group", "dtype"],
)
def test_what_the_kernels_cannot_take_is_refused(sizes, message):
    made = inputs(**{"dtype": torch.bfloat16} | sizes)
    parts = (slots_of(made, part) for part in ("keys", "values"))
    with pytest.raises(ValueError, match=message):
        fused_attention(made["query"], made["key"], made["value"], *parts)

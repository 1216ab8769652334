"""One kernel for sequence and depth, against one softmax over both in float64: outputs and every gradient."""

import dataclasses

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from ops.laws import assert_equals_reference
from ops.table import OpCase
from pairs import by_default

from benchmarks.fused_depth import gradients as fused_gradients_triton
from benchmarks.fused_depth import op as fused_depth
from benchmarks.fused_depth.forward import triton_fused_attention
from benchmarks.fused_depth.gradients import triton_fused_gradients
from benchmarks.fused_depth.op import fused_attention, fused_attention_op
from midus_hf.ops.depth.op import depth_attention
from midus_hf.ops.depth.reference import joint_attention

JOININGS = ("joint", "interpolated", "added")
# The most precise that kernels are run with; GPUs have no room for tiles of float32, Triton's interpreter has.
EXACT = torch.float16 if DEVICE == "cuda" else torch.float32


def drawn(texts, count, tokens, width, generator, dtype):
    """As a model has them: `[B, T, H, d]` in memory, seen as `[B, H, T, d]`."""
    numbers = torch.randn(texts, tokens, count, width, generator=generator)
    return numbers.to(DEVICE, dtype).transpose(1, 2)


def inputs(group=2, width=16, slots=3, tokens=5, joining="joint", dtype=EXACT, kv_heads=2, texts=2):
    """By name: a query, key and value, keys and values of slots, and gates of heads unless both are one softmax."""
    generator = torch.Generator().manual_seed(0)

    def heads(count):
        return drawn(texts, count, tokens, width, generator, dtype)

    made = {"query": heads(group * kv_heads), "key": heads(kv_heads), "value": heads(kv_heads)}
    made |= {f"{part} {slot}": heads(kv_heads) for part in ("keys", "values") for slot in range(slots)}
    gate = torch.rand(group * kv_heads, generator=generator).to(DEVICE)
    return made if joining == "joint" else made | {"gate": gate}


def slots_of(leaves, part):
    return [leaf for name, leaf in leaves.items() if name.startswith(f"{part} ")]


def reference(leaves, is_causal, added):
    """Both by the reference, every score at once."""
    query, key = leaves["query"], leaves["key"]
    group, tokens = query.shape[1] // key.shape[1], query.shape[2]
    scaling = query.shape[-1] ** -0.5
    scores = query @ key.repeat_interleave(group, 1).mT * scaling
    if is_causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
    sequence = scores.softmax(-1) @ leaves["value"].repeat_interleave(group, 1)
    keys, values = (slots_of(leaves, part) for part in ("keys", "values"))
    depth, depth_lse = depth_attention(query, keys, values, scaling, backend="reference")
    gate = leaves["gate"][:, None] if "gate" in leaves else None
    return joint_attention(sequence, scores.logsumexp(-1), depth, depth_lse, gate, added)


def expected_of(made, is_causal=True, added=False):
    """Output and every gradient in float64, and the gradient of the output."""
    leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in made.items()}
    output = reference(leaves, is_causal, added)
    along = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE, made["query"].dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), along.double())
    return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True)), along


def found_by_kernels(made, along, is_causal=True, added=False):
    """What `expected_of` gives, by kernels, whatever the dtype."""
    parts = (slots_of(made, part) for part in ("keys", "values"))
    arguments = (made["query"], made["key"], made["value"], *parts, made["query"].shape[-1] ** -0.5, is_causal)
    read = triton_fused_attention(*arguments, made.get("gate"), added, True)
    got = triton_fused_gradients(along, *arguments, made.get("gate"), added, read, True, True, True)
    found = {"output": read.output, "query": got.query, "key": got.key, "value": got.value}
    for part, slots in (("keys", got.keys), ("values", got.values)):
        found |= {f"{part} {number}": slot for number, slot in enumerate(slots)}
    return found | ({"gate": got.gate} if "gate" in made else {})


def assert_equals_float64(made, is_causal=True, added=False):
    expected, along = expected_of(made, is_causal, added)
    found = found_by_kernels(made, along, is_causal, added)
    assert found.keys() == expected.keys()
    for name, exact in expected.items():
        assert_close(name, found[name], exact, made["query"].dtype)
    return found


SIZES = [
    (1, 64, 5, 131, "interpolated", True, EXACT),  # three tiles of queries
    (1, 80, 3, 65, "joint", False, torch.bfloat16),
    (2, 256, 2, 41, "added", True, EXACT),
    (3, 64, 70, 29, "joint", True, torch.float16),
    (4, 128, 7, 17, "added", False, EXACT),
    (6, 96, 3, 23, "interpolated", False, EXACT),
    (7, 128, 3, 1, "added", True, torch.bfloat16),
    (8, 80, 64, 9, "added", True, torch.bfloat16),
    (64, 16, 2, 5, "joint", True, EXACT),
    (3, 128, 1, 43, "interpolated", True, EXACT),
]
MORE_SIZES = [
    (2, 96, 33, 3, "added", True, EXACT),
    (4, 80, 3, 35, "joint", True, EXACT),
    (6, 256, 2, 11, "joint", True, torch.bfloat16),
    (7, 64, 33, 19, "added", True, EXACT),
    (8, 64, 5, 33, "joint", True, EXACT),
    (5, 20, 3, 67, "interpolated", True, EXACT),
]


@pytest.mark.parametrize(
    "group, width, slots, tokens, joining, is_causal, dtype", by_default(SIZES, [*SIZES, *MORE_SIZES])
)
def test_every_size(group, width, slots, tokens, joining, is_causal, dtype):
    made = inputs(group, width, slots, tokens, joining, dtype)
    assert_equals_float64(made, is_causal, joining == "added")


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


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("joining", ["interpolated", "added"])
def test_a_gate_at_a_bound_is_none_or_one_softmax_and_has_a_gradient(joining, gate):
    made, added = inputs(tokens=9, joining=joining), joining == "added"
    made["gate"] = torch.full_like(made["gate"], gate)
    found = assert_equals_float64(made, added=added)
    assert found["gate"].all()
    nothing = made | {f"values {slot}": torch.zeros_like(made[f"values {slot}"]) for slot in range(3)}
    alone = found_by_kernels(nothing, found["output"], added=added)
    if gate == 0 and not added:
        assert torch.equal(found["output"], alone["output"])
        assert not any(found[name].any() for name in found if name.startswith(("keys", "values")))
    elif gate == 0:
        assert all(
            alone[name].any() == name.startswith("values") for name in alone if name.startswith(("keys", "values"))
        )


@pytest.mark.parametrize("gate", [0.0, 1.0])
@pytest.mark.parametrize("far", [30.0, -30.0])
def test_slots_that_score_far_from_the_sequence_leave_nothing_that_is_no_number(far, gate):
    """As in pretrained models: by e^30 and more, and by so much less that nothing is read of them."""
    for joining in ("interpolated", "added"):
        made = inputs(tokens=9, joining=joining)
        made["query"] = abs(far) * made["query"]
        made |= {f"keys {slot}": far / 5 * made["query"][:, ::2] for slot in range(3)}
        made["gate"] = torch.full_like(made["gate"], gate)
        expected, _ = expected_of(made, added=joining == "added")
        found = found_by_kernels(made, torch.ones_like(made["query"]), added=joining == "added")
        assert_close("output", found["output"], expected["output"], torch.bfloat16)  # of scores in the hundreds
        assert all(tensor.isfinite().all() for tensor in found.values())


def autograd_inputs(joining="interpolated", wanted=None, **sizes):
    made = inputs(joining=joining, dtype=torch.bfloat16, **sizes)
    return {name: tensor.requires_grad_(wanted is None or name in wanted) for name, tensor in made.items()}


def fused(made, is_causal=True, added=False):
    parts = (slots_of(made, part) for part in ("keys", "values"))
    sequence = (made["query"], made["key"], made["value"])
    return fused_attention(*sequence, *parts, 0.25, is_causal, made.get("gate"), added)


# A row beside those of the table: it is held to the same laws.
FUSED = OpCase(
    lambda dtype=torch.bfloat16, **sizes: inputs(joining="interpolated", dtype=dtype, **sizes),
    lambda given, backend: reference(given, True, False) if backend == "reference" else fused(given),
    ("triton",),
    {"small": {}, "several-tiles": {"group": 3, "tokens": 70}},
    lambda given, body: (
        fused_attention_op,
        (*(given[name] for name in ("query", "key", "value")), *(slots_of(given, part) for part in ("keys", "values")))
        + (0.25, True, given["gate"], False, True),
    ),
    "fused_attention",
    wide=("gate",),
    dtypes=(torch.bfloat16, torch.float16),
)


@pytest.mark.parametrize("joining", ["joint", "added"])
def test_other_joinings_of_the_op_have_the_gradients_of_the_reference(joining):
    op = dataclasses.replace(
        FUSED,
        make=None,
        call=lambda given, backend: (
            reference(given, True, joining == "added")
            if backend == "reference"
            else fused(given, added=joining == "added")
        ),
    )
    assert_equals_reference(op, inputs(joining=joining, dtype=torch.bfloat16), "triton")


@pytest.mark.parametrize("wanted", [["query"], ["key"], ["values 1"], ["gate"]], ids="-".join)
def test_only_gradients_that_are_wanted_are_computed(wanted, monkeypatch):
    launched = []

    class Recorded:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            return lambda *given, **sizes: (launched.append(self.name), self.kernel[grid](*given, **sizes))

    for name in ("fused_rows_kernel", "fused_query_gradient_kernel", "fused_key_gradient_kernel"):
        monkeypatch.setattr(fused_gradients_triton, name, Recorded(name, getattr(fused_gradients_triton, name)))
    made = autograd_inputs(wanted=wanted)
    _, along = expected_of(made)
    (found,) = torch.autograd.grad(fused(made), [made[wanted[0]]], along)
    of_wanted = {"query": ["query"], "key": ["key"], "values 1": ["query"], "gate": []}[wanted[0]]
    assert launched == ["fused_rows_kernel", *(f"fused_{part}_gradient_kernel" for part in of_wanted)]
    whole = autograd_inputs()
    assert torch.equal(found, torch.autograd.grad(fused(whole), [whole[wanted[0]]], along)[0])


def test_tensors_of_several_dtypes_are_read_in_that_of_autocast():
    made = autograd_inputs()
    expected = fused(made)
    mixed = made | {name: made[name].detach().float().requires_grad_() for name in ("query", "key", "keys 1")}
    with torch.autocast(DEVICE, torch.bfloat16):
        found = fused(mixed)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    found.sum().backward()
    assert {mixed[name].grad.dtype for name in ("query", "key", "keys 1")} == {torch.float32}


def test_parts_are_kept_for_a_gradient_alone():
    made = inputs(joining="interpolated", dtype=torch.bfloat16)
    parts = [slots_of(made, part) for part in ("keys", "values")]
    given = (made["query"], made["key"], made["value"], *parts, 0.25, True)
    kept, left = (triton_fused_attention(*given, made["gate"], False, keeps) for keeps in (True, False))
    assert torch.equal(kept.output, left.output) and kept.sequence.shape == kept.depth.shape == kept.output.shape
    assert left.sequence.numel() == left.depth.numel() == 0
    assert triton_fused_attention(*given, None, False, True).sequence.numel() == 0  # one softmax needs none


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"keys": []},
            r"cannot read sequence and depth: there are 0 keys and 3 values of the depth; expected as many, and one or more\.",
        ),
        ({"tokens": 4}, r"query is \(2, 4, 4, 16\) and what it reads \(2, 2, 5, 16\); expected as many texts and tokens, and heads"),
        ({"heads": 3}, r"3 query heads read 2; expected a multiple\."),
        ({"group": 65}, r"65 query heads read each head of keys; expected 64 or fewer\."),
        ({"dtype": torch.float32}, r"heads are torch\.float32; expected bfloat16 or float16\."),
        ({"width": 257}, r"heads are 257 wide; expected 256 or less\."),
        ({"most": 11}, r"there are 2 texts of 5 tokens and 2 heads of keys; expected 11 or less in all\."),
    ],
    ids=["slots", "tokens", "heads", "group", "dtype", "width", "programs"],
)  # fmt: skip
def test_what_the_kernels_cannot_take_is_refused(change, message, monkeypatch):
    sizes = {name: change[name] for name in ("group", "width", "dtype") if name in change}
    made = inputs(**{"dtype": torch.bfloat16} | sizes)
    query = made["query"][:, : change.get("heads", 999), : change.get("tokens", 999)]
    keys = change.get("keys", slots_of(made, "keys"))
    monkeypatch.setattr(fused_depth, "_MOST_PROGRAMS", change.get("most", 1000))
    with pytest.raises(ValueError, match=message):
        fused_attention(query, made["key"], made["value"], keys, slots_of(made, "values"), 0.25, True)


def test_slots_of_another_number_of_heads_are_refused():
    made = inputs(dtype=torch.bfloat16)
    keys, values = ([slot[:, :1] for slot in slots_of(made, part)] for part in ("keys", "values"))
    with pytest.raises(ValueError, match=r"query is \(2, 4, 5, 16\) and what it reads \(2, 1, 5, 16\)"):
        fused_attention(made["query"], made["key"], made["value"], keys, values, 0.25, True)

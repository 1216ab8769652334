"""The fast bodies of attention of single tokens to chapters against the float64 reference: output and every gradient."""

import math

import pytest
import torch
from ops.kernels.closeness import assert_close
from ops.kernels.conftest import DEVICE
from pairs import in_pairs

from midus_hf.ops.chapters.op import chapter_attention
from midus_hf.ops.chapters.segments import segment_attention
from midus_hf.ops.chapters.triton import forward as chapter_segments_triton
from midus_hf.ops.chapters.triton import gradients as chapter_gradients_triton
from midus_hf.ops.chapters.triton.forward import blocks_of, sorted_pairs, triton_segments

DIFFERENTIABLE = ("query", "keys", "values", "scales", "biases")


def inputs(
    tokens=37, chosen=2, heads=4, kv_heads=2, width=16, chapters=3, memory=8, dtype=torch.float32, weighed=(), seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    table = (chapters, memory, kv_heads, width)
    order = torch.rand(tokens, chapters, generator=generator).argsort(-1)
    arguments = {
        "query": normal(tokens, heads, width),
        "keys": normal(*table),
        "values": normal(*table),
        "chapters": order[:, :chosen].to(DEVICE),
    }
    return arguments | {name: normal(tokens, chosen).float() for name in weighed}


def output_and_gradients(arguments, backend, dtype=None, wanted=DIFFERENTIABLE):
    leaves = {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_(name in wanted)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in arguments.items()
    }
    if backend == "reference":
        batch_of_one = {
            name: tensor if name in ("keys", "values") else tensor.unsqueeze(0) for name, tensor in leaves.items()
        }
        output = chapter_attention(**batch_of_one, backend="reference").squeeze(0)
    else:
        output = segment_attention(**leaves, backend=backend)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    found = {name: leaves[name] for name in wanted if name in leaves}
    gradients = torch.autograd.grad(
        output, list(found.values()), upstream.to(arguments["query"].dtype).to(output.dtype)
    )
    return {"output": output.detach()} | dict(zip(found, gradients, strict=True))


def assert_equals_reference(arguments, backend):
    found = output_and_gradients(arguments, backend)
    expected = output_and_gradients(arguments, "reference", torch.float64)
    for name, exact in expected.items():
        assert found[name].dtype == arguments.get(name, arguments["query"]).dtype
        # Differences of rounded numbers; and triton's interpreter cuts off what bfloat16 has no place for, where a GPU rounds.
        assert_close(name, found[name], exact, arguments["query"].dtype, slack=2 if name == "biases" else 1)


@pytest.mark.parametrize(
    "weighed, dtype, backend",
    in_pairs(
        ("", "scales", "biases", "scales biases"), (torch.float32, torch.float16, torch.bfloat16), ("torch", "triton")
    ),
    ids=str,
)
def test_every_dtype_and_weighting(weighed, dtype, backend):
    assert_equals_reference(inputs(dtype=dtype, weighed=tuple(weighed.split())), backend)


@pytest.mark.parametrize(
    "tokens, chosen, heads, kv_heads, width, chapters, memory",
    [
        (1, 3, 2, 1, 8, 4, 5),
        (33, 1, 3, 3, 20, 3, 70),
        (150, 2, 4, 1, 32, 2, 33),
        (5, 4, 2, 2, 80, 30, 3),
        (20, 2, 2, 1, 256, 3, 40),
        (65, 1, 1, 1, 1, 1, 2),
    ],
    ids=["one-token", "several-stretches", "all-chapters", "few-are-read", "widest", "ones"],
)
def test_every_size(backend, tokens, chosen, heads, kv_heads, width, chapters, memory):
    arguments = inputs(tokens, chosen, heads, kv_heads, width, chapters, memory, weighed=("scales",))
    assert_equals_reference(arguments, backend)


@pytest.fixture
def popular_chapters(monkeypatch):
    """So many pairs of chapters 1 and 2 that several programs sum their gradients, and few of chapter 3; nobody reads the others."""
    monkeypatch.setattr(chapter_gradients_triton, "_FEWEST_OF_SPLIT", 64)
    arguments = inputs(230, 1, 2, 1, 8, 5, 4, weighed=("scales",))
    arguments["chapters"] = torch.full_like(arguments["chapters"], 2)
    arguments["chapters"][::3] = 1
    arguments["chapters"][::100] = 3
    return arguments


def test_many_tokens_may_read_one_chapter_and_none_another(popular_chapters, backend):
    assert_equals_reference(popular_chapters, backend)
    found = output_and_gradients(popular_chapters, backend)
    for name in ("keys", "values"):
        assert [bool(chapter.any()) for chapter in found[name]] == [False, True, True, True, False]


def test_all_tokens_may_read_one_chapter(popular_chapters, backend):
    popular_chapters["chapters"] = torch.full_like(popular_chapters["chapters"], 4)
    assert_equals_reference(popular_chapters, backend)


def test_a_chapter_that_a_token_names_twice_is_read_twice(backend):
    arguments = inputs(20, 3, weighed=("scales", "biases"))
    arguments["chapters"] = torch.tensor([2, 1, 2], device=DEVICE).expand(20, 3)
    assert_equals_reference(arguments, backend)


def test_scales_of_zero_and_biases_of_minus_infinity_do_no_harm(backend):
    arguments = inputs(weighed=("scales", "biases"))
    arguments["scales"][:, 0] = 0
    assert_equals_reference(arguments, backend)
    arguments["biases"][:, 0] = -math.inf
    found = output_and_gradients(arguments, backend)
    rest = {
        name: tensor[:, 1:] if name in ("chapters", "scales", "biases") else tensor
        for name, tensor in arguments.items()
    }
    torch.testing.assert_close(found["output"], output_and_gradients(rest, backend)["output"])
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_large_scores_do_not_overflow(backend):
    arguments = inputs(memory=40)
    arguments["query"] *= 1e3
    expected = output_and_gradients(arguments, "reference", torch.float64)
    found = output_and_gradients(arguments, backend)
    torch.testing.assert_close(found["output"].double(), expected["output"], rtol=1e-3, atol=1e-3)
    assert all(gradient.isfinite().all() for gradient in found.values())


def test_layout_in_memory_does_not_matter(backend):
    arguments = inputs(weighed=("scales", "biases"))
    expected = output_and_gradients(arguments, backend)

    def strided(tensor):
        other = torch.stack([tensor, tensor], dim=-1)[..., 0]
        assert not other.is_contiguous()
        return other

    heads_first = arguments["query"].transpose(0, 1).contiguous().transpose(0, 1)
    for changed in (
        {"query": heads_first},
        {name: strided(tensor) for name, tensor in arguments.items()},
    ):
        found = output_and_gradients({**arguments, **changed}, backend)
        assert all(torch.equal(found[name], exact) for name, exact in expected.items())


def test_two_runs_give_the_same_bytes(popular_chapters, backend):
    first, second = (output_and_gradients(popular_chapters, backend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("wanted", DIFFERENTIABLE)
def test_only_gradients_that_are_wanted_are_computed(backend, wanted):
    arguments = inputs(weighed=("scales", "biases"))
    whole = output_and_gradients(arguments, backend)
    assert torch.equal(output_and_gradients(arguments, backend, wanted=(wanted,))[wanted], whole[wanted])


def test_a_query_that_is_not_finite_spoils_its_own_output_alone(backend):
    arguments = inputs(20, 2, 2, 1)
    expected = output_and_gradients(arguments, backend)["output"]
    arguments["query"][3, 0], arguments["query"][11, 1] = math.nan, math.inf
    found = output_and_gradients(arguments, backend)["output"]
    spoiled = torch.zeros(20, 2, dtype=torch.bool, device=DEVICE)
    spoiled[3, 0] = spoiled[11, 1] = True
    assert found[spoiled].isnan().all() and torch.equal(found[~spoiled], expected[~spoiled])


def test_short_stretches_are_read_by_kernels_token_by_token(backend):
    one = inputs(12, 2, weighed=("scales", "biases"))
    arguments = {
        name: tensor if name in ("keys", "values") else tensor.view(2, 6, *tensor.shape[1:])
        for name, tensor in one.items()
    }
    for name in ("chapters", "scales", "biases"):
        arguments[name] = arguments[name][:, :3]
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items() if tensor.is_floating_point()}
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in leaves.items()}
    output = chapter_attention(**arguments, backend=backend)
    expected = chapter_attention(**{**arguments, **wide}, backend="reference")
    assert_close("output", output, expected, torch.float32)
    pairs = zip(
        torch.autograd.grad(output.sum(), list(leaves.values())),
        torch.autograd.grad(expected.sum(), list(wide.values())),
        strict=True,
    )
    for name, (found, exact) in zip(leaves, pairs, strict=True):
        assert_close(name, found, exact, torch.float32)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_blocks_have_every_pair_once_and_one_chapter_each(size):
    generator = torch.Generator().manual_seed(size)
    for tokens, chosen, num_chapters in ((1, 1, 1), (1, 3, 40), (50, 3, 7), (200, 1, 2), (3, 2, 300)):
        chapters = torch.rand(tokens, num_chapters, generator=generator).argsort(-1)[:, :chosen]
        chapters = chapters.clamp(max=num_chapters - num_chapters // 3)  # the last ones are read by none
        order, offsets = sorted_pairs(chapters, num_chapters)
        blocks = blocks_of(offsets, chapters.numel(), size)
        found = []
        for number, chapter in enumerate(blocks.chapter_of_block.tolist()):
            if chapter == num_chapters:
                continue
            first, end = offsets[chapter : chapter + 2].tolist()
            of_chapter = -(-(end - first) // size)
            start = first + (of_chapter - int(blocks.last_blocks[chapter]) + number) * size
            assert first <= start < end
            pairs = order[start : min(start + size, end)]
            assert (chapters.flatten()[pairs.long()] == chapter).all()
            found += pairs.tolist()
        assert sorted(found) == list(range(chapters.numel()))


class _Recorded:
    """Stands for a kernel: its launches are counted."""

    def __init__(self):
        self.launches = 0

    def __getitem__(self, grid):
        assert all(isinstance(size, int) and size > 0 for size in grid)
        self.launches += 1
        return lambda *arguments, **constants: None


def test_what_is_launched_depends_on_shapes_alone(monkeypatch):
    """So nothing waits for the device, and a CUDA graph may hold the op: values of a meta tensor cannot be asked for."""
    kernels = []
    for module in (chapter_segments_triton, chapter_gradients_triton):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            kernels.append(_Recorded())
            monkeypatch.setattr(module, name, kernels[-1])
    arguments = {name: tensor.to("meta") for name, tensor in inputs(2000, weighed=("scales", "biases")).items()}
    reading = triton_segments(*arguments.values())
    chapters = arguments.pop("chapters")
    assert chapters.shape == (2000, 2)
    *tables, scales, biases = arguments.values()
    weighing = (scales, biases)
    gradients = chapter_gradients_triton.triton_segment_gradients(
        torch.empty_like(reading.output), *tables, weighing, reading, True, True
    )
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in arguments.values()]
    assert [kernel.launches for kernel in kernels] == [1] * 6

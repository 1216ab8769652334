"""Calls of kernels for timing tiles: a layer of a published model, with many tokens or one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from midus_hf.ops.chapters.triton.forward import triton_segments
from midus_hf.ops.chapters.triton.gradients import triton_segment_gradients
from midus_hf.ops.depth.inputs import DepthInputs, DepthReading, Wanted
from midus_hf.ops.depth.triton.forward import triton_depth_attention
from midus_hf.ops.depth.triton.gradients import triton_depth_gradients
from midus_hf.ops.gather.triton.rows import triton_bank_gradient
from midus_hf.ops.headwise.inputs import LookupInputs, room_for_gradient
from midus_hf.ops.headwise.triton.packed import triton_output
from midus_hf.ops.product_key.triton.gradients import triton_score_gradients
from midus_hf.ops.product_key.triton.scores import triton_scores

Call = Callable[[], object]
# Calls that launch a kernel, by the kernel's name.
Calls = dict[str, Call]

# Heads of keys and values of models that read chapters or the depth.
KV_HEADS = 8


@dataclass(frozen=True)
class Case:
    """One layer whose kernels are timed; `build` makes inputs on a device and returns the calls that launch each kernel."""

    name: str
    build: Callable[[str], Calls]

    def __str__(self) -> str:
        return self.name


def cases(is_rehearsal: bool) -> Iterator[Case]:
    """Yield all cases, most important first; for a rehearsal, a tiny case of each sort."""
    if is_rehearsal:
        yield Case("memory tiny", partial(memory, tokens=20, heads=2, dim=16, n=8, k=2))
        yield Case("chapters tiny", partial(chapters, tokens=8, dim=16, memory_tokens=3, count=2))
        yield Case("depth tiny", partial(depth, tokens=3, group=2, dim=16, slots=3))
        return
    for name, dim in (("llama-3.2-1b", 64), ("llama-3.1-8b", 128)):
        of_model = partial(memory, heads=32, dim=dim, n=64, k=4)
        yield Case(f"memory {name}", partial(of_model, tokens=32768))
        yield Case(f"decoding {name}", partial(of_model, tokens=1))
    for name, dim in (("llama-3.2-1b", 64), ("llama-3.1-8b", 128)):
        yield Case(f"chapters {name}", partial(chapters, tokens=32768, dim=dim, memory_tokens=64, count=64))
    for name, group, dim in (("moda-700m", 2, 64), ("llama-3.1-8b", 4, 128)):
        for slots in (64, 16):
            yield Case(f"depth {slots} {name}", partial(depth, tokens=4096, group=group, dim=dim, slots=slots))


def memory(device: str, tokens: int, heads: int, dim: int, n: int, k: int) -> Calls:
    """Return calls of head-wise memory with a bank per head, in bfloat16; a single token is decoded, without gradients."""
    query = _normal(device, tokens, heads, dim)
    row_keys, column_keys = (_normal(device, heads, n, dim // 2) for _ in range(2))
    bank = _normal(device, heads, n * n, dim)
    inputs = LookupInputs(query, row_keys, column_keys, bank, query, k, 1.0)
    kept = room_for_gradient(inputs) if tokens > 1 else None

    def look_up(exact: bool) -> Call:
        def call() -> object:
            output = triton_output(inputs, exact, kept)
            return output if kept is None else (output, kept[1])

        return call

    def select(exact: bool) -> Call:
        return lambda: triton_scores(query, row_keys, column_keys, k, exact)[0]

    calls: Calls = {
        "packed_forward_kernel": look_up(False),
        "packed_scores_kernel": select(False),
        "forward_kernel": look_up(True),
        "scores_kernel": select(True),
    }
    if kept is None:
        return calls
    look_up(True)()
    slots, weights = (tensor.clone() for tensor in kept)
    gradients = (query, row_keys, column_keys, bank, (slots, weights), 1.0)
    return {
        "packed_forward_kernel": calls.pop("packed_forward_kernel"),
        "score_gradient_kernel": lambda: triton_score_gradients(query, *gradients),
        "bucket_sums_kernel": lambda: triton_bank_gradient(query, slots, weights, bank.shape, bank.dtype),
        **calls,
    }


def chapters(device: str, tokens: int, dim: int, memory_tokens: int, count: int) -> Calls:
    """Return calls of attention to chapters, with scales; each token reads up to 8 chapters of its choice."""
    heads, chosen = 4 * KV_HEADS, min(8, count)
    query = _normal(device, tokens, heads, dim)
    keys, values = (_normal(device, count, memory_tokens, KV_HEADS, dim) for _ in range(2))
    read = torch.rand(tokens, count, device=device).topk(chosen).indices
    scales = torch.rand(tokens, chosen, device=device)
    reading = triton_segments(query, keys, values, read, scales, None)

    def gradients(wants_rows: bool, wants_tables: bool) -> Call:
        arguments = (query, query, keys, values, (scales, None), reading, wants_rows, wants_tables)
        return lambda: triton_segment_gradients(*arguments)

    return {
        "chapter_forward_kernel": lambda: triton_segments(query, keys, values, read, scales, None)[:2],
        "chapter_pair_gradient_kernel": gradients(True, False),
        "chapter_table_gradient_kernel": gradients(False, True),
    }


def depth(device: str, tokens: int, group: int, dim: int, slots: int) -> Calls:
    """Return calls of attention to slots of the depth."""

    def heads(count: int) -> torch.Tensor:
        return _normal(device, 1, tokens, count, dim).transpose(1, 2)

    query = heads(group * KV_HEADS)
    keys, values = ([heads(KV_HEADS) for _ in range(slots)] for _ in range(2))
    inputs = DepthInputs(query, keys, values, dim**-0.5, None)
    reading = triton_depth_attention(inputs)
    return {
        "depth_forward_kernel": lambda: triton_depth_attention(inputs),
        "depth_gradient_kernel": lambda: triton_depth_gradients(
            inputs, reading, DepthReading(query, reading.lse), Wanted()
        ),
    }


def _normal(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)

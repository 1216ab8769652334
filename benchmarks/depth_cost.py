"""What attention to the depth adds to attention to the sequence: both passes, by length, group and slots (MoDA, tables 2 and 7).

    python -m benchmarks.depth_cost
    python -m benchmarks.depth_cost --device cuda --dtype bfloat16
    python -m benchmarks.depth_cost --device cuda --dtype bfloat16 --rows 4096x8x64,16384x8x256

One layer, one text, 8 heads of keys and values of width 64, causal, slots in tensors of their own. Timed in turns are attention to
the sequence alone (`scaled_dot_product_attention`), the same joined with the depth, by each attention that tells what its softmax
divides by or has that computed beside it, the depth alone, and a copy of as many bytes as slots have. *Overhead* is what the joined
layer takes beyond the sequence alone, of the sequence alone, and *depth* the depth's part of it; the paper's own percentages are of
the joined layer. The *bound* is the time in which that copy would move what the depth must read and write: queries and slots once in
each pass, and once the gradients of both.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.timing import Task, interleaved, is_out_of_memory, release_memory
from benchmarks.tracked import RESULTS, Run, append, this_run
from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.ops.depth_attention import depth_attention
from midus_hf.ops.joining import Depth

DEPTH_RESULTS = RESULTS / "depth_cost.csv"
KV_HEADS, WIDTH = 8, 64
WAYS = {"cpu": ("sdpa",), "cuda": ("sdpa", "flex_attention")}
"""Attention to the sequence, by whose softmax the depth is joined."""


@dataclass(frozen=True)
class Shape:
    """Tokens of a text, query heads for each head of keys and values, slots of the depth."""

    tokens: int
    group: int
    slots: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.group}x{self.slots}"


PAPER = {
    Shape(1024, 8, 64): None,
    Shape(4096, 8, 64): (7.970, 10.750),
    Shape(8192, 8, 64): (28.700, 35.427),
    Shape(16384, 8, 64): (116.700, 127.661),
    Shape(32768, 8, 64): (459.854, 480.914),
    Shape(65536, 8, 64): (1831.668, 1883.026),
    Shape(16384, 2, 64): (28.982, 39.741),
    Shape(16384, 4, 64): (58.071, 68.939),
    Shape(16384, 16, 64): (233.700, 244.900),
    Shape(16384, 32, 64): (467.107, 480.767),
    Shape(16384, 8, 128): (116.700, 138.224),
    Shape(16384, 8, 256): (116.700, 167.958),
}
"""Milliseconds of the sequence alone and with the depth, on an A100 (table 2); of the first shape table 7 has no sequence alone."""

DEFAULT_ROWS = {"cpu": (Shape(2048, 2, 32),), "cuda": tuple(PAPER)}


@dataclass(frozen=True)
class Row(Run):
    """One shape; times of both passes in milliseconds, medians. `joined_by` is the attention to the sequence that was joined."""

    dtype: str
    tokens: int
    group: int
    slots: int
    joined_by: str
    sequence_ms: float
    joined_ms: float
    depth_ms: float
    overhead: float
    bound_ms: float
    paper_overhead: float | None


class Layer:
    """Random heads of one layer, and what is timed of them.

    Args:
        shape: Sizes.
        device: `"cpu"` or `"cuda"`.
        dtype: Of all heads.
    """

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        self.shape, self.scaling = shape, WIDTH**-0.5
        generator = torch.Generator(device).manual_seed(0)

        def heads(count: int) -> torch.Tensor:
            drawn = torch.randn(1, shape.tokens, count, WIDTH, generator=generator, device=device)
            return drawn.to(dtype).transpose(1, 2).requires_grad_()

        self.query = heads(KV_HEADS * shape.group)
        self.key, self.value = heads(KV_HEADS), heads(KV_HEADS)
        self.keys, self.values = ([heads(KV_HEADS) for _ in range(shape.slots)] for _ in range(2))
        self.upstream = heads(KV_HEADS * shape.group).detach()

    def sequence(self, way: str) -> SequenceHeads:
        """Attention to the sequence, as a model has it."""
        module = SimpleNamespace(is_causal=True, num_key_value_groups=self.shape.group, training=True)
        mask = None
        if way == "flex_attention":
            tokens, device = self.shape.tokens, self.query.device.type
            compiled = torch.compile(create_block_mask)  # which never has all pairs of tokens in memory
            made = compiled if device == "cuda" else create_block_mask
            mask = made(lambda b, h, t, s: t >= s, None, None, tokens, tokens, device=device)
        own = ALL_ATTENTION_FUNCTIONS[way]
        arguments = {"scaling": self.scaling}
        return SequenceHeads(module, own, way, self.query, self.key, self.value, mask, arguments)

    def alone(self) -> torch.Tensor:
        """What heads read of the sequence, by `scaled_dot_product_attention`."""
        heads = self.sequence("sdpa")
        return heads.own(heads.module, heads.query, heads.key, heads.value, None, **heads.arguments)[0].transpose(1, 2)

    def depth(self) -> torch.Tensor:
        """What heads read of the depth."""
        return depth_attention(self.query, self.keys, self.values, self.scaling)[0]

    def joined(self, sequence: SequenceHeads) -> torch.Tensor:
        """What they read of both."""
        return sequence.joined(Depth(self.query, self.keys, self.values, self.scaling))[0].transpose(1, 2)

    def passes(self, forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Task:
        """Both passes."""
        return Task(lambda _: torch.autograd.grad(forward(), leaves, self.upstream))

    def tasks(self, ways: tuple[str, ...]) -> dict[str, Task]:
        """What is timed, by name."""
        of_sequence, of_depth = [self.query, self.key, self.value], [self.query, *self.keys, *self.values]
        source = torch.empty(2 * self.shape.slots, *self.key.shape, dtype=self.key.dtype, device=self.key.device)
        target = torch.empty_like(source)
        tasks = {
            "sequence": self.passes(self.alone, of_sequence),
            "depth": self.passes(self.depth, of_depth),
            "copy": Task(lambda _: target.copy_(source)),
        }
        for way in ways:
            sequence = self.sequence(way)
            tasks[way] = self.passes(lambda sequence=sequence: self.joined(sequence), [*of_sequence, *of_depth[1:]])
        return tasks

    @property
    def copies(self) -> float:
        """What the depth must read and write in both passes, of what a copy of all slots reads and writes."""
        slots, heads = 2 * self.shape.slots * KV_HEADS, KV_HEADS * self.shape.group
        forward = slots + 2 * heads  # queries and what they read
        backward = 2 * slots + 4 * heads  # the same, and the gradients of all
        return (forward + backward) / (2 * slots)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--rows",
        type=shapes,
        help="as in 4096x8x64, joined by commas (default: 2048x2x32 on a CPU, else the paper's)",
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for each shape (default: 20)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args(words)
    run, dtype = this_run(arguments.device), getattr(torch, arguments.dtype)
    print(
        "| tokens x group x slots | joined by | sequence ms | joined ms | overhead | paper's, A100 | depth ms | of the bound |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for shape in arguments.rows or DEFAULT_ROWS[arguments.device]:
        try:
            rows = measured(run, shape, arguments.device, dtype, arguments.seconds)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            print(f"| {shape} | out of memory | | | | | | | |", flush=True)
            rows = []
        for row in rows:
            print(_line(row), flush=True)
        if not arguments.no_append:
            append(rows, DEPTH_RESULTS)
        release_memory(arguments.device)


def measured(run: Run, shape: Shape, device: str, dtype: torch.dtype, seconds: float) -> list[Row]:
    """Rows of one shape, one for each way to join."""
    layer = Layer(shape, device, dtype)
    times = {
        name: timing.median_ms
        for name, timing in interleaved(layer.tasks(WAYS[device]), device, seconds=seconds).items()
    }
    paper = PAPER.get(shape)
    return [
        Row(
            **asdict(run),
            dtype=str(dtype).removeprefix("torch."),
            tokens=shape.tokens,
            group=shape.group,
            slots=shape.slots,
            joined_by=way,
            sequence_ms=times["sequence"],
            joined_ms=times[way],
            depth_ms=times["depth"],
            overhead=times[way] / times["sequence"] - 1,
            bound_ms=times["copy"] * layer.copies,
            paper_overhead=None if paper is None else paper[1] / paper[0] - 1,
        )
        for way in WAYS[device]
    ]


def shapes(text: str) -> tuple[Shape, ...]:
    """Read shapes as the command line has them."""
    found = []
    for part in text.split(","):
        sizes: list[Any] = part.split("x")
        if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(
                f"{part!r} is no shape; expected tokens x group x slots, as in 4096x8x64."
            )
        found.append(Shape(*map(int, sizes)))
    return tuple(found)


def _line(row: Row) -> str:
    paper = "" if row.paper_overhead is None else f"{row.paper_overhead:.1%}"
    shape = Shape(row.tokens, row.group, row.slots)
    return (
        f"| {shape} | {row.joined_by} | {row.sequence_ms:.3f} | {row.joined_ms:.3f} | {row.overhead:.1%} | "
        f"{row.depth_ms / row.sequence_ms:.1%} | {paper} | {row.depth_ms:.3f} | {row.bound_ms / row.depth_ms:.2f} |"
    )


if __name__ == "__main__":
    main()

"""Compile every kernel, as it would be launched, for GPUs that this machine lacks, and print what each needs.

    python -m benchmarks.kernels --targets sm_90

Shared memory, registers and spilled bytes are printed. The command ends with status 1 if a kernel needs more shared
memory than its target has.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.measuring import add_list
from midus_hf.ops.dispatch.triton import interprets_kernels
from midus_hf.ops.gather.triton import (
    triton_bank_gradient,
    triton_row_sums,
    triton_weight_gradients,
    triton_weighted_rows,
)
from midus_hf.ops.midus_hml.triton import triton_lookup
from midus_hf.ops.moc.triton import BLOCK_ROWS, triton_chapter_blocks, triton_chapter_gradients
from midus_hf.ops.moda.triton import triton_depth_attention, triton_depth_gradients
from midus_hf.ops.product_key.native import LookupInputs
from midus_hf.ops.product_key.triton import triton_score_gradients, triton_scores


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield names and calls: shapes of the papers' models, wide and odd heads, large banks, each dtype.

    Names have no commas, since commas separate names on the command line.
    """
    for name, heads, dim, n, k, dtype in (
        ("llama-3.2-1b", 32, 64, 64, 4, torch.bfloat16),
        ("llama-3.1-8b", 32, 128, 64, 4, torch.bfloat16),
        ("llama-3.2-1b float32", 32, 64, 64, 4, torch.float32),
        ("llama-3.2-1b float16", 32, 64, 64, 4, torch.float16),
        ("head 16", 4, 16, 16, 1, torch.bfloat16),
        ("head 80", 4, 80, 48, 8, torch.bfloat16),
        ("head 96 with k 32", 4, 96, 64, 32, torch.bfloat16),
        ("head 256", 4, 256, 64, 4, torch.bfloat16),
        ("n 1024", 2, 64, 1024, 16, torch.bfloat16),
    ):
        yield name, partial(_lookup, heads, dim, n, k, dtype)
    yield "prompt of llama-3.2-1b", _prompt
    for dtype in (torch.bfloat16, torch.float32):
        name = f"32 heads of 4 over width 2048 in {str(dtype).removeprefix('torch.')}"
        yield name, partial(_gather, 2048, 128, dtype)
    for name, dim, memory_tokens, dtype in (
        ("chapters of llama-3.2-1b", 64, 64, torch.bfloat16),
        ("chapters of llama-3.1-8b", 128, 64, torch.bfloat16),
        ("chapters of llama-3.2-1b in float32", 64, 64, torch.float32),
        ("chapters of llama-3.2-1b in float16", 64, 64, torch.float16),
        ("chapters of 3 with head 80", 80, 3, torch.bfloat16),
        ("chapters of 1000 with head 256", 256, 1000, torch.bfloat16),
        ("chapters of 1000 with head 256 in float32", 256, 1000, torch.float32),
    ):
        yield name, partial(_attend, dim, memory_tokens, dtype)
    for name, group, dim, slots, softcap, dtype in (
        ("depth of moda-700m", 2, 64, 72, None, torch.bfloat16),
        ("depth of llama-3.1-8b", 4, 128, 64, None, torch.bfloat16),
        ("depth of table 2 with 32 queries per key", 32, 64, 64, None, torch.bfloat16),
        ("depth of gemma-2 with softcap", 2, 256, 52, 50.0, torch.bfloat16),
        ("depth of 5 with head 80 in float16", 7, 80, 5, None, torch.float16),
        ("depth of 300 with head 96 and 64 queries per key", 64, 96, 300, None, torch.bfloat16),
        ("depth of 512 with head 256 in float32", 3, 256, 512, None, torch.float32),
        ("depth of heads at odd places", 2, 64, 8, None, torch.bfloat16),
    ):
        yield name, partial(_depth, group, dim, slots, softcap, dtype, skipped=1 if "odd" in name else 0)


# Bytes that one program may use on the GPUs that kernels are compiled for, by target.
MOST_SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}

# Tokens of a lookup, as in benchmarks on a GPU.
TOKENS = 32768


def _sized(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor with a shape but without data, which is enough since launches are caught."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def _lookup(heads: int, dim: int, n: int, k: int, dtype: torch.dtype) -> None:
    query, keys = _sized(TOKENS, heads, dim, dtype=dtype), _sized(heads, n, dim // 2, dtype=dtype)
    bank = _sized(heads, n * n, dim, dtype=dtype) if n <= 64 else _sized(n * n, dim, dtype=dtype)
    output, kept = triton_lookup(LookupInputs(query, keys, keys, bank, None, query, k), keeps=True)
    assert kept is not None
    slots, weights = kept
    triton_score_gradients(output, query, keys, keys, slots, (bank, weights))
    triton_bank_gradient(output, slots, weights, bank.shape, dtype)
    scores, chosen = triton_scores(query, keys, keys, k)
    triton_score_gradients(scores, query, keys, keys, chosen)


def _prompt() -> None:
    """Look up few tokens, without gradient, so that slots and weights are not kept."""
    query, keys = _sized(2048, 32, 64, dtype=torch.bfloat16), _sized(32, 64, 32, dtype=torch.bfloat16)
    bank = _sized(32, 64 * 64, 64, dtype=torch.bfloat16)
    triton_lookup(LookupInputs(query, keys, keys, bank, None, query, 4), keeps=False)


def _gather(width: int, m: int, dtype: torch.dtype) -> None:
    bank, slots = _sized(4096, width, dtype=dtype), _sized(TOKENS, m, dtype=torch.int64)
    weights = _sized(TOKENS, m, dtype=dtype)
    output = triton_weighted_rows(bank, slots, weights)
    triton_weight_gradients(output, bank, slots)
    triton_row_sums(output, slots, weights, 4096)


def _attend(dim: int, memory_tokens: int, dtype: torch.dtype) -> None:
    blocks = 512
    heads = 32
    chapters = 64
    rows, factors = _sized(blocks * BLOCK_ROWS, heads, dim, dtype=dtype), _sized(blocks * BLOCK_ROWS)
    table = _sized(chapters, memory_tokens, heads, dim, dtype=dtype)
    arguments = (rows, factors, table, table, *(_sized(size, dtype=torch.int64) for size in (blocks, chapters)))
    outputs, sums = triton_chapter_blocks(*arguments)
    triton_chapter_gradients(outputs, sums, *arguments, outputs, sums, [True] * 4)


def _depth(group: int, dim: int, slots: int, softcap: float | None, dtype: torch.dtype, skipped: int) -> None:
    query = _heads(group * _KV_HEADS, dim, dtype, skipped)
    keys = [_heads(_KV_HEADS, dim, dtype, skipped) for _ in range(slots)]
    slots = (query, keys, keys)
    reading = triton_depth_attention(*slots, dim**-0.5, softcap)
    triton_depth_gradients(*reading, *slots, *reading, dim**-0.5, softcap, [True] * 3)


# Heads of keys and values of models that read the depth.
_KV_HEADS = 8


def _heads(count: int, dim: int, dtype: torch.dtype, skipped: int) -> torch.Tensor:
    texts = 2
    tokens = 16
    numbers = torch.zeros(skipped + texts * tokens * count * dim, dtype=dtype)[skipped:]
    return numbers.view(texts, tokens, count, dim).transpose(1, 2)


_POINTERS = {
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """A launch that was caught: arguments by name, and compiler options."""

    kernel: JITFunction
    case: str
    arguments: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, kernel: JITFunction, arguments: Sequence[Any], keywords: dict[str, Any]) -> "Launch":
        """Return a launch with an empty `case` from the arguments of triton's launcher."""
        named = dict(zip((parameter.name for parameter in kernel.params), arguments, strict=False)) | keywords
        by_parameter = {parameter.name: named.pop(parameter.name) for parameter in kernel.params}
        return cls(kernel, "", by_parameter, named)


@dataclass(frozen=True)
class Compiled:
    """Resources that a compiled kernel needs. Numbers that no tool counts, as on AMD, are None.

    `spilled_bytes` are bytes of a thread's stack. `wide_loads` load 16 bytes per thread, or copy them to shared memory,
    `narrow_loads` 2 bytes.
    """

    kernel: str
    case: str
    target: str
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None
    wide_loads: int | None
    narrow_loads: int | None


@contextmanager
def caught_launches() -> Iterator[list[Launch]]:
    """Catch launches in the `with` block instead of running them, and yield a list of them; their `case` is empty."""
    caught: list[Launch] = []

    def catch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        caught.append(Launch.of(self, arguments, keywords))

    before = JITFunction.run
    JITFunction.run = catch
    try:
        yield caught
    finally:
        JITFunction.run = before


def specialisation(launch: Launch) -> tuple[dict, dict, dict]:
    """Return signature, constants and attributes as triton's launcher derives them from arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, tuple):
            assert all(type(number) is int and number >> 31 and number % 2 for number in value), (
                "numbers that compile alike"
            )
            signature[parameter.name] = ("i64",) * len(value)  # type: ignore[assignment]
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def launches(wanted: Container[str]) -> list[Launch]:
    """Return all launches of some cases, without launches that compile to the same code."""
    by_code: dict[tuple, Launch] = {}
    for case, ask in cases():
        if case not in wanted:
            continue
        with caught_launches() as caught:
            ask()
        for launch in caught:
            key = (launch.kernel.__name__, str((specialisation(launch), launch.options)))
            by_code.setdefault(key, replace(launch, case=case))
    return list(by_code.values())


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, as NVIDIA's `cuobjdump`, which triton includes, prints them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = printed.stdout + printed.stderr
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers and stack, text
    return int(registers[1]), int(stack[1])


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile a launch for a target."""
    signature, constants, attributes = specialisation(launch)
    if target.startswith("gfx"):  # the results of `precise_product` and `wide_ranged_product` on AMD
        constants = {name: "ieee" if value in ("tf32x3", "tf32") else value for name, value in constants.items()}
    number = re.sub(r"\D", "", target)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(number), 32)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, **launch.options}
    compiled = triton.compile(source, target=gpu, options=options)
    kernel = launch.kernel.__name__
    cubin = compiled.asm.get("cubin")
    registers, spilled = (None, None) if cubin is None else _resources(cubin)
    wide, narrow = (
        len(re.findall(load, compiled.asm["ptx"])) if "ptx" in compiled.asm else None
        for load in (r"ld\.global\S*\.v4\.b32\b|cp\.async\.cg\b", r"ld\.global\S*\.[bu]16\b")
    )
    shared = compiled.metadata.shared
    return Compiled(kernel, launch.case, target, shared, registers, spilled, wide, narrow)


def main(command_arguments: list[str] | None = None) -> int:
    """Compile what the command line names; return 1 if a kernel needs more shared memory than its target has, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_list(parser, "--targets", MOST_SHARED_MEMORY)
    add_list(parser, "--cases", [name for name, _ in cases()])
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args(command_arguments)
    if interprets_kernels():
        raise SystemExit("TRITON_INTERPRET is 1, and kernels that are interpreted cannot be compiled; unset it.")
    rows = []
    for launch in launches(arguments.cases):
        for target in arguments.targets:
            rows.append(compile_for(launch, target))
            if not arguments.json:
                print(_line(rows[-1]), flush=True)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    too_large = [row for row in rows if row.shared_bytes > MOST_SHARED_MEMORY[row.target]]
    if too_large:
        print(
            f"{len(too_large)} kernels need more shared memory than their target has, {too_large[0]} among them.",
            file=sys.stderr,
        )
    return 1 if too_large else 0


def _line(row: Compiled) -> str:
    line = f"{row.kernel:28s} {row.case:40s} {row.target:7s} {row.shared_bytes:7d} B shared"
    if row.registers is not None:
        line += f" {row.registers:4d} registers {row.spilled_bytes:4d} B stack"
    return line


if __name__ == "__main__":
    sys.exit(main())

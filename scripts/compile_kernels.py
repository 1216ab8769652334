"""Compile every kernel for GPUs that are not here, and print what each needs of them.

    python scripts/compile_kernels.py [--targets sm_80,sm_90,sm_100,gfx942] [--json]

The functions that launch kernels are called with tensors of real shapes, and each launch is compiled instead of run: what
is compiled is what would have been launched. It needs triton, and neither a GPU nor a driver. Numbers and speed are not
checked.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # kernels that are interpreted cannot be compiled

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from midus_hf.ops.headwise_lookup_triton import triton_forward, triton_score_gradients
from midus_hf.ops.product_key_triton import triton_select
from midus_hf.ops.row_sums_triton import triton_row_sums, triton_weight_gradients, triton_weighted_rows

MOST_SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes that one program may use, by target."""

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Launch:
    """One launch that was caught.

    Args:
        kernel: The kernel.
        case: What was asked for when it was launched.
        arguments: Its arguments by name.
    """

    kernel: JITFunction
    case: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs.

    Args:
        kernel: Its name.
        case: What it was launched for.
        target: The GPU.
        shared_bytes: Shared memory a program.
        registers: Registers a thread; None where no tool tells (AMD).
        spilled_bytes: Of a thread's stack; None where no tool tells.
    """

    kernel: str
    case: str
    target: str
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the kernels are asked for: the shapes of the papers' models, wide and odd heads, large banks, each dtype."""
    for name, heads, dim, n, k, dtype in (
        ("llama-3.2-1b", 32, 64, 64, 4, torch.bfloat16),
        ("llama-3.1-8b", 32, 128, 64, 4, torch.bfloat16),
        ("llama-3.2-1b float32", 32, 64, 64, 4, torch.float32),
        ("llama-3.2-1b float16", 32, 64, 64, 4, torch.float16),
        ("head 16", 4, 16, 16, 1, torch.bfloat16),
        ("head 80", 4, 80, 48, 8, torch.bfloat16),
        ("head 96, k 32", 4, 96, 64, 32, torch.bfloat16),
        ("head 256", 4, 256, 64, 4, torch.bfloat16),
        ("n 1024", 2, 64, 1024, 16, torch.bfloat16),
    ):
        yield name, lambda heads=heads, dim=dim, n=n, k=k, dtype=dtype: _lookup(heads, dim, n, k, dtype)
    for dtype in (torch.bfloat16, torch.float32):
        name = f"32 heads of 4 over width 2048, {str(dtype).removeprefix('torch.')}"
        yield name, lambda dtype=dtype: _gather(2048, 128, dtype)


def _lookup(heads: int, dim: int, n: int, k: int, dtype: torch.dtype) -> None:
    tokens = 64
    query, keys = torch.zeros(tokens, heads, dim, dtype=dtype), torch.zeros(heads, n, dim // 2, dtype=dtype)
    bank = torch.zeros(heads if n <= 64 else 1, n * n, dim, dtype=dtype)
    bank = bank if n <= 64 else bank[0]
    output, slots, weights = triton_forward(query, keys, keys, bank, query, k, 1.0)
    slots.zero_()
    triton_score_gradients(output, query, keys, keys, bank, slots, weights, 1.0)
    for atomic in (False, True):
        rows = slots.flatten(0, 1).long()
        triton_row_sums(output.flatten(0, 1), rows, weights.flatten(0, 1), bank.shape[:-1].numel(), atomic=atomic)
    triton_select(torch.zeros(tokens, n), torch.zeros(tokens, n), k)


def _gather(width: int, m: int, dtype: torch.dtype) -> None:
    bank, slots = torch.zeros(4096, width, dtype=dtype), torch.zeros(64, m, dtype=torch.int64)
    weights = torch.zeros(64, m, dtype=dtype)
    output = triton_weighted_rows(bank, slots, weights)
    triton_weight_gradients(output, bank, slots)
    for atomic in (False, True):
        triton_row_sums(output, slots, weights, 4096, atomic=atomic)


@contextmanager
def caught_launches() -> Iterator[list[Launch]]:
    """Catch launches instead of running them; `case` of each is set by `launches`."""
    caught: list[Launch] = []

    def catch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        named = dict(zip((parameter.name for parameter in self.params), arguments, strict=False)) | keywords
        caught.append(Launch(self, "", {parameter.name: named[parameter.name] for parameter in self.params}))

    before, JITFunction.run = JITFunction.run, catch
    try:
        yield caught
    finally:
        JITFunction.run = before


def launches() -> list[Launch]:
    """Every launch of every case; those that compile alike once."""
    found: dict[tuple, Launch] = {}
    for case, ask in cases():
        with caught_launches() as caught:
            ask()
        for launch in caught:
            key = (launch.kernel.__name__, str(_specialisation(launch)))
            found.setdefault(key, Launch(launch.kernel, case, launch.arguments))
    return list(found.values())


def _specialisation(launch: Launch) -> tuple[dict, dict, dict]:
    """Signature, constants and attributes, as triton's own launcher derives them from arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compile one launch for one target."""
    signature, constants, attributes = _specialisation(launch)
    if target.startswith("gfx"):  # what `precise_product` says there
        constants = {name: "ieee" if value == "tf32x3" else value for name, value in constants.items()}
    number = re.sub(r"\D", "", target)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(number), 32)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=gpu, options={"num_warps": 4})
    registers, spilled = _registers(compiled.asm["cubin"]) if "cubin" in compiled.asm else (None, None)
    return Compiled(launch.kernel.__name__, launch.case, target, compiled.metadata.shared, registers, spilled)


def _registers(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    text = printed.stdout + printed.stderr
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers and stack, text
    return int(registers[1]), int(stack[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(MOST_SHARED_MEMORY), help="joined by commas (default: all)")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    unknown = sorted(set(targets) - set(MOST_SHARED_MEMORY))
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; expected some of {', '.join(MOST_SHARED_MEMORY)}.")
    rows = []
    for launch in launches():
        for target in targets:
            row = compile_for(launch, target)
            rows.append(row)
            if not arguments.json:
                registers = (
                    "  -" if row.registers is None else f"{row.registers:3d} registers, {row.spilled_bytes} B stack"
                )
                print(
                    f"{row.kernel:24s} {row.case:44s} {row.target:7s} {row.shared_bytes:7d} B shared {registers}",
                    flush=True,
                )
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    too_large = [row for row in rows if row.shared_bytes > MOST_SHARED_MEMORY[row.target]]
    if too_large:
        sys.exit(f"{len(too_large)} kernels need more shared memory than their target has, {too_large[0]} among them.")


if __name__ == "__main__":
    main()

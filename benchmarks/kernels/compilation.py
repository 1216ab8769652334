"""Compile kernels for GPUs that are not here, as they would be launched."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.kernels.machine_code import Instructions, counted, disassembler, least_microseconds

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
    """One launch that was caught.

    Args:
        kernel: The kernel.
        case: What was asked for when it was launched.
        arguments: Its arguments by name.
        options: Of the compiler, such as `num_warps`, where the launch names any.
        programs: How many programs it starts.
        tile: What differs from the tile of the kernel's rule, in words.
    """

    kernel: JITFunction
    case: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    programs: int = 1
    tile: str = ""

    @classmethod
    def of(
        cls, kernel: JITFunction, arguments: Sequence[Any], keywords: dict[str, Any], programs: int = 1
    ) -> "Launch":
        """What triton's launcher was called with, with an empty `case`."""
        named = dict(zip((parameter.name for parameter in kernel.params), arguments, strict=False)) | keywords
        given = {parameter.name: named.pop(parameter.name) for parameter in kernel.params}
        return cls(kernel, "", given, named, programs)


@dataclass(frozen=True)
class Compiled:
    """What a kernel needs.

    Args:
        kernel: Its name.
        case: What it was launched for, and what differs from the tile of its rule.
        target: The GPU.
        shared_bytes: Shared memory a program.
        registers: Registers a thread; None where no tool tells (AMD).
        spilled_bytes: Of a thread's stack; None where no tool tells.
        wide_loads: Instructions that load 16 bytes a thread, or copy them to shared memory; None where they are not counted (AMD).
        narrow_loads: Those that load 2 bytes; None where they are not counted.
        instructions: What one warp executes; None where they are not counted (AMD).
        floor_us: Microseconds that an H200 takes at least to issue the instructions of the launch, or for those of the ALU,
            whichever is more; None where they are not counted, or loops run as often as nobody said in `TRIPS`.
    """

    kernel: str
    case: str
    target: str
    shared_bytes: int
    registers: int | None
    spilled_bytes: int | None
    wide_loads: int | None
    narrow_loads: int | None
    instructions: Instructions | None
    floor_us: float | None


TRIPS: dict[str, Callable[[dict[str, Any]], tuple[int, ...]]] = {
    "forward_kernel": lambda given: (given["K"],),
    "scores_kernel": lambda given: (given["K"],),
    "packed_forward_kernel": lambda given: (given["walk"],) if given["WALKS"] else (),
    "score_gradient_kernel": lambda given: (given["blocks_a_split"], given["K"]),
    "weighted_rows_kernel": lambda given: (math.ceil(given["m"] / given["BM"]),),
    "spread_weights_kernel": lambda given: (math.ceil(given["m"] / given["BM"]),),
    # On average over programs, of which some are there for buckets that happen to be cut into pieces.
    "bucket_sums_kernel": lambda given: (math.ceil(len(given["order"]) / len(given["owners"]) / given["BE"]),),
}
"""How often the loops of a kernel run, outermost first, as the compiler leaves them: from a launch's arguments by name."""


@contextmanager
def caught_launches() -> Iterator[list[Launch]]:
    """Catch launches instead of running them, with an empty `case`."""
    caught: list[Launch] = []

    def catch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        caught.append(Launch.of(self, arguments, keywords, math.prod(grid)))

    before, JITFunction.run = JITFunction.run, catch
    try:
        yield caught
    finally:
        JITFunction.run = before


def specialisation(launch: Launch) -> tuple[dict, dict, dict]:
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
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_for(launch: Launch, target: str, *, counts: bool = True) -> Compiled:
    """Compile one launch for one target, and count its instructions where there is a tool that shows them, unless told not to."""
    signature, constants, attributes = specialisation(launch)
    if target.startswith("gfx"):  # what `precise_product` and `wide_ranged_product` say there
        constants = {name: "ieee" if value in ("tf32x3", "tf32") else value for name, value in constants.items()}
    number = re.sub(r"\D", "", target)
    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(number), 32)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=gpu, options={"num_warps": 4, **launch.options})
    kernel, options = launch.kernel.__name__, {"num_warps": 4, **launch.options}
    cubin = compiled.asm.get("cubin")
    registers, spilled = (None, None) if cubin is None else _registers(cubin)
    trips = TRIPS[kernel](launch.arguments) if kernel in TRIPS else ()
    instructions = None if cubin is None or not counts else counted(cubin, trips)
    floor = None
    if instructions is not None and (trips or not instructions.loops):
        floor = round(least_microseconds(instructions, launch.programs * options["num_warps"]), 1)
    wide, narrow = (
        len(re.findall(load, compiled.asm["ptx"])) if "ptx" in compiled.asm else None
        for load in (r"ld\.global\S*\.v4\.b32\b|cp\.async\.cg\b", r"ld\.global\S*\.[bu]16\b")
    )
    shared = compiled.metadata.shared
    case = f"{launch.case} {launch.tile}".rstrip()
    return Compiled(kernel, case, target, shared, registers, spilled, wide, narrow, instructions, floor)


def _registers(cubin: bytes) -> tuple[int, int]:
    text = disassembler("-res-usage", cubin)
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers and stack, text
    return int(registers[1]), int(stack[1])

"""Compile kernels for GPUs that this machine lacks, with the arguments that they would be launched with."""

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
    """A launch that was caught.

    Args:
        kernel: The launched kernel.
        case: Name of the case whose call made the launch.
        arguments: Arguments of the kernel by name.
        options: Compiler options of the launch, such as `num_warps`.
        programs: Number of programs that the launch starts. Default: 1.
        tile: Differences from the tile of the kernel's rule, as text. Default: empty, for none.
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
        """Return a launch with an empty `case` from the arguments of triton's launcher."""
        named = dict(zip((parameter.name for parameter in kernel.params), arguments, strict=False)) | keywords
        by_parameter = {parameter.name: named.pop(parameter.name) for parameter in kernel.params}
        return cls(kernel, "", by_parameter, named, programs)


@dataclass(frozen=True)
class Compiled:
    """Resources that a compiled kernel needs.

    Args:
        kernel: Name of the kernel.
        case: Name of the case, and differences from the tile of the kernel's rule.
        target: Name of the GPU's architecture, a key of `MOST_SHARED_MEMORY`.
        shared_bytes: Bytes of shared memory per program.
        registers: Registers per thread; None if no tool counts them (AMD).
        spilled_bytes: Bytes of a thread's stack; None if no tool counts them (AMD).
        wide_loads: Instructions that load 16 bytes per thread, or copy them to shared memory; None if not counted
            (AMD).
        narrow_loads: Instructions that load 2 bytes per thread; None if not counted (AMD).
        instructions: Instructions that one warp executes; None if not counted (AMD).
        floor_us: Least microseconds on an H200: for issuing all instructions of the launch, or for its ALU
            instructions, whichever is more. None if instructions are not counted, or `TRIPS` does not say how often the
            kernel's loops run.
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


# By kernel: a function that takes a launch's arguments by name, and returns how often each loop of the compiled kernel
# runs, outermost first.
TRIPS: dict[str, Callable[[dict[str, Any]], tuple[int, ...]]] = {
    "forward_kernel": lambda values: (values["K"],),
    "scores_kernel": lambda values: (values["K"],),
    "packed_forward_kernel": lambda values: (values["walk"],) if values["WALKS"] else (),
    "score_gradient_kernel": lambda values: (values["blocks_a_split"], values["K"]),
    "weighted_rows_kernel": lambda values: (math.ceil(values["m"] / values["BM"]),),
    "spread_weights_kernel": lambda values: (math.ceil(values["m"] / values["BM"]),),
    # An average over programs: some programs exist only in case a bucket is cut into pieces.
    "bucket_sums_kernel": lambda values: (math.ceil(len(values["order"]) / len(values["owners"]) / values["BE"]),),
}


@contextmanager
def caught_launches() -> Iterator[list[Launch]]:
    """Catch launches in the `with` block instead of running them, and yield a list of them; their `case` is empty."""
    caught: list[Launch] = []

    def catch(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        caught.append(Launch.of(self, arguments, keywords, math.prod(grid)))

    before, JITFunction.run = JITFunction.run, catch
    try:
        yield caught
    finally:
        JITFunction.run = before


def specialisation(launch: Launch) -> tuple[dict, dict, dict]:
    """Return signature, constants and attributes as triton's own launcher derives them from arguments."""
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


def compile_for(launch: Launch, target: str, *, counts: bool = True) -> Compiled:
    """Compile a launch for a target; count its instructions if `counts` and a tool shows them."""
    signature, constants, attributes = specialisation(launch)
    if target.startswith("gfx"):  # the results of `precise_product` and `wide_ranged_product` on AMD
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

"""Compile kernels for GPUs that this machine lacks, with the arguments that they would be launched with."""

import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.ops.roofline import H200

# Names of instructions by class. Instructions of the scalar unit, whose names begin with U, are in the first two
# classes only.
_CLASSES = {
    "tensor_core": r"[A-Z]*HG?MMA|[A-Z]*IG?MMA|[A-Z]*QG?MMA|UTC[A-Z]*MMA|DMMA",
    "memory": r"LDG[A-Z]*|STG|LDS[A-Z]*|STS[A-Z]*|LDL|STL|LD|ST|ATOM[A-Z]*|RED[A-Z]*|LDTM|STTM|UTMA[A-Z]*|UBLK[A-Z]*",
    "alu": r"I?ADD3?|IADD[0-9A-Z]*|VIADD[A-Z]*|LOP3?|PLOP3|SHF|SHL|SHR|SEL|FSEL|[IFHD]SETP|[IFHD]SET[0-9]?|HSETP2|HMNMX2|"
    r"[IF]?V?I?MNMX3?|FMNMX3?|PRMT|LEA|IABS|BMSK|SGXT|P2R|R2P|CSEL|VABSDIFF[0-9]?|MOV|FCHK|FSWZADD",
}

# Fewest instructions of a loop; each has 16 bytes.
_SHORTEST_LOOP = 12

_INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[0-9T]\s+)?([A-Z][A-Z0-9_]*)(\S*)([^;]*);", re.MULTILINE
)


@dataclass(frozen=True)
class Instructions:
    """Numbers of instructions that one warp executes: all, by class, and the number of loops in the code.

    ALU instructions are integer additions, shifts, bitwise operations, selections, and comparisons of integers and floats, which
    share units for 16 threads per clock on each quarter of a multiprocessor. Memory is global, shared and local.
    """

    all: int
    alu: int
    tensor_core: int
    memory: int
    loops: int


def least_microseconds(instructions: Instructions, warps: int) -> float:
    """Return the least time of an H200 for a number of warps: for issuing instructions, or for its ALU, whichever is more."""
    issued = H200.comparisons / 16  # 4 instructions per clock, and 64 comparisons of threads per clock
    return 1e6 * warps * max(instructions.all / issued, 32 * instructions.alu / H200.comparisons)


def disassembler(option: str, cubin: bytes) -> str:
    """Return the output of NVIDIA's `cuobjdump`, which triton includes, for a compiled kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
    return printed.stdout + printed.stderr


def counted_text(text: str, trips: Sequence[int]) -> Instructions:
    """Count the instructions of one warp, skipped ones included, in machine code as text.

    `trips` says how often loops run, outermost first; loops without a number count once.
    """
    code = [(int(address, 16), name, rest) for address, name, _, rest in _INSTRUCTION.findall(text)]
    branches = ((address, re.search(r"0x([0-9a-f]+)", rest)) for address, name, rest in code if name == "BRA")
    # Shorter loops wait for something, or fill the space behind the end.
    loops = {(int(target[1], 16), address) for address, target in branches if target}
    loops = {(first, last) for first, last in loops if last - first >= 16 * _SHORTEST_LOOP}
    counts: Counter[str] = Counter()
    for address, name, _ in code:
        if name == "NOP":
            continue
        times = 1
        for trip in trips[: sum(first <= address <= last for first, last in loops)]:
            times *= trip
        counts["all"] += times
        for kind, names in _CLASSES.items():
            if re.fullmatch(names, name):
                counts[kind] += times
                break
    return Instructions(counts["all"], counts["alu"], counts["tensor_core"], counts["memory"], len(loops))


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
    """A launch that was caught: arguments by name, compiler options and number of programs."""

    kernel: JITFunction
    case: str
    arguments: dict[str, Any]
    options: dict[str, Any]
    programs: int = 1

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
    """Resources that a compiled kernel needs. What no tool counts, as on AMD, is None.

    `spilled_bytes` are bytes of a thread's stack. `wide_loads` load 16 bytes per thread, or copy them to shared memory,
    `narrow_loads` 2 bytes. `floor_us` are the least microseconds on an H200 for issuing all instructions of the launch, or for its
    ALU instructions, whichever is more; None also if `TRIPS` does not say how often the kernel's loops run.
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
    options = {"num_warps": 4, **launch.options}
    compiled = triton.compile(source, target=gpu, options=options)
    kernel = launch.kernel.__name__
    cubin = compiled.asm.get("cubin")
    registers, spilled = (None, None) if cubin is None else _registers(disassembler("-res-usage", cubin))
    trips = TRIPS[kernel](launch.arguments) if kernel in TRIPS else ()
    instructions = None if cubin is None or not counts else counted_text(disassembler("-sass", cubin), trips)
    floor = None
    if instructions is not None and (trips or not instructions.loops):
        floor = round(least_microseconds(instructions, launch.programs * options["num_warps"]), 1)
    wide, narrow = (
        len(re.findall(load, compiled.asm["ptx"])) if "ptx" in compiled.asm else None
        for load in (r"ld\.global\S*\.v4\.b32\b|cp\.async\.cg\b", r"ld\.global\S*\.[bu]16\b")
    )
    shared = compiled.metadata.shared
    return Compiled(kernel, launch.case, target, shared, registers, spilled, wide, narrow, instructions, floor)


def _registers(text: str) -> tuple[int, int]:
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers and stack, text
    return int(registers[1]), int(stack[1])

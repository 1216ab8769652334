"""Instructions of a compiled kernel, counted in the machine code that NVIDIA's disassembler prints."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import triton

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
    """Numbers of instructions that one warp executes.

    Args:
        all: All executed instructions.
        alu: Integer additions, shifts, bitwise operations, selections, and comparisons of integers and floats. They
            share units for 16 threads per clock on each quarter of a multiprocessor.
        tensor_core: Matrix products on tensor cores.
        memory: Loads, stores and atomics of global, shared and local memory.
        loops: Number of loops in the code; the caller of `counted` says how often they run.
    """

    all: int
    alu: int
    tensor_core: int
    memory: int
    loops: int


def counted(cubin: bytes, trips: Sequence[int] = ()) -> Instructions:
    """Count the instructions of one warp.

    Instructions that branches skip are counted too.

    Args:
        cubin: The compiled kernel.
        trips: How often loops run, outermost first. Default: empty; loops without a number count once.
    """
    return counted_text(disassembler("-sass", cubin), trips)


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
    """Count the instructions of one warp as `counted` does, in machine code as text."""
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

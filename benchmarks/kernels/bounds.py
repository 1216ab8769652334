"""The GPUs that kernels are compiled for, and upper bounds for kernels at the papers' shapes on sm_90, against regressions."""

from dataclasses import dataclass

# Bytes that one program may use, by target.
MOST_SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


@dataclass(frozen=True)
class Bound:
    """Registers per thread, and instructions and ALU instructions that one warp executes: some 4 % above the measured numbers."""

    registers: int
    instructions: int
    alu: int


TARGET = "sm_90"

# Bounds by kernel and case. If a case launches a kernel several times, they hold for the first launch.
BOUNDS: dict[tuple[str, str], Bound] = {
    ("forward_kernel", "llama-3.2-1b"): Bound(132, 3690, 2510),
    ("forward_kernel", "llama-3.1-8b"): Bound(238, 4440, 2650),
    ("score_gradient_kernel", "llama-3.2-1b"): Bound(168, 28340, 11510),
    ("score_gradient_kernel", "llama-3.1-8b"): Bound(255, 41900, 14690),
    ("bucket_sums_kernel", "llama-3.2-1b"): Bound(142, 5755, 3750),
    ("bucket_sums_kernel", "llama-3.1-8b"): Bound(171, 7320, 4710),
}

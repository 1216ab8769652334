"""What kernels of the papers' shapes may need at most on sm_90, with every triton that is supported: held against regressions."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """The most that may be found, some 4 % above what was.

    Args:
        registers: Registers a thread.
        instructions: That one warp executes.
        alu: Of these those of the ALU.
    """

    registers: int
    instructions: int
    alu: int


TARGET = "sm_90"

BOUNDS: dict[tuple[str, str], Bound] = {
    ("forward_kernel", "llama-3.2-1b"): Bound(132, 3690, 2510),
    ("forward_kernel", "llama-3.1-8b"): Bound(238, 4440, 2650),
    ("packed_forward_kernel", "llama-3.2-1b"): Bound(100, 6090, 3210),
    ("packed_forward_kernel", "llama-3.1-8b"): Bound(174, 8300, 3630),
    ("packed_forward_kernel", "prompt of llama-3.2-1b"): Bound(100, 1560, 830),
    ("packed_scores_kernel", "llama-3.2-1b"): Bound(78, 980, 710),
    ("packed_scores_kernel", "llama-3.1-8b"): Bound(83, 1000, 710),
    ("score_gradient_kernel", "llama-3.2-1b"): Bound(168, 28340, 11510),
    ("score_gradient_kernel", "llama-3.1-8b"): Bound(255, 41900, 14690),
    ("bucket_sums_kernel", "llama-3.2-1b"): Bound(142, 5755, 3750),
    ("bucket_sums_kernel", "llama-3.1-8b"): Bound(171, 7320, 4710),
}
"""By kernel and case; of a kernel that is launched several times for a case the first launch. Where programs of
`packed_forward_kernel` walk, they have four blocks of tokens."""

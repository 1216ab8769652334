"""Cost that attention to the depth adds to attention to the sequence, by length, group and slots (MoDA, tables 2 and 7).

    python -m benchmarks.depth_cost
    python -m benchmarks.depth_cost --device cuda
    python -m benchmarks.depth_cost --device cuda --shapes 4096x8x64,16384x8x256

The setting is one layer, one text and 8 heads of keys and values of width 64, with causal attention and a separate
tensor per slot. Both passes of these are timed in turns: the *sequence* alone by FlashAttention, and by the kernel that
torch chooses (*usual*); sequence and depth joined, by the kernel that torch chooses (*merged*), by FlashAttention
(*merged-flash*), and by flex attention on request (*merged-flex*); the *depth* alone; and a copy of as many bytes as
the slots have. The *bound* is the time in which the copy would move all that the depth must read and write: queries and
slots once in each pass, and the gradients of both once. A way that reads sequence and depth is timed only if it agrees
with float64 at three tokens.
"""

import sys
from collections.abc import Sequence

from benchmarks.depth_cost.shapes import shapes, whats
from benchmarks.options import add_resumption, device_command, prepare_device


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and append to `depth_cost.csv`; return 1 if a result was wrong or a measurement failed, else 0."""
    parser = device_command(__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument(
        "--shapes",
        type=shapes,
        help="as in 4096x8x64, joined by commas (default: 2048x2x32 on a CPU, else the paper's)",
    )
    parser.add_argument("--whats", type=whats, help="default: all that the device has")
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of timing per shape (default: 12)")
    add_resumption(parser, "shape")
    parser.add_argument(
        "--profile", action="store_true", help="also write the kernels of the ways that read both to profile.csv"
    )
    arguments = parser.parse_args(argv)
    prepare_device(arguments)
    from benchmarks.depth_cost.bench import run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks gpu | ops | model | tiles | kernels | report`, from the root of the repository.

Needs torch and transformers, on a GPU and for `kernels` triton; `report` draws with matplotlib.
"""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one of the benchmarks; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    # What a command imports is imported when it is asked for: `report` runs where torch is not installed.
    from benchmarks import report
    from benchmarks.gpu import options as gpu_options
    from benchmarks.kernels import options as kernel_options
    from benchmarks.models import options as model_options
    from benchmarks.ops import options as op_options
    from benchmarks.tiles import options as tile_options

    for module in (gpu_options, op_options, model_options, tile_options, kernel_options, report):
        module.add_command(commands)
    chosen = parser.parse_args(arguments)
    return chosen.run(chosen)


if __name__ == "__main__":
    sys.exit(main())

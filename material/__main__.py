"""`python -m material NAME...`: fetch, and print one path per name."""

import argparse
import sys

from material.fetch import FETCH
from material.registry import MaterialError


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is named; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m material", description="Fetch models and data, and print their paths."
    )
    parser.add_argument("names", nargs="+", choices=FETCH, metavar="NAME", help=", ".join(FETCH))
    for name in parser.parse_args(arguments).names:
        try:
            print(FETCH[name](), flush=True)
        except MaterialError as error:
            print(f"material: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m material NAME...`: fetch, and print one path a name."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from material.addresses import addresses
from material.articles import articles
from material.benchmarks import benchmarks
from material.chats import chats
from material.elements import elements
from material.factbook import factbook
from material.glosses import glosses
from material.minilm import minilm
from material.registry import MaterialError
from material.smollm2 import smollm2_135m, smollm2_gguf, tiny_llama

FETCH: dict[str, Callable[[], Path]] = {
    "smollm2": smollm2_135m,
    "smollm2-gguf": smollm2_gguf,
    "tiny-llama": tiny_llama,
    "addresses": lambda: addresses().train.parent,
    "addresses/train": lambda: addresses().train,
    "addresses/held_out": lambda: addresses().held_out,
    "articles": articles,
    "benchmarks": benchmarks,
    "chats": lambda: chats().train.parent,
    "chats/train": lambda: chats().train,
    "chats/held_out": lambda: chats().held_out,
    "elements": elements,
    "factbook": lambda: factbook().questions,
    "minilm": minilm,
    "glosses": glosses,
}
"""Each fetches, unless it has been, and returns the path."""


def main(arguments: list[str] | None = None) -> int:
    """Fetch what is named; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m material", description="Fetch material and print where it lies.")
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

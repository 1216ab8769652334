"""Draw what the methods add to a decoder, one picture per page of docs/methods, and two pictures of the whole.

    python -m docs.pictures                         # into docs/images
    python -m docs.pictures --output FOLDER --png   # elsewhere, and as PNG too

Run the command in the root of the clone. Each picture draws the default options. Equal versions of matplotlib write equal bytes.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from docs.pictures.canvas import Picture
from docs.pictures.layers import deus, lesa, llama_pro, solar
from docs.pictures.memories import engram, glossary, hierarchical, midus, moc, moda, packs, ultramem_v2
from docs.pictures.overview import choosing, workflow

IMAGES = Path(__file__).parents[1] / "images"
STYLE: Any = {"svg.hashsalt": "architecture", "svg.fonttype": "path", "font.family": "DejaVu Sans"}

PICTURES: Mapping[str, Callable[[], Picture]] = {
    "solar": solar,
    "llama-pro": llama_pro,
    "lesa": lesa,
    "deus": deus,
    "midus": midus,
    "hierarchical": hierarchical,
    "moc": moc,
    "ultramem-v2": ultramem_v2,
    "engram": engram,
    "moda": moda,
    "packs": packs,
    "glossary": glossary,
    "workflow": workflow,
    "choosing": choosing,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=IMAGES, help="folder of the pictures (default: docs/images)")
    parser.add_argument("--png", action="store_true", help="write each picture as PNG too")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw().figure
            figure.savefig(options.output / f"architecture-{name}.svg", metadata={"Date": None})
            if options.png:
                figure.savefig(options.output / f"architecture-{name}.png", dpi=72)


if __name__ == "__main__":
    main()

"""Write the tables of docs/families.md: methods that work for each type of Transformers.

    python scripts/families.py              check the page against the installed Transformers
    python scripts/families.py --write      write the page's table

A method works if `upscale` accepts a tiny checkpoint of the type, after the proof of the memory's site, and the result has the base's
bits; for dense methods that promise no identity, if each layer of the base gives the same bits at its place in the result. Trying
all takes about fifteen minutes on one core. The page names the version of Transformers that the table was made with.
"""

import argparse
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm

from midus_hf.anatomy.types import MAIN_TYPES, UnknownType, model_type_of
from scripts.anatomy.__main__ import causal_types, composite_types
from scripts.anatomy.proof import with_more_heads
from scripts.anatomy.tiny import tiny_composite_model, tiny_model
from upscalers.methods.contract import METHODS
from upscalers.runs.upscale import upscale

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEADING = "## Every type"
COMPOSITE_HEADING = "## Every larger model"

_CHAPTERS = {"memory_tokens": 24, "chapters": 12, "k": 2}
_SMALL_PREDICTORS = {"hidden_size": 8, "epochs": 1}
#: Requests with small options that are tried on every type without a row in the table of families; the first that works counts. The
#: key `placement` is not an option; it puts the new layer between layers of one kind in models with several kinds.
REQUESTS: dict[str, tuple[dict[str, Any], ...]] = {
    "moc": (_CHAPTERS, {**_CHAPTERS, "site": "behind-layer"}),
    "ultramem-v2": ({"n": 8, "k": 4}, {"n": 8, "k": 4, "site": "skip"}),
    "moda": ({},),
    **dict.fromkeys(
        ("hier-ffn", "hier-kv", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn"),
        ({"sizes": [3, 0, 2], "branching": 3},),
    ),
    "midus-hml": ({"n": 8, "k": 3},),
    "midus-pkm": ({"n": 8, "k": 3},),
    "midus-linear": ({"slots": 16, "k": 3},),
    "llama-pro": ({},),
    "opt-deus": ({},),
    "avg-deus": ({}, {"placement": "1"}),
    "lesa": (_SMALL_PREDICTORS,),
    "solar": ({},),
}
#: Methods whose result has more layers than the base.
DEEPER = tuple(name for name in REQUESTS if METHODS[name].adds_layers)
#: Methods that are tried on the language models within composite models.
TRIED_WITHIN = ("moc", "midus-hml", "llama-pro")


#: Names for sets of methods in the tables.
SETS = {
    "all": tuple(METHODS),
    "hier-*": tuple(name for name in METHODS if name.startswith("hier-")),
    "hier-lora-*": ("hier-lora-qk", "hier-lora-vo", "hier-lora-ffn"),
    "midus-*": ("midus-hml", "midus-pkm", "midus-linear"),
    "copies": ("llama-pro", "solar"),
    "combinations": ("opt-deus", "avg-deus", "lesa"),
}


class Row(NamedTuple):
    """A type, and either the methods that work or why none does.

    Methods have the marks of the page: † at another site, ‡ only between layers of one kind.
    """

    model_type: str
    methods: tuple[str, ...]
    refusal: str = ""


def shortened(methods: tuple[str, ...]) -> str:
    """Return methods as a cell of a table, with the name of a set if a row has the whole set."""
    names = list(methods)
    for name, members in SETS.items():
        if set(members) <= set(names):
            names.insert(names.index(members[0]), name)
            names = [each for each in names if each not in members]
    return ", ".join(names)


def grouped(rows: list[Row], cell: Callable[[Row], str], *, by: str) -> list[str]:
    """Return a line of a table for each value of a cell: its types, and the value; most types first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(cell(row), []).append(row)
    lines = ["| types | " + by + " |", "|---|---|"]
    for value, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines.append(f"| {', '.join(f'`{row.model_type}`' for row in members)} | {value} |")
    return lines


def composite_row_of(model_type: str) -> Row:
    """Return the row of a type that contains a language model, after trying some methods."""
    methods = []
    refusal = ""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        try:
            tiny_composite_model(model_type).save_pretrained(base)
        except Exception as error:  # models raise whatever their parts raise
            return Row(model_type, (), _plain(error))
        for method in TRIED_WITHIN:
            name, error = _tried(base, method, Path(folder))
            methods += [name] if name else []
            refusal = refusal or error
    return Row(model_type, tuple(methods), refusal)


def _tried(base: Path, method: str, folder: Path) -> tuple[str, str]:
    """Return a method with its mark if the method takes a base, and why the first request was refused."""
    refusal = ""
    for number, request in enumerate(REQUESTS[method]):
        options = {key: value for key, value in request.items() if key != "placement"}
        output = folder / f"{method}-{number}"
        try:
            upscale(base=base, method=method, placement=request.get("placement"), options=options, output=output)
        except Exception as error:  # models raise whatever their parts raise
            refusal = refusal or _plain(error)
            continue
        if number == 0:
            return method, refusal
        return f"{method}†" if "site" in options else f"{method}‡", refusal
    return "", refusal


def rows_in(text: str) -> dict[str, str]:
    """Return the methods in the row that names each type, in a part of the page."""
    cells = {}
    for types, methods in re.findall(r"^\| (`.+?`) \| (.+) \|$", text, flags=re.MULTILINE):
        cells.update(dict.fromkeys(re.findall(r"`(.+?)`", types), methods))
    return cells


def methods_on_the_page(model_type: str) -> list[str]:
    """Return the names of the methods that the page gives for a type."""
    part = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition(COMPOSITE_HEADING)[0]
    cell = rows_in(part).get(model_type, "")
    return [method for name in cell.split(", ") for method in SETS.get(name, (name.rstrip("†‡"),)) if method]


def row_of(model_type: str) -> Row:
    """Return the row of a type, after a try of each method on types with a row in the table of types."""
    try:
        row = model_type_of(model_type)
    except UnknownType as error:
        return Row(model_type, (), _plain(error).removeprefix(f"{model_type!r} "))
    # A proven type that no method takes is refused because of its checkpoints.
    refusal = "" if row.wirings else next(iter(row.refused.values()))
    if model_type in MAIN_TYPES:
        return Row(model_type, tuple(METHODS))
    methods = []
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(model_type).save_pretrained(Path(folder) / "base")
        tiny_model(model_type, **with_more_heads(model_type)).save_pretrained(Path(folder) / "base-of-moda")
        for method in REQUESTS:
            name, error = _tried(Path(folder) / ("base-of-moda" if method == "moda" else "base"), method, Path(folder))
            methods += [name] if name else []
            refusal = refusal or error
    return Row(model_type, tuple(methods), refusal)


def table_of(rows: list[Row]) -> str:
    """Return the part of the page below its heading: the counts, and the types that methods take."""
    taken = [row for row in rows if row.methods]
    deeper = [row for row in taken if any(method.startswith(DEEPER) for method in row.methods)]
    lines = [
        f"Methods take {len(taken)} of {len(rows)} causal types of Transformers {transformers.__version__}, and {len(deeper)} of "
        "these with new layers.",
        "",
        f"- *copies* are {', '.join(SETS['copies'])}. What `solar` takes, `stack` takes too.",
        f"- *combinations* are {', '.join(SETS['combinations'])}.",
        "- †: with `site=behind-layer` (moc) or `site=skip` (ultramem-v2).",
        "- ‡: between layers of one kind, which `--placement` names.",
        "",
        *grouped(taken, lambda row: shortened(row.methods), by="methods"),
    ]
    return "\n".join([*lines, ""])


def composite_table_of(rows: list[Row]) -> str:
    """Return the part of the page about composite models: the counts, and the types that methods take."""
    taken = [row for row in rows if row.methods]
    names = [method.rstrip("†‡") for row in taken for method in row.methods]
    counts = [f"{names.count(method)} {method}" for method in TRIED_WITHIN]
    head = [f"Of {len(rows)} types, {len(taken)} are taken: {', '.join(counts)}.", ""]
    lines = grouped(taken, lambda row: ", ".join(row.methods), by="methods that take them, of those tried")
    return "\n".join([*head, *lines, ""])


def _plain(error: Exception) -> str:
    """Return an exception's message in one line, in which no character ends a cell of a table."""
    return " ".join(str(error).split()).replace("|", "/")


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or compare the page with the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page's table")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    above = text.partition(f"{HEADING}\n")[0]
    table = table_of([row_of(model_type) for model_type in tqdm(causal_types(), unit="type")])
    larger = composite_table_of(
        [composite_row_of(model_type) for model_type in tqdm(composite_types(), unit="larger type")]
    )
    page = f"{above}{HEADING}\n\n{table}\n{COMPOSITE_HEADING}\n\n{larger}"
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if page != text:
        print(f"{PAGE.name} is not what Transformers {transformers.__version__} gives; write the page with --write.")
    return int(page != text)


if __name__ == "__main__":
    raise SystemExit(main())

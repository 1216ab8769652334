"""Terminal output of `midus edit`."""

import statistics
from typing import Any

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from upscalers.edits.numbers import written

# Greatest number of chapters with a row each, and of layers with a column of biases each; tables summarise more of them.
_MOST_CHAPTERS, _MOST_LAYERS = 64, 4


def print_chapters(listed: dict[str, Any]) -> None:
    """Print the banks of a checkpoint, as `list_chapters` returned them."""
    console = Console()
    for memory in listed["memories"]:
        options = _table("memory", memory["name"])
        for name, value in _headline(memory).items():
            options.add_row(name, value)
        console.print(options)
        for bank in memory["banks"]:
            layers = written(bank["layers"])
            read_by = f"read by layer{'s' * (len(bank['layers']) > 1)} {layers}"
            console.print(Text(f"\nbank {bank['bank']}, {read_by}; bias: of the router of a layer"))
            console.print(_summary(bank) if memory["chapters"] > _MOST_CHAPTERS else _all_chapters(memory, bank))
    for edit in listed["edits"]:
        console.print(Text(f"edited: {edit['command']}, chapters {edit['chapters']} of {edit['memory']}"))


def print_edit(result: dict[str, Any]) -> None:
    """Print what an edit or `export` did, by its result."""
    numbers = written(result["chapters"])
    summary = f"{result['output']}: {result['command']}, chapters {numbers} of memory {result['memory']}"
    if "banks" in result:
        summary += f", bank{'s' * (len(result['banks']) > 1)} {written(result['banks'])}"
        summary += f"; {result['chapters_after']} chapters, before {result['chapters_before']}"
    Console().print(Text(summary), soft_wrap=True)


def _headline(memory: dict[str, Any]) -> dict[str, str]:
    rank, bits = memory["bank_rank"], memory["bank_bits"]
    bank = f"rows of a factor of rank {rank}" if rank else "one matrix"
    return {
        "site": memory["site"],
        "chapters": f"{memory['chapters']}, of them shared {memory['shared_chapters']}",
        "rows": f"{memory['memory_tokens']:,}, per chapter {memory['chapter_tokens']:,}",
        "bank": bank + (f", of integers of {bits} bits" if bits else ""),
        "routing": f"{memory['routing']}, k = {memory['k']}, weighting {memory['weighting']}",
        "normalise": "yes" if memory["normalise"] else "no",
        "banks": f"share = {memory['share']}",
    }


def _all_chapters(memory: dict[str, Any], bank: dict[str, Any]) -> Table:
    biases: dict[int, list[float | None]] = bank["router_biases"]
    wide = len(biases) > _MOST_LAYERS
    columns = ["lowest bias", "highest bias"] if wide else [f"bias {layer}" for layer in biases]
    table = _table("chapter", "", "row norm", *columns)
    for number, norm in enumerate(bank["row_norms"]):
        of_chapter = [of_layer[number] for of_layer in biases.values()]
        finite = [bias for bias in of_chapter if bias is not None]
        shown = [min(finite, default=None), max(finite, default=None)] if wide else of_chapter
        kind = "shared" if number < memory["shared_chapters"] else "routed"
        table.add_row(str(number), kind, *map(_figure, (norm, *shown)))
    return table


def _summary(bank: dict[str, Any]) -> Table:
    """Return a table of norms and biases over all chapters, for a bank with too many chapters to list."""
    table = _table("over all chapters", "lowest", "median", "highest")
    biases: dict[int, list[float | None]] = bank["router_biases"]
    rows = {"row norm": bank["row_norms"], **{f"bias {layer}": of_layer for layer, of_layer in biases.items()}}
    for name, values in rows.items():
        finite = [value for value in values if value is not None]
        figures = (min(finite), statistics.median(finite), max(finite)) if finite else (None, None, None)
        table.add_row(name, *map(_figure, figures))
    zero = [number for number, norm in enumerate(bank["row_norms"]) if norm == 0]
    if zero:
        table.add_row("zero", written(zero))
    return table


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _table(*columns: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, show_edge=False)
    for column in columns:
        table.add_column(Text(column), no_wrap=True)
    return table

"""A report for people to look at: a table of levels and one of nodes."""

from collections.abc import Mapping, Sequence

import rich.box
from rich.table import Table
from rich.text import Text

from midus_hf.clusters.report import LevelReport, NodeReport


def level_table(levels: Sequence[LevelReport]) -> Table:
    """A row for each level.

    Args:
        levels: From `level_reports`.
    """
    table = _table("Windows of the nodes of each level")
    labelled = levels[0].purity is not None
    for name in ("level", "nodes", "empty", "least", "median", "most", *(("purity", "NMI") if labelled else ())):
        table.add_column(name, justify="right")
    for row in levels:
        sizes = [f"{row.nodes:,}", f"{row.empty:,}", f"{row.least:,}", f"{row.median:,.1f}", f"{row.most:,}"]
        table.add_row(str(row.level), *sizes, *((f"{row.purity:.1%}", f"{row.nmi:.3f}") if labelled else ()))
    return table


def node_table(nodes: Sequence[NodeReport], level: int, texts: Mapping[int, str]) -> Table:
    """A row for each node, with its labels if there are any, and a line for each of its sample documents.

    Args:
        nodes: From `node_reports`.
        level: Whose nodes they are.
        texts: The beginnings of the documents, from `sample_texts`.
    """
    table = _table(f"Nodes of level {level}")
    labelled = any(node.labels for node in nodes)
    for name in ("node", "windows"):
        table.add_column(name, justify="right", no_wrap=True)
    if labelled:
        table.add_column("labels", no_wrap=True)
    table.add_column("documents")  # the only one that may be made narrower
    for node in nodes:
        labels = ", ".join(f"{name} {share:.0%}" for name, share in node.labels)
        lines = Text("\n".join(texts.get(number, "") for number in node.samples), no_wrap=True, overflow="ellipsis")
        table.add_row(str(node.node), f"{node.windows:,}", *([Text(labels)] if labelled else []), lines)
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)

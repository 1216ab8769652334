"""Reports on a bank: its levels and blocks, and the documents that trained them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BANK_AUDIT, BANKS_FOLDER, BankLayout, level_file
from upscalers.banks.opened import Node, find_layout, open_bank, parse_nodes, record_of, written_node
from upscalers.checkpoint.source import resolve_source
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from midus_hf.banks.audit import BankAudit


def list_bank(model: str | Path, memory: str | None = None) -> dict[str, Any]:
    """Return the levels of a bank, and which of their blocks were written.

    Args:
        model: A checkpoint with a bank: a folder or a hub id.
        memory: Name of the memory, needed if the model has several with a bank. Default: the only one.

    Returns:
        `{"model", "memory", "type", "branching", "fetched", "bank", "levels"}`. `levels` has `{"level", "nodes",
        "parameters", "written", "generic", "bytes_on_disk"}` for each level with blocks: `parameters` is the number of
        parameters per block, `written` has the nodes whose blocks were written, and `generic` is whether the block of
        the generic memory was written.

    Raises:
        RequestError: If there is no bank.
    """
    with resolve_source(str(model)) as source:
        name, layout = find_layout(source.folder, memory)
        levels = []
        with open_bank(source.folder, name, layout) as bank:
            for level in layout.levels:
                written, nodes = bank.written(level), layout.blocks.nodes(level)
                path = source.folder / BANKS_FOLDER / name / level_file(level)
                levels.append(
                    {
                        "level": level,
                        "nodes": nodes,
                        "parameters": layout.record_numel(level),
                        "written": [node for node in written if node < nodes],
                        "generic": nodes in written,
                        "bytes_on_disk": path.stat().st_blocks * 512,
                    }
                )
    return {
        "model": str(model),
        "memory": name,
        "type": layout.memory_type,
        "branching": layout.blocks.branching,
        "fetched": layout.fetched,
        "bank": layout.bank,
        "levels": levels,
    }


def audit(
    model: str | Path,
    blocks: Sequence[str] = (),
    subtree: bool = False,
    by_document: bool = False,
    memory: str | None = None,
) -> dict[str, Any]:
    """Return the documents in the sequences that fetched blocks while the blocks trained.

    Args:
        model: A checkpoint with a bank whose training was recorded: a folder or a hub id.
        blocks: Blocks to report the documents of, each `LEVEL:NODE`. Default: no blocks, to report all.
        subtree: Whether to include the blocks of all nodes below the given ones. Default: False.
        by_document: Whether to report documents even if `blocks` is empty. Default: False, to report blocks with their
            sums.
        memory: Name of the memory, needed if the model has several with a bank. Default: the only one.

    Returns:
        `{"model", "memory", "blocks"}`, or `{"model", "memory", "documents"}` for documents. `blocks` has `{"block",
        "deleted", "documents", "sequences", "tokens", "whole"}` for each block, and one more entry for what trained a
        block before it was deleted. `whole` is whether the record is complete, that is, nothing unrecorded trained the
        block. `documents` has `{"file", "digest", "line", "id", "blocks"}` for each document, where `blocks` has
        `{"block", "deleted", "sequences", "tokens"}` for each block.

    Raises:
        RequestError: If a node does not exist, or the bank has no record.
    """
    with resolve_source(str(model)) as source:
        name, layout = find_layout(source.folder, memory)
        chosen = parse_nodes(blocks, layout, subtree) if blocks else None
        with open_bank(source.folder, name, layout), record_of(source.folder / BANKS_FOLDER / name) as record:
            if record is None:
                raise RequestError(
                    f"the bank in {source.folder} has no {BANK_AUDIT}; expected one, of a run that was given audit: true."
                )
            report = {"model": str(model), "memory": name}
            if chosen is None and not by_document:
                return report | {"blocks": _blocks(record, layout)}
            return report | {"documents": _documents(record, layout, chosen)}


def _blocks(record: "BankAudit", layout: BankLayout) -> list[dict[str, Any]]:
    unrecorded = record.unrecorded()
    rows: dict[tuple[Node, bool], tuple[int, ...]] = {(block, False): (0, 0, 0, False) for block in unrecorded}
    for block, deleted, *sums in record.totals():
        rows[block, deleted] = (*sums, deleted or block not in unrecorded)
    names = ("documents", "sequences", "tokens", "whole")
    return [
        {"block": written_node(block, layout), "deleted": deleted, **dict(zip(names, row, strict=True))}
        for (block, deleted), row in sorted(rows.items())
    ]


def _documents(record: "BankAudit", layout: BankLayout, blocks: Sequence[Node] | None) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for each in record.trained(blocks):
        file, digest, line, name = dataclasses.astuple(each.document)
        row = {"file": file, "digest": digest, "line": line, "id": name, "blocks": []}
        block = {"block": written_node(each.block, layout), "deleted": each.deleted}
        block |= {"sequences": each.sequences, "tokens": each.tokens}
        rows.setdefault((file, digest, line), row)["blocks"].append(block)
    return [rows[key] for key in sorted(rows)]

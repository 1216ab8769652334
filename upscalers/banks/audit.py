"""Record of the documents that trained the blocks of a bank, by block or by document."""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BANK_AUDIT, BANKS_FOLDER, BankLayout
from upscalers.banks.nodes import Node, parse_nodes, written_node
from upscalers.banks.opened import find_layout, open_bank
from upscalers.checkpoint.source import resolve_source
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    from midus_hf.banks.audit import BankAudit


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
    unrecorded, rows = record.unrecorded(), {}
    for block, deleted, *sums in record.totals():
        rows[block, deleted] = (*sums, deleted or block not in unrecorded)
    rows = {(block, False): (0, 0, 0, False) for block in unrecorded} | rows
    names = ("documents", "sequences", "tokens", "whole")
    return [
        {
            "block": written_node(block, layout),
            "deleted": deleted,
            **dict(zip(names, rows[block, deleted], strict=True)),
        }
        for block, deleted in sorted(rows)
    ]


def _documents(record: "BankAudit", layout: BankLayout, blocks: Sequence[Node] | None) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for each in record.trained(blocks):
        document = each.document
        key = (document.file, document.digest, document.line)
        of_document = rows.setdefault(
            key,
            {
                "file": document.file,
                "digest": document.digest,
                "line": document.line,
                "id": document.name,
                "blocks": [],
            },
        )
        of_document["blocks"].append(
            {
                "block": written_node(each.block, layout),
                "deleted": each.deleted,
                "sequences": each.sequences,
                "tokens": each.tokens,
            }
        )
    return [rows[key] for key in sorted(rows)]


@contextlib.contextmanager
def record_of(folder: Path, make: bool = False) -> Iterator["BankAudit | None"]:
    """Open the record of what trained the blocks of a bank, and close it afterwards; yield None if there is no record.

    Args:
        folder: Folder of the bank.
        make: Whether to create an empty record if there is none. Default: False.

    Raises:
        RequestError: If the record is damaged.
    """
    from midus_hf.banks.audit import BankAudit
    from midus_hf.banks.level_file import BankError

    path = folder / BANK_AUDIT
    if make and not path.exists():
        with BankAudit() as empty:
            empty.save(path)
    if not path.exists():
        yield None
        return
    try:
        with BankAudit(path) as record:
            yield record
    except BankError as error:
        raise RequestError(str(error)) from None
    except sqlite3.DatabaseError as error:
        raise RequestError(
            f"{path} is damaged ({error}); expected a record as a run wrote it. Copy the bank again."
        ) from None

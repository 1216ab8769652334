"""What has trained the blocks of a bank: told by block, and by document."""

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
    """Tell which documents were in the sequences that fetched blocks while these trained.

    Args:
        model: A checkpoint with a bank whose training was recorded: a folder or a hub id.
        blocks: Each `LEVEL:NODE`: to tell the documents of these alone. Default: all.
        subtree: Whether those of the nodes below are told as well. Default: false.
        by_document: Whether to tell documents where no block is named. Default: false, blocks with their sums.
        memory: Name of one of several memories. Default: the only one.

    Returns:
        `{"model", "memory", "blocks"}` or, of documents, `{"model", "memory", "documents"}`. `blocks` has `{"block", "deleted",
        "documents", "sequences", "tokens", "whole"}` for each block, once more for what trained it before it was deleted; `whole`
        is whether nothing else trained it, of which there is no record. `documents` has `{"file", "digest", "line", "id", "blocks"}`
        for each document, and `blocks` of it `{"block", "deleted", "sequences", "tokens"}`.

    Raises:
        RequestError: If a node is not there, or the bank has no record.
    """
    with resolve_source(str(model)) as source:
        name, layout = find_layout(source.folder, memory)
        chosen = parse_nodes(blocks, layout, subtree) if blocks else None
        with open_bank(source.folder, name, layout), record_of(source.folder / BANKS_FOLDER / name) as record:
            if record is None:
                raise RequestError(
                    f"the bank in {source.folder} has no {BANK_AUDIT}; expected one, of a run that was given audit: true."
                )
            told = {"model": str(model), "memory": name}
            if chosen is None and not by_document:
                return told | {"blocks": _blocks(record, layout)}
            return told | {"documents": _documents(record, layout, chosen)}


def _blocks(record: "BankAudit", layout: BankLayout) -> list[dict[str, Any]]:
    unrecorded, told = record.unrecorded(), {}
    for block, deleted, *sums in record.totals():
        told[block, deleted] = (*sums, deleted or block not in unrecorded)
    told = {(block, False): (0, 0, 0, False) for block in unrecorded} | told
    names = ("documents", "sequences", "tokens", "whole")
    return [
        {
            "block": written_node(block, layout),
            "deleted": deleted,
            **dict(zip(names, told[block, deleted], strict=True)),
        }
        for block, deleted in sorted(told)
    ]


def _documents(record: "BankAudit", layout: BankLayout, blocks: Sequence[Node] | None) -> list[dict[str, Any]]:
    told: dict[tuple[str, str, int], dict[str, Any]] = {}
    for each in record.trained(blocks):
        document = each.document
        place = (document.file, document.digest, document.line)
        of_document = told.setdefault(
            place,
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
    return [told[place] for place in sorted(told)]


@contextlib.contextmanager
def record_of(folder: Path, make: bool = False) -> Iterator["BankAudit | None"]:
    """The record of what trained the blocks of a bank, closed afterwards; None if it has none.

    Args:
        folder: Of the bank.
        make: Whether to make one that knows nothing, where there is none. Default: false.

    Raises:
        RequestError: If it is damaged.
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

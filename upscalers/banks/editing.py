"""Edits of a bank: each writes another checkpoint, in which all other bytes stay the same."""

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BANKS_FOLDER, BankLayout
from midus_hf.files.checkpoint_files import BLOCK_STATES, CHECKPOINT_NAME, PARTIAL_MODEL, RESUMED, STATE, is_of
from upscalers.banks.block_file import BlockFile
from upscalers.banks.opened import (
    Node,
    find_layout,
    open_bank,
    parse_nodes,
    record_of,
    written_node,
    written_nodes,
)
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.runs.output_folder import OutputFolder

if TYPE_CHECKING:
    from midus_hf.banks.memory_bank import MemoryBank


@dataclass(frozen=True)
class BankRequest:
    """The request that all edits of a bank share.

    Args:
        model: A checkpoint with a bank, trained or not: a folder or a hub id.
        output: The folder to make.
        memory: Name of the memory, needed if the model has several with a bank. Default: the only one.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
    """

    model: str | Path
    output: str | Path
    memory: str | None = None
    overwrite: bool = False


def delete(request: BankRequest, nodes: Sequence[str], subtree: bool = False) -> dict[str, Any]:
    """Delete blocks, so that they are as if they were never written: they add zero, and what they learned is gone.

    No file of the output holds any of the deleted blocks. They are not copied into the bank. States to resume training from
    are left out with the checkpoints that hold them. The blocks are also removed from files that `export` wrote into the
    folder.

    Args:
        nodes: Nodes whose blocks are deleted, each `LEVEL:NODE`.
        subtree: Whether to delete the blocks of all nodes below as well. Default: False.

    Returns:
        The result of `edit_bank`, where `blocks` has the deleted blocks that had been written.

    Raises:
        RequestError: If a node does not exist, or the output cannot be made.
    """
    deleted: list[Node] = []

    def examine(bank: "MemoryBank") -> list[Node]:
        deleted.extend(node for node in parse_nodes(nodes, bank.layout, subtree) if bank.has_record(*node))
        return deleted

    def edit(bank: "MemoryBank") -> list[Node]:
        with record_of(bank.folder) as audit:
            if audit is not None:
                audit.delete(deleted)
        return deleted

    return edit_bank("delete", request, examine, edit)


def import_blocks(request: BankRequest, file: str | Path) -> dict[str, Any]:
    """Write the blocks of a file that `export` wrote into the bank, at the same nodes, and return the result of `edit_bank`.

    Raises:
        RequestError: If the blocks are of another model or tree, or the output cannot be made.
    """
    from midus_hf.banks.bank_description import check_same_tree

    def read(bank: "MemoryBank") -> tuple[BlockFile, str | None]:
        blocks = BlockFile.read(Path(file), bank.layout)
        with refusing_requests():
            remedy = "Export blocks of a model of the same tree."
            return blocks, check_same_tree(bank.tree, blocks.tree, f"the file {file}", remedy)

    def examine(bank: "MemoryBank") -> list[Node]:
        read(bank)
        return []

    def edit(bank: "MemoryBank") -> list[Node]:
        blocks, bank.description["tree"] = read(bank)
        for (level, index), record in blocks.records():
            bank.write(level, index, record)
        with record_of(bank.folder) as audit:
            if audit is not None:  # the old blocks are gone, and the file does not say what trained the new ones
                audit.delete(blocks.nodes)
                audit.add_unrecorded(blocks.nodes)
        return list(blocks.nodes)

    return edit_bank("import", request, examine, edit)


def edit_bank(
    command: str,
    request: BankRequest,
    examine: Callable[["MemoryBank"], list[Node]],
    edit: Callable[["MemoryBank"], list[Node]],
) -> dict[str, Any]:
    """Write a copy of a checkpoint with an edit applied to one of its banks.

    Args:
        command: Name of the edit in the result.
        request: The checkpoint to read and the folder to make.
        examine: Function that looks at the original bank before anything is written, raises an error for a bad request,
            and returns the nodes of blocks that are not copied.
        edit: Function that changes the copy of the bank and returns the nodes of the changed blocks.

    Returns:
        `{"command", "model", "output", "memory", "blocks", "seconds"}`, where `blocks` has the changed blocks.

    Raises:
        RequestError: If the memory does not exist, or the output cannot be made.
    """
    from midus_hf.banks.bank_description import write_description

    started = time.perf_counter()
    with resolve_source(str(request.model)) as source:
        name, layout = find_layout(source.folder, request.memory)
        with open_bank(source.folder, name, layout) as bank:
            deleted = examine(bank)
        memories = open_base(source.folder, needs_weights=False).memories
        folder = OutputFolder(request.output, source.folder, request.overwrite)
        files = _files_beside_banks(source.folder)
        folder.check_space(sum(path.stat().st_size for path in files) + bytes_of_banks(source.folder, memories.banks))
        with folder as partial:
            for path in files:
                target = partial / path.relative_to(source.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                if not (deleted and _copied_without(path, target, layout, deleted)):
                    shutil.copyfile(path, target)
            carry_banks(source.folder, partial, memories.banks, {name: deleted})
            with open_bank(partial, name, layout, writable=True) as bank:
                changed = edit(bank)
                bank.sync()
            write_description(bank.folder, bank.description)
            folder.commit()
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.output),
        "memory": name,
        "blocks": [written_node(node, layout) for node in changed],
        "seconds": time.perf_counter() - started,
    }


def _files_beside_banks(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that hold no blocks: neither files of banks nor states that a run resumes from."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    is_resumed = any(is_of(path.relative_to(folder), RESUMED) for path in files)
    kept = []
    for path in files:
        parts = path.relative_to(folder).parts
        within_run = parts[0] == PARTIAL_MODEL or CHECKPOINT_NAME.fullmatch(parts[0]) or parts[0] == BLOCK_STATES
        if BANKS_FOLDER in parts or within_run:
            continue
        if is_resumed and is_of(path.relative_to(folder), RESUMED, STATE):
            continue
        kept.append(path)
    return kept


def _copied_without(path: Path, target: Path, layout: BankLayout, deleted: Collection[Node]) -> bool:
    """Copy a file of blocks without the deleted blocks; return False, and copy nothing, if it holds none of them."""
    try:
        blocks = BlockFile.read(path, layout)
    except RequestError:
        return False
    if not set(blocks.nodes) & set(deleted):
        return False
    kept = {node: record for node, record in blocks.records() if node not in deleted}
    if kept:
        BlockFile.write(target, layout, blocks.tree, kept)
    return True


def export(
    model: str | Path, nodes: Sequence[str], output: str | Path, subtree: bool = False, memory: str | None = None
) -> dict[str, Any]:
    """Write the blocks of nodes, as far as they were ever written, to a separate file.

    Args:
        model: A checkpoint with a bank: a folder or a hub id.
        nodes: Nodes whose blocks are exported, each `LEVEL:NODE`.
        output: The file to make.
        subtree: Whether to export the blocks of all nodes below as well. Default: False.
        memory: Name of the memory, needed if the model has several with a bank. Default: the only one.

    Returns:
        `{"command", "model", "output", "memory", "blocks"}`, where `blocks` has the exported blocks.

    Raises:
        RequestError: If a node does not exist, none of the blocks was ever written, or the file exists.
    """
    path = Path(output).expanduser()
    if path.exists():
        raise RequestError(f"output {path} exists; expected a new file. Choose another name.")
    with resolve_source(str(model)) as source:
        name, layout = find_layout(source.folder, memory)
        chosen = set(parse_nodes(nodes, layout, subtree))
        with open_bank(source.folder, name, layout) as bank:
            written = [node for node in written_nodes(bank) if node in chosen]
            if not written:
                raise RequestError("none of these blocks was ever written; expected one that was trained or imported.")
            BlockFile.write(path, layout, bank.tree, {node: bank.block(*node) for node in written})
    return {
        "command": "export",
        "model": str(model),
        "output": str(path),
        "memory": name,
        "blocks": [written_node(node, layout) for node in written],
    }

"""Edits of a bank: another checkpoint, all else of which is the same bytes."""

import shutil
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BANKS_FOLDER, BankLayout
from midus_hf.files.checkpoint_files import BLOCK_STATES, CHECKPOINT_NAME, PARTIAL_MODEL, RESUMED, STATE, is_of
from upscalers.banks.audit import record_of
from upscalers.banks.block_file import BlockFile
from upscalers.banks.nodes import Node, parse_nodes, written_node
from upscalers.banks.opened import find_layout, open_bank
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.runs.output_folder import OutputFolder

if TYPE_CHECKING:
    from midus_hf.banks.memory_bank import MemoryBank


@dataclass(frozen=True)
class BankRequest:
    """What every edit of a bank is told.

    Args:
        model: A checkpoint with a bank, trained or not: a folder or a hub id.
        output: The folder to make.
        memory: Name of one of several memories. Default: the only one.
        overwrite: As for `upscale`. Default: False.
    """

    model: str | Path
    output: str | Path
    memory: str | None = None
    overwrite: bool = False


def delete(request: BankRequest, nodes: Sequence[str], subtree: bool = False) -> dict[str, Any]:
    """Let blocks be as if they were never written: what they learned is gone, and they add zero.

    Nothing of them is in any file of the output: not in the bank, into which they are not copied, nor in states to resume training
    from, which are left out with the checkpoints that have them, nor in files that `export` wrote into the folder.

    Args:
        request: From what to what.
        nodes: Each `LEVEL:NODE`.
        subtree: Whether those below are deleted as well. Default: false.

    Returns:
        `{"command", "model", "output", "memory", "blocks", "seconds"}`; `blocks` those that had been written.

    Raises:
        RequestError: If a node is not there, or the output cannot be made.
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

    return edit_bank("delete", request, edit, lambda layout: parse_nodes(nodes, layout, subtree), examine)


def import_blocks(request: BankRequest, file: str | Path) -> dict[str, Any]:
    """Put blocks that `export` wrote in their places, those of the same nodes.

    Args:
        request: From what to what.
        file: That `export` wrote.

    Returns:
        As `delete`; `blocks` those that were put in their places.

    Raises:
        RequestError: If the blocks are of another model or tree, or the output cannot be made.
    """
    from midus_hf.banks.bank_description import check_same_tree

    def tree_of_both(bank: "MemoryBank") -> str | None:
        tree = BlockFile.read(Path(file), bank.layout).tree
        with refusing_requests():
            return check_same_tree(bank.tree, tree, f"the file {file}", "Export blocks of a model of the same tree.")

    def examine(bank: "MemoryBank") -> list[Node]:
        tree_of_both(bank)
        return []

    def edit(bank: "MemoryBank") -> list[Node]:
        blocks = BlockFile.read(Path(file), bank.layout)
        bank.description["tree"] = tree_of_both(bank)
        for (level, index), record in blocks.records():
            bank.write(level, index, record)
        with record_of(bank.folder) as audit:
            if audit is not None:  # what these blocks were before is gone, and the file does not say what trained them
                audit.delete(blocks.nodes)
                audit.add_unrecorded(blocks.nodes)
        return list(blocks.nodes)

    return edit_bank("import", request, edit, lambda layout: BlockFile.read(Path(file), layout), examine)


def edit_bank(
    command: str,
    request: BankRequest,
    edit: Callable[["MemoryBank"], list[Node]],
    check: Callable[[BankLayout], Any],
    examine: Callable[["MemoryBank"], list[Node]] = lambda bank: [],
) -> dict[str, Any]:
    """Write the checkpoint that an edit of its bank makes of another one.

    Args:
        command: What the edit is called.
        request: From what to what.
        edit: Changes a bank, which is its own; returns the blocks that it changed.
        check: Refuses what is asked before anything is written.
        examine: Looks at the bank that is read, before anything is written; returns the blocks that are deleted. Default: none are.

    Raises:
        RequestError: If the memory is not there, or the output cannot be made.
    """
    from midus_hf.banks.bank_description import write_description

    started = time.perf_counter()
    with resolve_source(str(request.model)) as source:
        name, layout = find_layout(source.folder, request.memory)
        check(layout)
        memories = open_base(source.folder, needs_weights=False).memories
        folder = OutputFolder(request.output, source.folder, request.overwrite)
        files = _files_beside_banks(source.folder)
        with open_bank(source.folder, name, layout) as bank:
            deleted = examine(bank)
        folder.check_space(sum(path.stat().st_size for path in files) + bytes_of_banks(source.folder, memories.banks))
        with folder as partial:
            for path in files:
                place = partial / path.relative_to(source.folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                if not (deleted and _copied_without(path, place, layout, deleted)):
                    shutil.copyfile(path, place)
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
    """Return the files of a checkpoint but those of its banks and those that a run resumes from: these have blocks of their own."""
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


def _copied_without(path: Path, place: Path, layout: BankLayout, deleted: Collection[Node]) -> bool:
    """Copy a file of blocks of a bank without some of them; false, and nothing is done, if it is no such file or has none of them."""
    try:
        blocks = BlockFile.read(path, layout)
    except RequestError:
        return False
    if not set(blocks.nodes) & set(deleted):
        return False
    kept = {node: record for node, record in blocks.records() if node not in deleted}
    if kept:
        BlockFile.write(place, layout, blocks.tree, kept)
    return True


def _written(bank: "MemoryBank") -> list[Node]:
    return [(level, index) for level in bank.layout.levels for index in bank.written(level)]


def export(
    model: str | Path, nodes: Sequence[str], output: str | Path, subtree: bool = False, memory: str | None = None
) -> dict[str, Any]:
    """Write blocks to a file of their own, those of the nodes that were written.

    Args:
        model: A checkpoint with a bank: a folder or a hub id.
        nodes: Each `LEVEL:NODE`.
        output: The file to make.
        subtree: Whether those below are exported as well. Default: false.
        memory: Name of one of several memories. Default: the only one.

    Returns:
        `{"command", "model", "output", "memory", "blocks"}`.

    Raises:
        RequestError: If a node is not there, none of them was written, or the file exists.
    """
    path = Path(output).expanduser()
    if path.exists():
        raise RequestError(f"output {path} exists; expected a new file. Choose another name.")
    with resolve_source(str(model)) as source:
        name, layout = find_layout(source.folder, memory)
        chosen = set(parse_nodes(nodes, layout, subtree))
        with open_bank(source.folder, name, layout) as bank:
            written = [node for node in _written(bank) if node in chosen]
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

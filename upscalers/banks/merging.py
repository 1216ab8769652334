"""Merging of runs that trained different blocks of one bank (hierarchical memories, appendix A.2)."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BANK_AUDIT, TREE_FILES
from upscalers.banks.editing import BankRequest, edit_bank
from upscalers.banks.opened import Node, find_layout, open_bank, record_of, written_node, written_nodes
from upscalers.checkpoint.base_model import open_base
from upscalers.checkpoint.safetensors_format import holds_the_same
from upscalers.request.errors import RequestError, refusing_requests

if TYPE_CHECKING:
    from midus_hf.banks.memory_bank import MemoryBank


def merge(request: BankRequest, runs: Sequence[str | Path]) -> dict[str, Any]:
    """Write a model with the blocks that several runs trained from it, each in another part of the tree, with the model frozen.

    Args:
        request: The model that all runs began from, and the folder to make.
        runs: Folders of the trained models.

    Returns:
        The result of `edit_bank`, where `blocks` has the blocks that a run changed.

    Raises:
        RequestError: If a run has another model or tree, a run changed weights outside the bank, or two runs trained the
            same block.
    """
    from midus_hf.banks.bank_description import check_same_tree

    if not runs:
        raise RequestError("no run is given; expected the folders of one or more trained models.")
    folders = [Path(run).expanduser() for run in runs]

    def examine(bank: "MemoryBank") -> list[Node]:
        for folder in folders:
            layout_of_run = find_layout(folder, request.memory)[1]
            if layout_of_run.to_dict() != bank.layout.to_dict():
                raise RequestError(
                    f"{folder} has another memory than {request.model}; expected runs that began from it."
                )
            _check_weights(Path(request.model).expanduser(), folder)
        return []

    def edit(bank: "MemoryBank") -> list[Node]:
        trained_by: dict[Node, Path] = {}
        banks: dict[Node, Path] = {}
        start = {node: bank.checksum(*node) for node in written_nodes(bank)}
        for folder in folders:
            name = find_layout(folder, request.memory)[0]
            with open_bank(folder, name, bank.layout) as run:
                with refusing_requests():
                    remedy = "Train all runs on texts that were assigned by one tree."
                    bank.description["tree"] = check_same_tree(bank.tree, run.tree, str(folder), remedy)
                if not (bank.folder / TREE_FILES[-1]).exists():
                    bank.save_tree(bank.folder, run.folder)
                for node in written_nodes(run):
                    if run.checksum(*node) == start.get(node):
                        continue
                    if node in trained_by:
                        raise RequestError(
                            f"block {written_node(node, bank.layout)} was trained by {trained_by[node]} and by {folder}; expected "
                            "runs of different parts of the tree. Train without a share of the generic memory (generic_share: "
                            "0), or delete the block of one of them."
                        )
                    bank.write(*node, run.block(*node))
                    trained_by[node], banks[node] = folder, run.folder
        _merge_records(bank, start, banks)
        return sorted(trained_by)

    return edit_bank("merge", request, examine, edit)


def _merge_records(bank: "MemoryBank", start: Collection[Node], trained_by: Mapping[Node, Path]) -> None:
    """Merge the records of what trained each block: the blocks of `start` before the runs, the others in the bank of a run."""
    of_run: dict[Path, list[Node]] = {}
    for node, folder in trained_by.items():
        of_run.setdefault(folder, []).append(node)
    with contextlib.ExitStack() as opened:
        records = {folder: opened.enter_context(record_of(folder)) for folder in of_run}
        is_new = not (bank.folder / BANK_AUDIT).exists()
        make = any(record is not None for record in records.values())
        merged = opened.enter_context(record_of(bank.folder, make=make))
        if merged is None:
            return
        if is_new:
            merged.add_unrecorded(start)
        for folder, nodes in of_run.items():
            record = records[folder]
            if record is None:
                merged.add_unrecorded(nodes)
                continue
            for node in nodes:
                merged.take(node, record)


def _check_weights(model: Path, run: Path) -> None:
    """Raise an error if a tensor differs between two checkpoints, wherever it lies in the files."""
    expected, trained = open_base(model).tensors, open_base(run).tensors
    if expected.keys() != trained.keys() or not all(
        holds_the_same(expected[name], trained[name]) for name in expected
    ):
        raise RequestError(
            f"the weights of {run} are not those of {model}; expected runs in which the model was frozen (trainable: new), so that "
            "blocks of one fit the others."
        )

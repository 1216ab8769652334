"""What all edits of a checkpoint have in common: the tensors in their files, and what lies beside the weights."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.files.ownership import code_files
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.record.provenance import read_record, write_record
from upscalers.runs.code import write_code_of
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import OutputTensor


def edited_shards(model: BaseModel, edited: Mapping[str, Sequence[OutputTensor]]) -> dict[str, list[OutputTensor]]:
    """The tensors of the result in the files that they were in, in their order.

    Args:
        model: That is edited.
        edited: By the name of each tensor that does not stay as it is, what is written in its place.
    """
    shards: dict[str, list[OutputTensor]] = {}
    for name, stored in sorted(model.tensors.items(), key=lambda item: (str(item[1].file), item[1].start)):
        assert stored.file is not None
        kept = [OutputTensor(name, Copy(stored.shape, name), stored.dtype)]
        shards.setdefault(stored.file.name, []).extend(edited.get(name, kept))
    return shards


def write_siblings(
    folder: Path,
    partial: Path,
    config: dict[str, Any],
    edit_record: Callable[[dict[str, Any]], dict[str, Any]],
    edit_card: Callable[[str], str],
) -> None:
    """Write what lies beside the weights: what knows of the edit as it is now, all else as it was.

    Args:
        folder: Of the checkpoint that is edited.
        partial: Of the result.
        config: Of the result.
        edit_record: Makes the record of the result, `upscale.json`, of that which there was.
        edit_card: Makes its model card of that which there was.
    """
    copy_travelling_files(folder, partial)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    record, card = read_record(folder), folder / CARD_FILE
    if record is not None:
        write_record(partial, edit_record(record))
    if card.is_file():
        (partial / CARD_FILE).write_text(edit_card(card.read_text(encoding="utf-8")), encoding="utf-8")
    if config.get("auto_map") or code_files(folder):  # the code is that of the options, which the edit may change
        write_code_of(partial)

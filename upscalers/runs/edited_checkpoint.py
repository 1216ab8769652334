"""Writing of an edited checkpoint: some tensors change, and everything else stays as it is."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.files.ownership import code_files
from upscalers.architecture.families import MEMORY_PREFIX
from upscalers.architecture.family import Config
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks, tie_banks
from upscalers.checkpoint.base_model import BaseModel, open_base, write_config
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.record.provenance import read_record, write_record
from upscalers.request.progress import Progress, begin_writing, shown
from upscalers.runs.output_folder import OutputFolder
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import CheckpointWriter, OutputTensor


def edited_shards(model: BaseModel, edited: Mapping[str, Sequence[OutputTensor]]) -> dict[str, list[OutputTensor]]:
    """Return the tensors of the result, in the files and the order in which the edited model stores them.

    Args:
        model: The checkpoint that is edited.
        edited: Tensors to write instead of a tensor, by the name of each tensor that does not stay as it is.
    """
    shards: dict[str, list[OutputTensor]] = {}
    tensors = {name: tensor.as_stored for name, tensor in model.tensors.items() if name not in model.packed}
    for name, stored in sorted(tensors.items(), key=lambda item: (str(item[1].file), item[1].start)):
        assert stored.file is not None
        kept = [OutputTensor(name, Copy(stored.shape, name), stored.dtype)]
        shards.setdefault(_name_in_safetensors(stored.file.name), []).extend(edited.get(name, kept))
    return shards


def _name_in_safetensors(file: str) -> str:
    """Return the name that a file of weights has in the result, whose weights are safetensors."""
    return (
        file if file.endswith(".safetensors") else f"{file.removeprefix('pytorch_').removesuffix('.bin')}.safetensors"
    )


def write_edited(
    model: BaseModel,
    folder: OutputFolder,
    tensors: Mapping[str, Sequence[OutputTensor]],
    config: dict[str, Any],
    edit_record: Callable[[dict[str, Any]], dict[str, Any]],
    edit_card: Callable[[str], str],
    progress: Progress,
) -> int:
    """Write a checkpoint that differs from another in some tensors and records; return the bytes written.

    Args:
        model: The checkpoint that is edited.
        folder: The output folder, which is committed.
        tensors: Tensors to write instead of a tensor, by the name of each tensor that does not stay as it is.
        config: Config of the result; for a larger model, that of the language model within it.
        edit_record: Function that turns the content of the old `upscale.json` into the new content.
        edit_card: Function that turns the text of the old model card into the new text.
        progress: Display that shows every step.
    """
    shards = edited_shards(model, tensors)
    num_bytes = sum(tensor.num_bytes for of_file in shards.values() for tensor in of_file)
    folder.check_space(num_bytes + bytes_of_banks(model.folder, model.memories.banks))
    with folder as partial, shown(progress):
        begin_writing(progress, num_bytes, len(shards))
        writer = CheckpointWriter(model.tensors, scan=False, progress=progress, stored_name=model.stored_name)
        written = writer.write(partial, shards)
        carry_banks(model.folder, partial, model.memories.banks)
        _write_siblings(model, partial, config, edit_record, edit_card)
        open_base(partial)
        folder.commit()
    return written.bytes_written


def _write_siblings(
    model: BaseModel,
    partial: Path,
    config: dict[str, Any],
    edit_record: Callable[[dict[str, Any]], dict[str, Any]],
    edit_card: Callable[[str], str],
) -> None:
    """Write the files beside the weights: edit the record and the card, write config and code, and copy the other files."""
    folder, whole = model.folder, model.whole_config(config)
    copy_travelling_files(folder, partial)
    write_config(partial, whole)
    record, card = read_record(folder), folder / CARD_FILE
    if record is not None:
        write_record(partial, edit_record(record))
    if card.is_file():
        (partial / CARD_FILE).write_text(edit_card(card.read_text(encoding="utf-8")), encoding="utf-8")
    # Which code is needed depends on options that the edit may change.
    if whole.get("auto_map") or code_files(folder):
        write_code_of(partial)


def write_part(source: Path, partial: Path, config: Config) -> None:
    """Write the files beside the weights of a checkpoint that holds a part of another one's tensors.

    Args:
        source: Folder of the other checkpoint.
        partial: Folder of the result, with its weights and banks.
        config: Raw config of the result.
    """
    copy_travelling_files(source, partial)
    write_config(partial, config)
    tie_banks(partial, open_base(partial).memories.banks)
    if str(config.get("model_type")).startswith(MEMORY_PREFIX):
        write_code_of(partial)


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, so that the checkpoint loads without this package."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    write_code(folder, AutoConfig.from_pretrained(folder, local_files_only=True))

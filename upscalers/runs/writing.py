"""Checkpoints on disk: the output folder of commands that write one, and a planned upscaling in it."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY, UpscaleRecord
from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.files.cards import write_card
from midus_hf.files.checkpoint_files import Kind
from midus_hf.files.outputs import OutputFolder
from midus_hf.memories.bank import MemoryFiles, bank_patterns, banks_of
from upscalers.architecture.layer_tensors import Config
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, write_config
from upscalers.checkpoint.safetensors_format import (
    TORCH_NAMES,
    TensorDigests,
    content_sha256,
    read_header,
)
from upscalers.checkpoint.source import copy_travelling_files, total_bank_bytes
from upscalers.checkpoint.tokenizer import CHANGED_KEY, keep_tokenizer, name_processors
from upscalers.record.model_card import base_metadata, model_card
from upscalers.record.provenance import Bytes, Done, Identity, full_record, upscale_record, write_record
from upscalers.request import Progress, one_line, show_progress
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, WriteSummary, split_shards
from upscalers.upscaling import Upscaling

_SPARE_BYTES = 64_000_000


class CheckpointFolder(OutputFolder):
    """An output folder that also replaces banks."""

    def own_files(self) -> Kind:
        return (*super().own_files(), *bank_patterns())

    def free_bytes(self) -> int:
        left = sum(file.lstat().st_blocks * 512 for file in self.partial.rglob("*") if not file.is_dir())
        return shutil.disk_usage(self.disk).free + left

    def check_space(self, num_bytes: int) -> None:
        free = self.free_bytes()
        if free < num_bytes:
            raise RequestError(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {self.disk} has {free / 1e9:.2f} GB free. Free some space or "
                "choose another disk."
            )


def write_upscaled(
    upscaling: Upscaling, folder: CheckpointFolder, progress: Progress, repository: str | None = None
) -> Done:
    """Write the result of an upscaling into a folder, and compare it with the base if the request says `verify`.

    Args:
        upscaling: What was decided; its base has weights.
        folder: The folder to make.
        progress: Display of the stages.
        repository: Where the result will be on the Hub, for its card. Default: None, nowhere.
    """
    base, method = upscaling.base, upscaling.method
    shards = split_shards(upscaling.tensors, upscaling.request.max_shard_bytes)
    digested = TensorDigests(base.tensors, base.weight_names)
    with (
        digested as digests,
        written_from(
            base,
            folder,
            shards,
            banks_of(base.layout.memories),
            progress,
            digests.add,
            base.stored_name,
            scan=upscaling.request.verify,
            more_bytes=upscaling.surgery.bank_bytes + upscaling.scratch_bytes + _SPARE_BYTES,
        ) as written,
    ):
        partial = folder.partial
        for warning in method.review(written.measurements):
            progress.warn(warning)
        progress.stage("checking config and tokenizer", 2)
        tensor_digests = digests.finish()
        record = upscale_record(upscaling, content_sha256(tensor_digests))
        changed = _write_siblings(upscaling, record, partial, progress)
        identity = Identity()
        kl_divergence = None
        if upscaling.request.verify:
            from upscalers.runs.verify import compare_models

            files = {name: tensor for file in shards for name, tensor in read_header(partial / file).items()}
            identity, kl_divergence = compare_models(
                base, partial, base.by_name(files), upscaling.plan, upscaling.dtype, method.identity, progress
            )
        method.fill_banks(base, partial)
        progress.stage("recording what was done", 1)
        bytes_written = written.bytes_written + total_bank_bytes(partial, upscaling.new_banks)
        done = Done(Bytes(written.bytes_read, bytes_written), identity, kl_divergence, written.measurements)
        write_card(partial, model_card(upscaling, done, base_metadata(upscaling.source, progress), repository))
        write_record(partial, full_record(upscaling, done, record, changed, tensor_digests))
        progress.advance()
    return done


def _write_siblings(upscaling: Upscaling, record: UpscaleRecord, partial: Path, progress: Progress) -> dict[str, Any]:
    """Write config, new banks, tokenizer and code; return what `strip` needs to undo changes of the tokenizer's files."""
    base = upscaling.base
    hosts = upscaling.config["model_type"].startswith(MEMORY_PREFIX)
    config = {**upscaling.config, RECORD_KEY: record.to_dict()}
    if hosts:
        config["auto_map"] = _auto_map(base.whole_config(config)["model_type"])
    write_config(partial, base.whole_config(config))
    validated = _validated(partial)
    for bank in upscaling.new_banks.values():
        bank.create(partial, TORCH_NAMES[upscaling.dtype], upscaling.request.seed)
    for bank in banks_of(layout_of(config).memories).values():  # of this config, whose record names the base's weights
        bank.bind_to_base(partial)
    copy_travelling_files(upscaling.source.folder, partial, progress)
    progress.advance()
    changed = keep_tokenizer(upscaling.source, partial, progress)
    if hosts:
        from midus_hf.carried.module import write_code

        write_code(partial, validated)
    if hosts and base.composite is not None:
        native = str(base.composite.config["model_type"]).removeprefix(MEMORY_PREFIX)
        if named := name_processors(native, partial, progress):
            changed[CHANGED_KEY] = {**named, **changed.get(CHANGED_KEY, {})}
    progress.advance()
    return changed


def _auto_map(model_type: str) -> dict[str, str]:
    from transformers import CONFIG_MAPPING

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.standins import ENTRY_MODULE

    config_class: Any = CONFIG_MAPPING[model_type]
    return {auto_class: f"{ENTRY_MODULE}.{name}" for auto_class, name in config_class.class_names().items()}


def _validated(folder: Path) -> Any:
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise RequestError(
            f"transformers refuses the config: {one_line(error)} Repair config.json of the base."
        ) from None


@contextlib.contextmanager
def written_from(
    model: BaseCheckpoint,
    folder: CheckpointFolder,
    shards: dict[str, list[OutputTensor]],
    banks: Mapping[str, MemoryFiles],
    progress: Progress,
    copied: Callable[[str], None] = lambda name: None,
    stored_name: Callable[[str], str] = lambda name: name,
    scan: bool = False,
    more_bytes: int = 0,
) -> Iterator[WriteSummary]:
    """Write tensors and banks; the block writes other files to `folder.partial`, which then appears.

    Args:
        model: The checkpoint that tensors and banks are made of.
        folder: The folder to make.
        shards: Tensors by file name.
        banks: Banks to copy, by the names of their memories.
        progress: Display of the stages.
        copied: Called with the name of each tensor that was copied. Default: nothing.
        stored_name: Returns the name in the file of a tensor. Default: its own.
        scan: Whether to refuse NaN and infinite values. Default: False.
        more_bytes: Bytes that the disk needs in addition. Default: 0.
    """
    num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    folder.check_space(num_bytes + total_bank_bytes(model.folder, banks) + more_bytes)
    with show_progress(progress), folder.writing() as partial:
        writer = CheckpointWriter(model.tensors, scan, progress, copied, stored_name)
        written = writer.write(partial, shards)
        for bank in banks.values():
            bank.copy(model.folder, partial)
        yield replace(written, bytes_written=written.bytes_written + total_bank_bytes(partial, banks))


def write_part(source: Path, partial: Path, config: Config, progress: Progress) -> None:
    """Write the other files of a checkpoint that has part of the tensors of the one in `source`."""
    copy_travelling_files(source, partial, progress)
    hosts = str(config.get("model_type")).startswith(MEMORY_PREFIX)
    if hosts and "auto_map" not in config:  # as that of a language model within a composite model
        config = {**config, "auto_map": _auto_map(config["model_type"])}
    write_config(partial, config)
    for bank in banks_of(open_base(partial).layout.memories).values():
        bank.bind_to_base(partial)
    if hosts:
        write_code_of(partial)


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, to load without this package."""
    from midus_hf.carried.module import write_code

    write_code(folder, _validated(folder))

"""Checkpoints on disk: the output folder of commands that write one, and a planned upscaling in it."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY
from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.files.cards import write_card
from midus_hf.files.checkpoint_files import Kind
from midus_hf.files.outputs import OutputFolder
from midus_hf.memories.bank import MemoryFiles, bank_patterns, banks_of
from midus_hf.memories.registry import are_causal
from upscalers.architecture.layer_tensors import Config
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, write_config
from upscalers.checkpoint.safetensors_format import (
    TORCH_NAMES,
    TensorDigests,
    content_sha256,
    read_header,
    read_tensor,
)
from upscalers.checkpoint.source import copy_travelling_files, total_bank_bytes
from upscalers.checkpoint.tokenizer import CHANGED_KEY, keep_tokenizer, name_processors
from upscalers.record.model_card import base_metadata, model_card
from upscalers.record.provenance import Bytes, Identity, base_record, upscale_record, write_record
from upscalers.request import Progress, one_line, show_progress
from upscalers.runs.job import Job
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, WriteSummary, split_shards


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
    job: Job,
    folder: CheckpointFolder,
    max_shard_bytes: int,
    verify: bool,
    progress: Progress,
    repository: str | None = None,
) -> dict[str, Any]:
    """Write a job's result; return fields of the report; `verify`: refuse NaN, and compare with the base."""
    base, method = job.base, job.method
    hosts = job.config["model_type"].startswith(MEMORY_PREFIX)
    record = upscale_record(method, base, job.plan, job.seed, not are_causal(job.layout.memories))
    config = {**job.config, RECORD_KEY: {}}
    if hosts:
        config["auto_map"] = _auto_map(base.whole_config(config)["model_type"])
    shards, digested = split_shards(job.made, max_shard_bytes), TensorDigests(base.tensors, base.weight_names)
    with folder.writing() as partial, digested as digests:
        written = CheckpointWriter(base.tensors, verify, progress, digests.add, base.stored_name).write(
            partial, shards
        )
        for warning in method.review(written.measurements):
            progress.warn(warning)
        progress.stage("checking config and tokenizer", 2)
        tensor_digests = digests.finish()
        record = replace(record, base_sha256=content_sha256(tensor_digests), zero_gains=_zero_gains(job))
        config[RECORD_KEY] = record.to_dict()
        write_config(partial, base.whole_config(config))
        validated = _validated(partial)
        for bank in job.new_banks.values():
            bank.create(partial, TORCH_NAMES[job.cast(base.dtype)], job.seed)
        for bank in banks_of(base.layout.memories).values():
            bank.copy(base.folder, partial)
        banks = banks_of(layout_of(config).memories)
        for bank in banks.values():
            bank.bind_to_base(partial)
        copy_travelling_files(job.source.folder, partial, progress)
        progress.advance()
        changed = keep_tokenizer(job.source, partial, progress)
        if hosts:
            from midus_hf.carried.module import write_code

            write_code(partial, validated)
            if base.composite is not None:
                native = str(base.composite.config["model_type"]).removeprefix(MEMORY_PREFIX)
                if named := name_processors(native, partial, progress):
                    changed[CHANGED_KEY] = {**named, **changed.get(CHANGED_KEY, {})}
        progress.advance()
        identity, kl_divergence = Identity(None, None), None
        if verify:
            from upscalers.runs.verify import compare_models

            files = {name: tensor for file in shards for name, tensor in read_header(partial / file).items()}
            identity, kl_divergence = compare_models(
                base, partial, base.by_name(files), job.plan, job.cast(base.dtype), method.identity, progress
            )
        method.fill_banks(base, job.plan, partial, progress)
        progress.stage("recording what was done", 1)
        outcome = {
            "bytes": Bytes(written.bytes_read, written.bytes_written + total_bank_bytes(partial, banks)),
            "identity": identity,
            "kl_divergence": kl_divergence,
            "measurements": written.measurements,
        }
        _write_provenance(job, partial, config, changed, tensor_digests, outcome, repository, progress)
        progress.advance()
    return outcome


def _zero_gains(job: Job) -> dict[str, float]:
    """Return gains that start at zero with the root mean square of the base's gains next to them."""
    import torch

    scales = {}
    for name, source in job.method.zero_gains(job.base, job.plan).items():
        _, index, own = name.split(".", 2)
        offset = job.layout.backbone_layers[int(index)][own].offset or 0.0
        gains = read_tensor(job.base.tensors[source], torch.float32) + offset
        scales[name] = float(f"{gains.pow(2).mean().sqrt().item():.4g}")
    return scales


def _write_provenance(
    job: Job,
    partial: Path,
    config: Config,
    changed: dict[str, Any],
    digests: dict[str, str],
    outcome: dict[str, Any],
    repository: str | None,
    progress: Progress,
) -> None:
    from midus_hf.version import __version__

    method, source, counts, entry = job.method, job.source, job.counts(), config[RECORD_KEY]
    # A recipe names only bases on the hub: the path of a local base is private.
    request = {
        **({} if source.revision is None else {"base": f"{source.label}@{source.revision}"}),
        "method": method.name,
        **method.placement_request(job.plan),
        "options": entry["options"],
        "seed": job.seed,
        "dtype": job.dtype,
    }
    card = model_card(
        method,
        source,
        job.plan,
        config,
        job.layout.memories,
        counts,
        request,
        job.warnings,
        outcome["measurements"],
        base_metadata(source, progress),
        job.base.auto_class,
        repository,
        compared=outcome["identity"].checked is not None,
    )
    write_card(partial, card)
    write_record(
        partial,
        {
            "midus_hf": __version__,
            **entry,
            **changed,
            "dtype": job.dtype,
            "base": base_record(job.base, source.label, source.revision, digests),
            "parameters": vars(counts),
            "identity": vars(outcome["identity"]),
            "promises_identity": method.identity,
            "kl_divergence": outcome["kl_divergence"],
            "measurements": outcome["measurements"],
            "paper": method.paper and method.paper.to_dict(),
        },
    )


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
) -> Iterator[WriteSummary]:
    """Write tensors and banks; the block writes other files to `folder.partial`, which then appears."""
    num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    folder.check_space(num_bytes + total_bank_bytes(model.folder, banks))
    with show_progress(progress), folder.writing() as partial:
        writer = CheckpointWriter(model.tensors, scan=False, progress=progress, copied=copied, stored_name=stored_name)
        written = writer.write(partial, shards)
        for bank in banks.values():
            bank.copy(model.folder, partial)
        yield replace(written, bytes_written=written.bytes_written + total_bank_bytes(partial, banks))


def write_part(source: Path, partial: Path, config: Config, progress: Progress) -> None:
    """Write the other files of a checkpoint that has part of the tensors of the one in `source`."""
    copy_travelling_files(source, partial, progress)
    hosts = str(config.get("model_type")).startswith(MEMORY_PREFIX)
    # The config of a language model within a composite model has no `auto_map`.
    config = {**config, "auto_map": _auto_map(config["model_type"])} if hosts and "auto_map" not in config else config
    write_config(partial, config)
    for bank in banks_of(open_base(partial).layout.memories).values():
        bank.bind_to_base(partial)
    if hosts:
        write_code_of(partial)


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, to load without this package."""
    from midus_hf.carried.module import write_code

    write_code(folder, _validated(folder))

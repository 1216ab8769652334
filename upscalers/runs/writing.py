"""Writing of a planned job: tensors, config, verification, provenance, and the move of the folder to its final path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY
from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.memories.bank import banks_of
from upscalers.architecture.layer_tensors import Config
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.banks import bytes_of_banks, copy_banks, tie_banks
from upscalers.checkpoint.base_checkpoint import write_config
from upscalers.checkpoint.content_digest import TensorDigests, content_sha256, weight_names
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, read_header
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.checkpoint.tokenizer import CHANGED_KEY, keep_tokenizer, name_processors
from upscalers.record.model_card import base_metadata, model_card
from upscalers.record.provenance import Bytes, Identity, base_record, upscale_record, write_record
from upscalers.request.errors import one_line
from upscalers.request.progress import Progress
from upscalers.runs.job import Job
from upscalers.runs.output_folder import CheckpointFolder
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, split_shards


@dataclass(frozen=True)
class Writing:
    """The writing of one job; `verify` refuses NaN in the base and compares the result with the base."""

    job: Job
    folder: CheckpointFolder
    max_shard_bytes: int
    verify: bool
    progress: Progress
    repository: str | None = None

    def run(self) -> dict[str, Any]:
        """Write and verify the result, and return `bytes`, `identity`, `kl_divergence` and `measurements` of an `UpscaleReport`."""
        job, progress = self.job, self.progress
        shards = split_shards(job.made, self.max_shard_bytes)
        digested = TensorDigests(job.base.tensors, weight_names(job.base))
        with self.folder.writing() as partial, digested as digests:
            upscaled = upscale_record(job.method, job.base, job.plan, job.seed, job.layout.memories.reads_ahead)
            config = {**job.config, RECORD_KEY: upscaled.to_dict()}
            write_config(partial, job.base.whole_config(config))
            writer = CheckpointWriter(job.base.tensors, self.verify, progress, digests.add, job.base.stored_name)
            written = writer.write(partial, shards)
            for concern in job.method.review(written.measurements):
                progress.warn(concern)
            banks = banks_of(job.layout.memories)
            for bank in job.new_banks.values():
                bank.create(partial, TORCH_NAMES[job.cast(job.base.dtype)], job.seed)
            copy_banks(job.base.folder, partial, banks_of(job.base.layout.memories))
            tie_banks(partial, banks)
            record = self._write_siblings(partial, config)
            identity, kl_divergence = self._verify(partial, shards, config)
            job.method.fill_banks(job.base, job.plan, partial, progress)
            progress.stage("recording what was done", 1)
            outcome = {
                "bytes": Bytes(written.bytes_read, written.bytes_written + bytes_of_banks(partial, banks)),
                "identity": identity,
                "kl_divergence": kl_divergence,
                "measurements": written.measurements,
            }
            self._write_provenance(partial, config, record, digests.finish(), outcome)
            progress.advance()
        return outcome

    def _write_siblings(self, partial: Path, config: Config) -> dict[str, Any]:
        """Write the files other than weights, and return what `strip` needs to undo changes to them."""
        self.progress.stage("checking config and tokenizer", 2)
        copy_travelling_files(self.job.source.folder, partial, self.progress)
        validated = _validated(partial)
        self.progress.advance()
        changed = keep_tokenizer(self.job.source, partial, self.progress)
        if config["model_type"].startswith(MEMORY_PREFIX):
            from midus_hf.carried.module import write_code

            write_code(partial, validated)
            if self.job.base.composite is not None:
                native = str(self.job.base.composite.config["model_type"]).removeprefix(MEMORY_PREFIX)
                if named := name_processors(native, partial, self.progress):
                    changed[CHANGED_KEY] = {**named, **changed.get(CHANGED_KEY, {})}
            config["auto_map"] = validated.to_dict()["auto_map"]
            write_config(partial, self.job.base.whole_config(config))
        self.progress.advance()
        return changed

    def _verify(
        self, partial: Path, shards: dict[str, list[OutputTensor]], config: Config
    ) -> tuple[Identity, float | None]:
        """Compare the result with the base, if requested, and return what was compared, and the KL divergence."""
        if not self.verify:
            return Identity(None, None), None
        from upscalers.runs.verify import compare_models

        job = self.job
        files = {name: tensor for file in shards for name, tensor in read_header(partial / file).items()}
        tensors = job.base.by_name(files)
        dtype, promised = job.cast(job.base.dtype), job.method.identity
        return compare_models(job.base, partial, tensors, job.plan, dtype, promised, self.progress)

    def _write_provenance(
        self, partial: Path, config: Config, record: dict[str, Any], digests: dict[str, str], outcome: dict[str, Any]
    ) -> None:
        from midus_hf.version import __version__

        job, counts, entry = self.job, self.job.counts(), config[RECORD_KEY]
        entry["base_sha256"] = content_sha256(digests)
        write_config(partial, job.base.whole_config(config))
        tie_banks(partial, banks_of(layout_of(config).memories))
        # A recipe names only bases on the hub: the path of a local base is private.
        request = {
            **({} if job.source.revision is None else {"base": f"{job.source.label}@{job.source.revision}"}),
            "method": job.method.name,
            **job.method.placement_request(job.plan),
            "options": entry["options"],
            "seed": job.seed,
            "dtype": job.dtype,
        }
        card = model_card(
            job.method,
            job.source,
            job.plan,
            config,
            job.layout.memories,
            counts,
            request,
            job.warnings,
            outcome["measurements"],
            base_metadata(job.source, self.progress),
            job.base.auto_class,
            self.repository,
            compared=outcome["identity"].checked is not None,
        )
        (partial / CARD_FILE).write_text(card, encoding="utf-8")
        write_record(
            partial,
            {
                "midus_hf": __version__,
                **entry,
                **record,
                "dtype": job.dtype,
                "base": base_record(job.base, job.source.label, job.source.revision, digests),
                "parameters": vars(counts),
                "identity": vars(outcome["identity"]),
                "promises_identity": job.method.identity,
                "kl_divergence": outcome["kl_divergence"],
                "measurements": outcome["measurements"],
                "paper": job.method.paper and job.method.paper.to_dict(),
            },
        )


def _validated(folder: Path) -> Any:
    """Return the config as constructed by transformers, which checks values that this package does not know."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise RequestError(
            f"transformers refuses the config: {one_line(error)} Repair config.json of the base."
        ) from None

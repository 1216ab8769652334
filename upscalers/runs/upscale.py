"""Run of one upscaling, from request to report."""

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.memories.bank import banks_of
from midus_hf.sources.names import check_sources
from midus_hf.sources.peak_memory import peak_memory_bytes
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.source import (
    Source,
    check_account,
    check_repo_id,
    prepare_repository,
    push_folder,
    resolve_source,
    total_bank_bytes,
)
from upscalers.methods.contract import get_method
from upscalers.plan import spell_placement
from upscalers.record.provenance import Bytes, Identity, PushError, UpscaleReport
from upscalers.request import Progress, check_seed, one_line, parse_options, show_progress
from upscalers.runs.job import Job
from upscalers.runs.training_cost import training_cost
from upscalers.runs.writing import CheckpointFolder, write_upscaled

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SPARE_BYTES = 64_000_000


def upscale(
    *,
    base: str | Path,
    method: str,
    output: str | Path | None = None,
    num_new_layers: int | None = None,
    placement: str | int | Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    dtype: str = "auto",
    max_shard_size: str | int = "5GB",
    dry_run: bool = False,
    verify: bool = True,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    progress: Progress | None = None,
) -> UpscaleReport:
    """Upscale a checkpoint, and return the report.

    Args:
        base: A folder or a hub id, `"owner/name"` or `"owner/name@revision"`. For a dry run, a folder with only a `config.json`
            suffices.
        method: Name of a method.
        output: The folder to make; needed unless `dry_run`. Default: None.
        num_new_layers: K, number of new layers. Default: half the layers of the base, or the nearest number that the placement
            allows.
        placement: `distributed`, `top-heavy`, `bottom-heavy`, `llama-pro`, or indices, `"1,4,7"`, `[1, 4, 7]` or `4`. Default: the
            method's.
        options: The method's options. Default: none.
        seed: Random seed. Default: 0.
        dtype: Dtype of the output: `auto`, `float32`, `bfloat16` or `float16`. Default: `"auto"`, the base's.
        max_shard_size: Largest size of a weight file, such as `"5GB"`, or a number of bytes. Default: `"5GB"`.
        dry_run: Whether to only report what would be done. Default: False.
        verify: Whether to refuse NaN and infinite values in the base, and to compare both models' logits, layer by layer, in the
            memory that one module takes. Default: True.
        overwrite: Whether to replace an existing checkpoint, if `upscale` or `strip` wrote all of the folder. Default: False.
        push_to_hub: A repository to upload the result to. Default: None.
        private: Whether to make a new repository private; an existing one must be private. Default: False, the owner's default.
        progress: Progress callback. Default: none.

    Raises:
        RequestError: If the request cannot be carried out; nothing was written.
        MethodError: If the method breaks its contract; nothing was written.
        VerificationError: If the result does not do what the method promises; nothing is left.
        OSError: If reading or writing fails; nothing is left.
        DownloadError: If a connection breaks; nothing is left.
        PushError: If the upload fails; the output is complete, and the error has the report.
    """
    started = time.perf_counter()
    progress = progress or Progress()
    method_class = get_method(method)
    chosen = method_class(parse_options(method_class.options_class, options or {}, f"method {method}"))
    if (corpus := getattr(chosen.options, "corpus", None)) is not None:
        check_sources([("corpus", corpus)])
    if dtype not in DTYPES:
        raise RequestError(f"dtype is {dtype!r}; expected one of: {', '.join(DTYPES)}.")
    check_seed(seed)
    if base == "":
        raise RequestError("base is ''; expected a folder or a hub id.")
    placement = spell_placement(placement)
    max_shard_bytes = parse_size(max_shard_size)
    if output is None and not dry_run:
        raise RequestError("output is missing; expected the folder to make. Pass --output DIR, or --dry-run.")
    if private and not push_to_hub:
        raise RequestError("private is given without push-to-hub; expected both. Pass --push-to-hub REPO as well.")
    if push_to_hub:
        check_repo_id(push_to_hub)
    name, local = str(base), Path(base).expanduser()
    folder = None if output is None else CheckpointFolder(output, local if local.is_dir() else None, overwrite)

    def plan_job(source: Source, needs_weights: bool) -> Job:
        opened = open_base(source.folder, needs_weights, source.hub_id)
        chosen.check(opened)
        return Job(chosen, opened, source, chosen.plan(opened, num_new_layers, placement), seed, dtype)

    if not dry_run:
        if not local.is_dir():
            with resolve_source(name, config_only=True, needs=chosen.needs) as source:
                plan_job(source, needs_weights=False)  # what a dry run refuses is refused before the download
                name = source.hub_id or name
        chosen.check_machine()
        if push_to_hub:
            check_account(push_to_hub)

    with resolve_source(name, config_only=dry_run, needs=chosen.needs) as source:
        job = plan_job(source, needs_weights=not dry_run)
        opened = job.base
        if opened.unexpected:
            progress.warn(
                f"the base holds {len(opened.unexpected)} tensors that its architecture does not have; they are copied."
            )
        if opened.composite is not None:
            progress.note(
                f"the base is a {opened.composite.config['model_type']} model. Its language model ({opened.config['model_type']}) "
                f"is upscaled; {len(opened.outer_shapes)} other tensors are copied byte for byte."
            )
        for remark in job.remarks:
            progress.note(remark)
        for warning in job.warnings:
            progress.warn(warning)
        num_bytes = sum(tensor.num_bytes for tensor in job.made)
        num_bytes += total_bank_bytes(source.folder, banks_of(opened.layout.memories))
        outcome: dict[str, Any] = {"bytes": Bytes(0, num_bytes), "identity": Identity(None, None)}
        outcome |= {"kl_divergence": None, "measurements": []}
        if not dry_run:
            folder = CheckpointFolder(str(output), source.folder, overwrite)
            folder.check_space(num_bytes + chosen.bank_bytes(opened) + job.scratch_bytes() + _SPARE_BYTES)
            with show_progress(progress):
                if push_to_hub:
                    push_to_hub = prepare_repository(push_to_hub, private)
                outcome = write_upscaled(job, folder, max_shard_bytes, verify, progress, push_to_hub)
    cost = training_cost(job) if dry_run else None
    report = UpscaleReport(
        method=chosen.name,
        base=str(base),
        output=None if output is None else str(output),
        model_type=opened.whole_config(job.config)["model_type"],
        num_layers=job.plan.num_layers,
        new_layer_indices=job.plan.new_indices,
        parameters=job.counts(),
        seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_memory_bytes(),
        promises_identity=chosen.identity,
        identity_except=chosen.identity_except if chosen.identity else None,
        renumbers_layers=job.plan.renumbers,
        training=None if cost is None else cost.to_dict(),
        **outcome,
    )
    if push_to_hub and not dry_run:
        _push(Path(str(output)).expanduser(), push_to_hub, private, report, progress)
    return report


def _push(folder: Path, repository: str, private: bool, report: UpscaleReport, progress: Progress) -> None:
    try:
        progress.note(push_folder(folder, repository))
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "was interrupted" if interrupted else f"failed ({type(error).__name__}: {one_line(error)})"
        command = shlex.join(["hf", "upload", repository, str(folder), *(["--private"] if private else [])])
        message = f"the upload to {repository} {reason}; {folder} is complete. Upload it with: {command}"
        raise PushError(message, report, interrupted) from error


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([A-Za-z]*)$")


def parse_size(size: str | int) -> int:
    """Return the bytes of a size such as `"5GB"`, `"500MB"` or a plain number; refuse others."""
    match = _SIZE.match(str(size).strip())
    if not match or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise RequestError(f"max-shard-size is {size!r}; expected a positive size such as 5GB or 500MB.")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))

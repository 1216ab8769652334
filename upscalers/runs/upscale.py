"""Run of one upscaling, from request to report."""

import inspect
import shlex
import time
from pathlib import Path
from typing import Any

from midus_hf.memories.bank import banks_of
from midus_hf.sources.names import check_sources
from midus_hf.sources.peak_memory import peak_memory_bytes
from upscalers.checkpoint.source import (
    check_account,
    check_repo_id,
    prepare_repository,
    push_folder,
    resolve_source,
    total_bank_bytes,
)
from upscalers.methods.contract import Method, get_method, with_corpus
from upscalers.plan import Plan
from upscalers.record.provenance import Bytes, Done, PushError, UpscaleReport
from upscalers.request import Progress, Request, one_line, parse_options
from upscalers.runs.training_cost import training_cost
from upscalers.runs.writing import CheckpointFolder, write_upscaled
from upscalers.upscaling import Upscaling, prepare_upscaling


def upscale(*, progress: Progress | None = None, **keys: Any) -> UpscaleReport:
    """Upscale a checkpoint, and return the report.

    Args:
        progress: Progress callback. Default: none.
        keys: The fields of `Request`: `base`, `method`, `output` and others.

    Raises:
        RequestError: If the request cannot be carried out; nothing was written.
        MethodError: If the method breaks its contract; nothing was written.
        VerificationError: If the result does not do what the method promises; nothing is left.
        OSError: If reading or writing fails; nothing is left.
        DownloadError: If a connection breaks; nothing is left.
        PushError: If the upload fails; the output is complete, and the error has the report.
    """
    started = time.perf_counter()
    request = Request(**keys)
    progress = progress or Progress()
    method = _choose_method(request)
    request.check()
    if request.push_to_hub:
        check_repo_id(request.push_to_hub)
    local = Path(request.base).expanduser()
    folder = None
    if request.output is not None:
        folder = CheckpointFolder(request.output, local if local.is_dir() else None, request.overwrite)

    name = str(request.base)
    plan = None
    if not request.dry_run and not local.is_dir():
        name, plan = _plan_before_download(request, method)
    if not request.dry_run:
        method.check_machine()
        if request.push_to_hub:
            check_account(request.push_to_hub)

    with resolve_source(name, config_only=request.dry_run, needs=method.needs) as source:
        upscaling = prepare_upscaling(request, method, source, not request.dry_run, plan)
        _announce(upscaling, progress)
        if request.dry_run:
            kept_banks = banks_of(upscaling.base.layout.memories)
            done = Done(Bytes(0, upscaling.num_bytes + total_bank_bytes(source.folder, kept_banks)))
            return _report(upscaling, done, started)
        assert folder is not None
        folder.check_source(source.folder)
        repository = None
        if request.push_to_hub:
            repository = prepare_repository(request.push_to_hub, request.private)
        done = write_upscaled(upscaling, folder, progress, repository)
    report = _report(upscaling, done, started)
    if repository:
        _push(Path(str(request.output)).expanduser(), repository, request.private, report, progress)
    return report


def _signature() -> inspect.Signature:
    """Return the signature of `upscale` with each key by its name, for `help` and editors."""
    keys = [each.replace(kind=each.KEYWORD_ONLY) for each in inspect.signature(Request).parameters.values()]
    own = inspect.signature(upscale)
    return own.replace(parameters=[*keys, own.parameters["progress"]])


upscale.__signature__ = _signature()  # type: ignore[attr-defined]


def _choose_method(request: Request) -> Method:
    method = get_method(request.method)
    given = with_corpus(request.method, request.options or {}, request.corpus)
    options = parse_options(method.options_class, given, f"method {request.method}")
    if (corpus := getattr(options, "corpus", None)) is not None:
        check_sources([("corpus", corpus)])
    return method(options)


def _plan_before_download(request: Request, method: Method) -> tuple[str, Plan]:
    """Return the Hub's own name of the base, and the plan; refuse what a dry run refuses."""
    with resolve_source(str(request.base), config_only=True, needs=method.needs) as source:
        plan = prepare_upscaling(request, method, source, needs_weights=False).plan
        return source.hub_id or str(request.base), plan


def _announce(upscaling: Upscaling, progress: Progress) -> None:
    """Show what the user should know before the work begins."""
    base = upscaling.base
    if base.unexpected:
        progress.warn(
            f"the base holds {len(base.unexpected)} tensors that its architecture does not have; they are copied."
        )
    if base.composite is not None:
        progress.note(
            f"the base is a {base.composite.config['model_type']} model. Its language model ({base.config['model_type']}) "
            f"is upscaled; {len(base.outer_shapes)} other tensors are copied byte for byte."
        )
    for remark in upscaling.surgery.remarks:
        progress.note(remark)
    for warning in upscaling.warnings:
        progress.warn(warning)


def _report(upscaling: Upscaling, done: Done, started: float) -> UpscaleReport:
    """Return the report of what was done since `started`, a time of `time.perf_counter`."""
    request = upscaling.request
    method = upscaling.method
    plan = upscaling.plan
    cost = training_cost(upscaling) if request.dry_run else None
    return UpscaleReport(
        method=method.name,
        base=str(request.base),
        output=None if request.output is None else str(request.output),
        model_type=upscaling.base.whole_config(upscaling.config)["model_type"],
        num_layers=plan.num_layers,
        new_layer_indices=plan.new_indices,
        parameters=upscaling.counts,
        bytes=done.bytes,
        identity=done.identity,
        seconds=time.perf_counter() - started,
        peak_rss_bytes=peak_memory_bytes(),
        promises_identity=method.identity,
        identity_except=method.identity_except if method.identity else None,
        kl_divergence=done.kl_divergence,
        measurements=done.measurements,
        renumbers_layers=plan.renumbers,
        training=None if cost is None else cost.to_dict(),
    )


def _push(folder: Path, repository: str, private: bool, report: UpscaleReport, progress: Progress) -> None:
    try:
        progress.note(push_folder(folder, repository))
    except (Exception, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "was interrupted" if interrupted else f"failed ({type(error).__name__}: {one_line(error)})"
        command = shlex.join(["hf", "upload", repository, str(folder), *(["--private"] if private else [])])
        message = f"the upload to {repository} {reason}; {folder} is complete. Upload it with: {command}"
        raise PushError(message, report, interrupted) from error

"""Measure one model: a training step, generation or prefill."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from benchmarks.models.build import Variant, set_trained
from benchmarks.models.decoding import generate, static_decoding
from benchmarks.models.points import Point
from benchmarks.timing import KernelTime, kernels, peak_bytes, release_memory, synchronize

# Number of tokens to generate while every allocation or kernel is recorded.
PROFILED_TOKENS = 4


@dataclass(frozen=True)
class Measured:
    """Result of one measurement; see `Row` of `points.py`. `profiled` names the work that `kernels` belong to."""

    seconds: float
    host_s: float | None = None
    device_s: float | None = None
    launches: float | None = None
    peak_bytes: int | None = None
    compile_s: float | None = None
    profiled: str = ""
    kernels: tuple[KernelTime, ...] = ()


@dataclass(frozen=True)
class _Job:
    """Work to time, and a part of this work that is small enough to profile, and whose peak memory is measured on a CPU.

    `run` repeats the work of `part` `repeats` times, apart from `once`, which both do once; None if no number is known. `part`
    generates `tokens` tokens without `once`, 1 for a prefill. `held_bytes` are held by weights and caches all the time.
    """

    run: Callable[[], object]
    part: Callable[[], object]
    part_is: str
    held_bytes: int
    repeats: float | None
    tokens: int = 1
    once: Callable[[], object] | None = None
    compile_s: float | None = None


def measure(
    model: PreTrainedModel,
    variant: Variant,
    point: Point,
    device: str,
    *,
    with_memory: bool,
    with_profile: bool = False,
) -> Measured:
    """Measure one point, once, after a warm-up."""

    def measured(job: _Job) -> Measured:
        return _measured(job, device, with_memory, with_profile)

    try:
        if point.phase == "train":
            return measured(_training(model, variant, point, device))
        model.eval()
        with torch.no_grad():
            prompt = _tokens(model, point.batch, point.length)
            if point.phase == "prefill":
                return measured(_prefill(model, prompt))
            if point.decoding == "eager":
                return measured(_generation(model, prompt, point.new_tokens))
            # The peak and the profile each run the part once more.
            steps, compiled = point.new_tokens + 2 * PROFILED_TOKENS, point.decoding == "compiled"
            with static_decoding(model, prompt, steps, compiled=compiled, device=device) as decoding:
                return measured(
                    _Job(
                        run=lambda: decoding.take(point.new_tokens),
                        part=lambda: decoding.take(PROFILED_TOKENS),
                        part_is=f"{PROFILED_TOKENS} tokens",
                        held_bytes=_held_bytes(model) + decoding.held_bytes,
                        repeats=point.new_tokens / PROFILED_TOKENS,
                        tokens=PROFILED_TOKENS,
                        compile_s=decoding.compile_s,
                    )
                )
    finally:
        model.zero_grad(set_to_none=True)
        release_memory(device)


def _training(model: PreTrainedModel, variant: Variant, point: Point, device: str) -> _Job:
    """Return the job of an optimizer step with AdamW, whose moments have the dtype of the weights."""
    model.train()
    trained = set_trained(model, variant)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
    rows = point.batch // point.accumulation
    tokens = _tokens(model, point.accumulation, rows, point.length)

    def step(passes: int) -> None:
        for part in tokens[:passes]:
            (model(input_ids=part, labels=part, use_cache=False).loss / passes).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(1)  # creates the optimizer's moments, and compiles what is compiled once
    moments = [moment for state in optimizer.state.values() for moment in state.values()]
    passes = min(2, point.accumulation)  # the second pass is the first that adds to existing gradients
    return _Job(
        run=lambda: step(point.accumulation),
        part=lambda: step(passes),
        part_is=f"{passes} passes and the optimizer",
        held_bytes=_held_bytes(model, *moments, tokens),
        repeats=None,
    )


def _generation(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> _Job:
    generate(model, prompt, PROFILED_TOKENS)
    return _Job(
        run=lambda: generate(model, prompt, new_tokens),
        part=lambda: generate(model, prompt, 1 + PROFILED_TOKENS),
        part_is=f"the prompt and {PROFILED_TOKENS} tokens",
        held_bytes=_held_bytes(model),
        repeats=(new_tokens - 1) / PROFILED_TOKENS,
        tokens=PROFILED_TOKENS,
        once=lambda: generate(model, prompt, 1),  # reading the prompt, which gives the first token
    )


def _prefill(model: PreTrainedModel, prompt: torch.Tensor) -> _Job:
    def run() -> None:
        model(input_ids=prompt, use_cache=True, logits_to_keep=1)

    run()
    return _Job(run=run, part=run, part_is="one prefill", held_bytes=_held_bytes(model), repeats=1)


def _tokens(model: PreTrainedModel, *shape: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, shape, device=model.device)


def _measured(job: _Job, device: str, with_memory: bool, with_profile: bool) -> Measured:
    """Time a job. Its peak is the whole job's on a GPU; on a CPU it is the part's, plus the bytes that are held all the time."""
    if device == "cuda":
        times: list[tuple[float, float]] = []
        before = torch.cuda.memory_allocated()
        peak: int | None = before + peak_bytes(lambda: times.append(_seconds(job.run, device)), device)
        seconds, host_s = times[0]
    else:
        peak = job.held_bytes + peak_bytes(job.part, device) if with_memory else None
        seconds, host_s = _seconds(job.run, device)[0], None
    measured = Measured(seconds, host_s, peak_bytes=peak, compile_s=job.compile_s)
    return _with_profile(measured, job, device) if with_profile else measured


def _seconds(run: Callable[[], object], device: str) -> tuple[float, float]:
    """Run once; return the wall time until the device was done, and until all work was issued."""
    synchronize(device)
    began = time.perf_counter()
    run()
    issued = time.perf_counter()
    synchronize(device)
    return time.perf_counter() - began, issued - began


def _with_profile(measured: Measured, job: _Job, device: str) -> Measured:
    """Add the kernels of the part, and on a GPU the kernels' time in the whole job and their number per token."""
    part = kernels(job.part, device)
    measured = dataclasses.replace(measured, profiled=job.part_is, kernels=tuple(part))
    if device != "cuda" or job.repeats is None or not part:
        return measured
    once = kernels(job.once, device) if job.once is not None else []
    repeated_us = _total_us(part) - _total_us(once)
    return dataclasses.replace(
        measured,
        device_s=(_total_us(once) + job.repeats * repeated_us) / 1e6,
        launches=(_launches(part) - _launches(once)) / job.tokens,
    )


def _total_us(times: list[KernelTime]) -> float:
    return sum(kernel.device_us for kernel in times)


def _launches(times: list[KernelTime]) -> int:
    return sum(kernel.launches for kernel in times)


def _held_bytes(model: PreTrainedModel, *further: torch.Tensor) -> int:
    """Return the bytes in the storages of weights, buffers and further tensors, counting each storage once."""
    tensors = [*model.parameters(), *model.buffers(), *further]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

"""What is measured of one model: a training step, generation, prefill."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, StaticCache

from benchmarks.models.build import Variant, set_trained
from benchmarks.timing import peak_bytes, release_memory
from midus_hf.memory.kept_values import kept_values

_PROFILED_TOKENS = 4
"""Generated where every allocation is recorded, on a CPU."""


@dataclass(frozen=True)
class Point:
    """One setting that is measured.

    Args:
        phase: `"train"`, `"generate"` or `"prefill"`.
        batch: Sequences of an optimizer step, or in a forward pass.
        accumulation: Forward passes of an optimizer step; 1 in other phases.
        length: Tokens of a sequence or prompt.
        new_tokens: Generated. Default: 0.
        decoding: `"eager"` or `"graph"` where tokens are generated. Default: "".
    """

    phase: str
    batch: int
    accumulation: int
    length: int
    new_tokens: int = 0
    decoding: str = ""

    @property
    def tokens(self) -> int:
        """That the measured time is spent on: those generated, or those read."""
        return self.new_tokens if self.phase == "generate" else self.batch * self.length

    def __str__(self) -> str:
        parts = [self.phase, f"batch {self.batch}", f"length {self.length}"]
        parts += [f"accumulation {self.accumulation}"] if self.phase == "train" else []
        parts += [f"new {self.new_tokens} {self.decoding}"] if self.new_tokens else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Measured:
    """Seconds, and the most bytes held meanwhile; None where that was not measured again."""

    seconds: float
    peak_bytes: int | None


def measure(model: PreTrainedModel, variant: Variant, point: Point, device: str, with_memory: bool) -> Measured:
    """Measure one point, once, after a warm-up.

    Args:
        model: Of `variant`, on `device`.
        variant: What the model is.
        point: What to measure.
        device: `"cpu"` or `"cuda"`.
        with_memory: Whether the peak of memory is wanted, which takes a run of its own on a CPU.
    """
    try:
        if point.phase == "train":
            return _train(model, variant, point, device, with_memory)
        model.eval()
        with torch.no_grad():
            return (
                _prefill(model, point, device, with_memory)
                if point.phase == "prefill"
                else _generate(model, point, device, with_memory)
            )
    finally:
        model.zero_grad(set_to_none=True)
        release_memory(device)


def _train(model: PreTrainedModel, variant: Variant, point: Point, device: str, with_memory: bool) -> Measured:
    """One optimizer step with AdamW, its moments in the dtype of the weights."""
    model.train()
    trained = set_trained(model, variant)
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=device == "cuda")
    rows = point.batch // point.accumulation
    tokens = torch.randint(model.config.vocab_size, (point.accumulation, rows, point.length), device=device)

    def step(passes: int) -> None:
        for part in tokens[:passes]:
            (model(input_ids=part, labels=part, use_cache=False).loss / passes).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step(1)  # makes the optimizer's moments, and whatever is compiled once
    kept = [moment for state in optimizer.state.values() for moment in state.values()]
    return _measured(
        lambda: step(point.accumulation),
        lambda: step(min(2, point.accumulation)),  # the second pass is the first that meets gradients
        [*model.parameters(), *model.buffers(), *kept, tokens],
        device,
        with_memory,
    )


def _generate(model: PreTrainedModel, point: Point, device: str, with_memory: bool) -> Measured:
    prompt = torch.randint(model.config.vocab_size, (point.batch, point.length), device=device)
    if point.decoding == "graph":
        with kept_values(model):  # as `generate` does, for the capture and all its replays
            replays = _captured(model, prompt, point.new_tokens)
            return _measured(replays, replays, _held(model), device, with_memory)
    _eager(model, prompt, _PROFILED_TOKENS)
    return _measured(
        lambda: _eager(model, prompt, point.new_tokens),
        lambda: _eager(model, prompt, _PROFILED_TOKENS),
        _held(model),
        device,
        with_memory,
    )


def _prefill(model: PreTrainedModel, point: Point, device: str, with_memory: bool) -> Measured:
    prompt = torch.randint(model.config.vocab_size, (point.batch, point.length), device=device)

    def run() -> None:
        model(input_ids=prompt, use_cache=True, logits_to_keep=1)

    run()
    return _measured(run, run, _held(model), device, with_memory)


def _held(model: PreTrainedModel) -> list[torch.Tensor]:
    """What a model holds between passes: weights and buffers."""
    return [*model.parameters(), *model.buffers()]


def _eager(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> None:
    """Greedy generation as users run it."""
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
    )


def _captured(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> Callable[[], None]:
    """Greedy generation behind a prompt that was read, each step a replay of one CUDA graph; to be called once.

    Only the GPU decides how long it takes; neither reading the prompt nor the capture is part of it.
    """
    length, warm_up = prompt.shape[1], 2
    cache = StaticCache(config=model.config, max_cache_len=length + warm_up + new_tokens)
    token = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)

    def step() -> None:
        token.copy_(model(input_ids=token, past_key_values=cache, logits_to_keep=1).logits.argmax(-1))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replays() -> None:
        for _ in range(new_tokens):
            graph.replay()
        filled = int(cache.get_seq_length())
        if filled != length + warm_up + new_tokens:
            raise RuntimeError(f"the cache holds {filled} tokens; expected {length + warm_up + new_tokens}.")

    return replays


def _measured(
    run: Callable[[], object], profiled: Callable[[], object], held: list[torch.Tensor], device: str, with_memory: bool
) -> Measured:
    """Time `run`; the peak is that of `run` on a GPU, and on a CPU that of `profiled` beside what is held already."""
    if device == "cuda":
        seconds: list[float] = []
        before = torch.cuda.memory_allocated()
        peak = before + peak_bytes(lambda: seconds.append(_seconds(run, device)), device)
        return Measured(seconds[0], peak)
    peak_on_cpu = _bytes_of(held) + peak_bytes(profiled, device) if with_memory else None
    return Measured(_seconds(run, device), peak_on_cpu)


def _seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """Of their storages, each once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

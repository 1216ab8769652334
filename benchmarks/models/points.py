"""Settings at which models are measured, and rows of model.csv. Reports need both without torch installed."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tracked import Run

# Folder of the configs of bases with a name, one `NAME.json` each.
CONFIGS = Path(__file__).parent / "configs"

METHODS = ["base", "llama-pro", "opt-deus", "midus-hml", "midus-pkm", "midus-linear", "moc", "solar"]
PHASES = ["train", "generate", "prefill"]
DECODINGS = ["eager", "graph", "compiled"]


@dataclass(frozen=True)
class Point:
    """Setting of one measurement.

    `batch` counts sequences per optimizer step, or per forward pass in other phases than `"train"`; `accumulation` forward passes per
    optimizer step, 1 in other phases; `new_tokens` the tokens to generate per sequence. `decoding` is one of `DECODINGS` if
    tokens are generated.
    """

    phase: str
    batch: int
    accumulation: int
    length: int
    new_tokens: int = 0
    decoding: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens that the measured time covers, generated or else read, of all sequences."""
        return self.batch * (self.new_tokens if self.phase == "generate" else self.length)

    def __str__(self) -> str:
        parts = [self.phase, f"batch {self.batch}", f"length {self.length}"]
        parts += [f"accumulation {self.accumulation}"] if self.phase == "train" else []
        parts += [f"new {self.new_tokens} {self.decoding}"] if self.new_tokens else []
        return ", ".join(parts)


FILE = "model.csv"
# Columns that identify what is measured once per round.
SUBJECT = (
    "base",
    "method",
    "placement",
    "dtype",
    "phase",
    "decoding",
    "batch",
    "accumulation",
    "length",
    "new_tokens",
)


@dataclass(frozen=True)
class Row(Run):
    """Row of `model.csv`: a model at one point, measured once.

    `round` counts from 1. `status` is "ok", "out of memory" or "failed"; only "ok" has times. `seconds` is the wall time of an
    optimizer step, a generation or a prefill, until the device was done, and `host_s` until all work was issued, on a GPU.
    `device_s` is the time that kernels kept the GPU busy, extrapolated from a few tokens or measured in one prefill, and
    `launches` counts kernels per generated token or per prefill in the same profile; only a run's first measurement has them, and
    training never. `tokens_per_s` is of all sequences. `peak_gb` is the peak of the memory of tensors, weights included; on a
    CPU only a run's first measurement has it. `rounds` is 1, except in old rows, which are medians over rounds.
    """

    backend: str
    base: str
    method: str
    placement: str
    phase: str
    decoding: str
    batch: int
    accumulation: int
    length: int
    new_tokens: int
    dtype: str
    round: int
    status: str
    seconds: float | None
    host_s: float | None
    device_s: float | None
    launches: float | None
    tokens_per_s: float | None
    peak_gb: float | None
    rounds: int
    new_parameters: int
    trained_parameters: int
    total_parameters: int
    error: str


def points(arguments: argparse.Namespace, base: str, device: str) -> tuple[list[Point], list[Point]]:
    """Return the main points, which are measured in every round, and points of further sizes, which are measured once."""
    gpu = device == "cuda"
    _check(arguments, gpu)
    batch, accumulation, length, prompt, new_tokens = (16, 16, 2048, 128, 128) if gpu else (4, 2, 64, 32, 32)
    if gpu and "1b" in base.lower():
        batch = 64
    decodings = arguments.decoding or (["eager", "graph"] if gpu else ["eager"])
    generated = arguments.generate_batches or ([1, 8, 32] if gpu and not arguments.quick else [1])
    prompts = arguments.prompts or ([512, 2048, 8192] if gpu else [64, 256])
    if arguments.quick:
        accumulation, batch, length, prompt, new_tokens, prompts = 2, 2, 16, 4, 4, [8]
    for size in arguments.batches or []:
        if size % accumulation:
            raise SystemExit(f"batch is {size}; expected a multiple of accumulation = {accumulation}.")
    main = [
        Point("generate", rows, 1, prompt, new_tokens, decoding)
        for decoding in decodings
        for rows in ([1] if decoding == "eager" else generated)
    ]
    main += [Point("train", batch, accumulation, length)]
    main += [Point("prefill", 1, 1, tokens) for tokens in prompts]
    by_size = [Point("train", size, accumulation, length) for size in arguments.batches or []]
    by_size += [Point("train", batch, accumulation, tokens) for tokens in arguments.lengths or []]
    by_size = [point for point in dict.fromkeys(by_size) if point not in main]
    wanted = arguments.phases
    return [point for point in main if point.phase in wanted], [point for point in by_size if point.phase in wanted]


def _check(arguments: argparse.Namespace, gpu: bool) -> None:
    for phase in arguments.phases:
        if phase not in PHASES:
            raise SystemExit(f"phase is {phase!r}; expected one of {', '.join(PHASES)}.")
    for decoding in arguments.decoding or []:
        if decoding not in DECODINGS:
            raise SystemExit(f"decoding is {decoding!r}; expected one of {', '.join(DECODINGS)}.")
        if decoding == "graph" and not gpu:
            raise SystemExit("decoding is 'graph'; expected 'eager' or 'compiled' on a CPU. A CUDA graph needs a GPU.")

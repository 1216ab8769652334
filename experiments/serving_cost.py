"""Cost of 10 % of memory in serving and training: a model with memory against the anchor without, in turns in one process.

    python -m experiments.serving_cost --work outputs/serving
    python -m experiments.serving_cost --work outputs/serving --device cuda --dtype bfloat16

The anchor is SmolLM2-135M as it is in transformers (`material.smollm2`). The model with memory is the anchor with
`hier-ffn`: a text fetches blocks with 10 % of the anchor's parameters, from three levels with 16 children per node.

`generate` times greedy generation after a prompt, with blocks that are kept on the device: for one text, for several
texts with one path, and for several texts with different paths. `train` times a training step of the frozen anchor with
blocks that were fetched before (forward, backward and update), in which each sequence has a different path; and the
same with gradients of the anchor, as in co-training. The anchor's own pass is forward and backward with all its
gradients. `ratio` is the median over rounds of the time with memory divided by the anchor's, given with its 20th and
80th percentiles.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.study import Row, add_device, listed, run_columns, tell
from benchmarks.timing import percentile, synchronize
from experiments.steps import results_of, study
from upscalers.runs.upscale import upscale

# Hidden units of the blocks of each level. In SmolLM2-135M, they make 13.5 million parameters per text.
SIZES = [196, 52, 12]

BRANCHING = 16
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
# Functions that run the anchor and the model with memory.
Tasks = tuple[Callable[[], Any], Callable[[], Any]]

STEP = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-3}


@dataclass(frozen=True)
class Models:
    """The anchor and the same model with memory."""

    anchor: Any
    memory: Any
    folder: Path

    @property
    def fetched(self) -> int:
        """Number of parameters that a text fetches."""
        return sum(layout.fetched for layout in self.memory.banks.layouts.values())

    def paths(self, rows: int, which: str) -> torch.Tensor:
        """Return paths `[B, 3]`, all to one leaf, or to leaves whose paths share no node."""
        blocks = next(iter(self.memory.banks.layouts.values())).blocks
        depth = len(blocks.levels)
        leaves = [0 if which == "one" else row % BRANCHING * BRANCHING ** (depth - 1) for row in range(rows)]
        return torch.tensor([blocks.path(leaf) for leaf in leaves])


def main() -> None:
    parser = study(__doc__, work="the model, removed afterwards")
    add_device(parser)
    parser.add_argument("--base", type=Path, help="folder of the anchor (default: SmolLM2-135M)")
    listed(parser, "--sizes", SIZES)
    parser.add_argument("--part", choices=("generate", "train"), help="default: both")
    parser.add_argument("--batch", type=int, default=8, help="texts that generate together (default: 8)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--new", type=int, default=32, help="tokens that follow (default: 32)")
    parser.add_argument("--sequences", type=int, default=2, help="of a training step (default: 2)")
    parser.add_argument("--length", type=int, default=512, help="of a sequence (default: 512)")
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="processor: time of this process on a CPU, which others' work does not lengthen; say one thread (default: wall)",
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    columns = {name: f"{{{name}}}" for name in ("part", "paths", "batch", "tokens")}
    columns |= {"anchor ms": "{anchor_ms:,.0f}", "with memory ms": "{memory_ms:,.0f}"}
    columns |= {"time, with memory / anchor": "{ratio:.3f}", "20 to 80 %": "{ratio_p20:.3f} to {ratio_p80:.3f}"}
    columns["speed"] = lambda row: f"{1 / row['ratio']:.3f}"
    try:
        rows = _rows(_models(arguments), arguments)
        tell(rows, columns, results_of("serving_cost", arguments), run_columns(arguments.device))
    finally:
        shutil.rmtree(arguments.work)


def _models(arguments: argparse.Namespace) -> Models:
    base = arguments.base
    if base is None:
        from material.smollm2 import smollm2_135m

        base = smollm2_135m()
    folder, dtype = arguments.work / "model", getattr(torch, arguments.dtype)
    options = {"sizes": [int(size) for size in arguments.sizes.split(",")], "branching": BRANCHING}
    upscale(base=base, method="hier-ffn", output=folder, options=options, verify=False)
    anchor, memory = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(arguments.device) for path in (base, folder)
    )
    return Models(anchor, memory, folder)


def _rows(models: Models, arguments: argparse.Namespace) -> Iterator[Row]:
    if arguments.part != "train":
        for batch, paths in ((1, "one"), (arguments.batch, "one"), (arguments.batch, "each its own")):
            shape = ("generate", paths, batch, batch * arguments.new)
            yield _row(models, arguments, shape, _generating(models, arguments, batch, paths))
    if arguments.part != "generate":
        for part in ("train, frozen", "train, all"):
            batch = arguments.sequences
            shape = (part, "each its own", batch, batch * arguments.length)
            yield _row(models, arguments, shape, _training(models, arguments, part == "train, all"))


def _generating(models: Models, arguments: argparse.Namespace, batch: int, which: str) -> Tasks:
    """Return functions that generate with the anchor and with memory."""
    tokens = _tokens(models, batch, arguments.prompt, arguments.device)
    settings = {
        "max_new_tokens": arguments.new,
        "min_new_tokens": arguments.new,
        "do_sample": False,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(tokens)
    models.memory.open_banks(models.folder, tiers={"levels": {1: "device", 2: "device", 3: "device"}})
    for model in (models.anchor, models.memory):
        model.eval().requires_grad_(False)
    paths = models.paths(batch, which)

    def generate(model: Any, **inputs: Any) -> Any:
        return model.generate(tokens, attention_mask=mask, **settings, **inputs)

    return lambda: generate(models.anchor), lambda: generate(models.memory, memory_ids=paths)


def _training(models: Models, arguments: argparse.Namespace, everything: bool) -> Tasks:
    """Return functions for the anchor's forward and backward pass, and for a training step with memory."""
    tokens = _tokens(models, arguments.sequences, arguments.length, arguments.device)
    paths = models.paths(arguments.sequences, "each its own")
    models.memory.open_banks(models.folder)
    banks = list(models.memory.banks.train().values())
    models.anchor.train().requires_grad_(True)
    models.memory.train().requires_grad_(everything)

    def both_passes(model: Any, **inputs: Any) -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens, use_cache=False, **inputs).loss.backward()

    def step() -> None:
        both_passes(models.memory, memory_ids=paths)
        for bank in banks:
            bank.step(**STEP)

    return lambda: both_passes(models.anchor), step


def _tokens(models: Models, batch: int, length: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(models.anchor.config.vocab_size, (batch, length), generator=generator).to(device)


def _row(models: Models, arguments: argparse.Namespace, shape: tuple[str, str, int, int], tasks: Tasks) -> Row:
    """Time both tasks in turns, in alternating order. The first round is not counted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(arguments.rounds + 1):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            milliseconds = _milliseconds(tasks[which], arguments.device, CLOCKS[arguments.clock])
            if number:
                taken[which].append(milliseconds)
    ratios = sorted(memory / anchor for anchor, memory in zip(*taken, strict=True))
    part, paths, batch, tokens = shape
    return {
        "part": part,
        "paths": paths,
        "dtype": arguments.dtype,
        "parameters": sum(parameter.numel() for parameter in models.anchor.parameters()),
        "fetched": models.fetched,
        "batch": batch,
        "tokens": tokens,
        "rounds": arguments.rounds,
        "clock": arguments.clock,
        "anchor_ms": statistics.median(taken[0]),
        "memory_ms": statistics.median(taken[1]),
        "ratio": statistics.median(ratios),
        "ratio_p20": percentile(ratios, 20),
        "ratio_p80": percentile(ratios, 80),
    }


def _milliseconds(run: Callable[[], Any], device: str, clock: Callable[[], float]) -> float:
    synchronize(device)
    started = clock()
    run()
    synchronize(device)
    return 1e3 * (clock() - started)


if __name__ == "__main__":
    main()

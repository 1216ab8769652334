"""The steps: what each runs, and in how long."""

import sys
from dataclasses import dataclass
from pathlib import Path

STEPS = ["ceilings", "tests", "attention", "ops", "depth", "1b", "8b"]
FURTHER_STEPS = ["compiled", "sizes", "tiles"]
METHODS = "base,llama-pro,opt-deus,midus-hml"
SECONDS = 540
"""That one step may take, if nothing else is said."""

_MARGIN_SECONDS = 60
"""Between the last case that a step begins and its end."""


@dataclass(frozen=True)
class Step:
    """One process.

    Args:
        name: As on the command line.
        command: What is run, in the root of the repository.
        teaches: What is known afterwards.
    """

    name: str
    command: list[str]
    teaches: str


@dataclass(frozen=True)
class Done:
    """How a step ended.

    Args:
        step: Which one.
        status: Its exit status; None where its time was up.
        seconds: That it took.
        last_lines: Of what it printed, blank ones left out.
    """

    step: Step
    status: int | None
    seconds: float
    last_lines: tuple[str, ...]


def steps(out: Path, seconds: int, rehearse: bool) -> list[Step]:
    """All of them, in the order of what they teach.

    Args:
        out: Folder of the results.
        seconds: That a step may take.
        rehearse: Whether the GPU is pretended.
    """
    budget = str(max(seconds - _MARGIN_SECONDS, seconds // 2))
    device = ["--rehearse"] if rehearse else ["--device", "cuda"]
    common = [*device, "--resume", "--profile", "--budget", budget, "--results", str(out)]

    def model(base: str, *words: str) -> list[str]:
        return [*_python("benchmarks", "model", "--base", base, *words), *common]

    quick = ["--seconds", "0"] if rehearse else []
    main = f"--methods {METHODS} --rounds 2".split()
    compiled = (
        "--methods llama-pro,midus-hml --rounds 1 --phases generate --decoding graph,compiled --generate-batches 1"
    )
    sizes = f"--methods {METHODS} --rounds 1 --phases train --batches 32 --lengths 512,1024,4096"
    return [
        Step(
            "ceilings",
            [*_python("benchmarks.gpu.ceilings"), *device, "--results", str(out)],
            "what a GPU can do at most",
        ),
        Step("tests", _python("pytest", "tests/ops", "-q", *_NOT_FOR_THE_DEVICE), "whether the kernels are right"),
        Step(
            "attention",
            [*_python("benchmarks.gpu.attention_kernels"), *device, "--results", str(out)],
            "which kernel reads the sequence where heads read the depth as well, and whether its bits are torch's",
        ),
        Step("ops", [*_python("benchmarks", "ops"), *quick, *common], "what ops take, beside the roofline and rivals"),
        Step(
            "depth",
            [*_python("benchmarks.depth_cost"), *quick, *common],
            "what reading the depth adds to reading the sequence, both merged and by one kernel",
        ),
        Step("1b", model("llama-3.2-1b", *main), "what a whole model takes"),
        Step("8b", model("llama-3.1-8b", *main), "the same where kernels weigh most"),
        Step(
            "compiled", model("llama-3.1-8b,llama-3.2-1b", *compiled.split()), "what compiling adds to a captured step"
        ),
        Step("sizes", model("llama-3.2-1b,llama-3.1-8b", *sizes.split()), "how a step grows with batch and length"),
        Step(
            "tiles",
            [
                *_python("benchmarks", "tiles", *device, "--resume", "--budget", budget, *quick),
                *("--results", str(out), "--write", str(out / "tiles.json")),
            ],
            "which tiles kernels should have on this GPU",
        ),
    ]


_NOT_FOR_THE_DEVICE = [
    *("-p", "no:cacheprovider", "--ignore", "tests/ops/kernels/test_offline_compilation.py"),
    # Where hypothesis is not installed, the tests that need it shall keep no kernel from being tested.
    "--continue-on-collection-errors",
]


def _python(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *words]

"""The steps of measurements on a GPU: their commands and time limits."""

import sys
from dataclasses import dataclass
from pathlib import Path

STEPS = ["ceilings", "tests", "attention", "ops", "depth", "1b", "8b"]
FURTHER_STEPS = ["compiled", "sizes", "tiles"]
METHODS = "base,llama-pro,opt-deus,midus-hml"
# Default time limit of a step.
SECONDS = 540

# Time between the start of a step's last case and the step's time limit.
_MARGIN_SECONDS = 60


@dataclass(frozen=True)
class Step:
    """Step of the measurements, which runs as one process.

    Args:
        name: Name of the step on the command line.
        command: Command that runs in the root of the repository.
        teaches: Question that the results answer, for people.
    """

    name: str
    command: list[str]
    teaches: str


@dataclass(frozen=True)
class Done:
    """End of a step.

    Args:
        step: The step that ended.
        status: Exit status; None if the step ran out of time.
        seconds: Time that the step took.
        last_lines: Last lines that the step printed, without blank lines.
    """

    step: Step
    status: int | None
    seconds: float
    last_lines: tuple[str, ...]


def steps(out: Path, seconds: int, rehearse: bool) -> list[Step]:
    """Return all steps, the most informative first.

    Args:
        out: Folder of the results.
        seconds: Time limit of a step.
        rehearse: Whether the GPU is pretended.
    """
    budget = str(max(seconds - _MARGIN_SECONDS, seconds // 2))
    device = ["--rehearse"] if rehearse else ["--device", "cuda"]
    common = [*device, "--resume", "--profile", "--budget", budget, "--results", str(out)]

    def model(base: str, *options: str) -> list[str]:
        return [*_python("benchmarks", "model", "--base", base, *options), *common]

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
    # Without hypothesis, test files that import it fail to load, and all other tests must still run.
    "--continue-on-collection-errors",
]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]

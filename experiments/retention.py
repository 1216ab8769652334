"""What chapters and dense layers keep: a domain is learned, then the model is fine-tuned on chats, and both are measured again.

    python -m experiments.retention --work outputs/retention
    python -m experiments.retention --work outputs/retention --seeds 0,1,2 --rates 1e-3,3e-4

SmolLM2-135M with Mixture of Chapters, and with four blocks of LLaMA-Pro, each behind seven or eight layers, which have as many new
parameters (14.1 M, within 0.3 %). The new parameters alone are trained on presidential addresses. Each model is then fine-tuned whole
on chats, the one with chapters three times: with its bank at the same rate as everything else, at a tenth of it, and frozen (the
paper's appendix A.4.4). Measured after each stage are the loss on held-out addresses, the loss on Wikipedia articles, which neither
stage trains on, and two sets of questions. Every step is a command that a person would type, and is skipped where its folder is
there: a run goes on where it stopped.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import run_command, run_once
from benchmarks.tracked import Run, append, this_run
from material.addresses import addresses
from material.articles import articles
from material.benchmarks import benchmarks
from material.chats import chats
from material.smollm2 import smollm2_135m

RETENTION_RESULTS = Path(__file__).parent / "results" / "retention.csv"
TASKS = ("piqa", "openbookqa")
_CONFIGS = Path(__file__).parent.parent / "configs"

ARMS: dict[str, list[str]] = {
    "moc": ["--method", "moc", *("--set layers=7 --set memory_tokens=7552 --set chapters=118".split())],
    "llama-pro": ["--method", "llama-pro", *("--placement 7,16,24,33".split())],
}
BANKS: dict[str, dict[str, Any]] = {
    "equal": {},
    "tenth": {"value_learning_rate": 0.1},  # of the rate of everything else
    "frozen": {"frozen": ["value"]},
}


@dataclass(frozen=True)
class Row(Run):
    """What one model measures after one stage; losses in nats per token, accuracies normalised by length.

    `stage` is `base`, `upscaled`, `continued` or `tuned`; `bank` what fine-tuning does with it; `rate` that of the first stage.
    """

    arm: str
    stage: str
    bank: str
    seed: int
    rate: float
    trained_parameters: int
    domain_loss: float
    general_loss: float
    piqa: float
    openbookqa: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"joined by commas (default: {','.join(ARMS)})")
    parser.add_argument("--seeds", default="0", help="joined by commas (default: 0)")
    parser.add_argument("--rates", default="1e-3", help="of the first stage, joined by commas (default: 1e-3)")
    parser.add_argument("--steps", type=int, default=50, help="of 1,024 tokens, on addresses (default: 50)")
    parser.add_argument("--chat-rate", default="1e-4", help="of fine-tuning (default: 1e-4)")
    parser.add_argument("--chat-steps", type=int, default=50, help="of 4 chats (default: 50)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of each text that is measured (default: 8192)")
    parser.add_argument("--limit", type=int, default=100, help="questions of each set (default: 100)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    run = this_run("cpu")
    print("| model | stage | bank | seed | rate | domain loss | general loss | piqa | openbookqa |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in _rows(run, arguments):
        numbers = (row.domain_loss, row.general_loss, row.piqa, row.openbookqa)
        cells = [row.arm, row.stage, row.bank, row.seed, f"{row.rate:g}", *(f"{number:.4f}" for number in numbers)]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if not arguments.no_append:
            append([row], RETENTION_RESULTS)


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[Row]:
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    def measured(model: Path, arm: str, stage: str, bank: str, seed: int, rate: float, trained: int) -> Row:
        found = _measure(model, arguments.max_tokens, arguments.limit)
        return Row(
            **asdict(run), arm=arm, stage=stage, bank=bank, seed=seed, rate=rate, trained_parameters=trained, **found
        )

    yield measured(smollm2_135m(), "base", "base", "", 0, 0.0, 0)
    for arm in arguments.arms.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            upscaled = work / f"{arm}-{seed}"
            run_once(upscaled, "upscale", "--base", smollm2_135m(), *ARMS[arm], "--seed", seed, "--output", upscaled)
            trained = json.loads((upscaled / "upscale.json").read_text(encoding="utf-8"))["parameters"]["trainable"]
            for rate in arguments.rates.split(","):
                continued = work / f"{upscaled.name}-{rate}"
                rates = [
                    f"learning_rate={rate}",
                    f"value_learning_rate={rate}",
                    "value_schedule=fixed",
                    f"seed={seed}",
                ]
                corpus = [f"corpus={addresses().train}", f"max_steps={arguments.steps}"]
                places = [f"model={upscaled}", f"output={continued}"]
                run_once(continued, "midus-train", _CONFIGS / "train" / "demo.yaml", *places, *corpus, *rates)
                yield measured(continued, arm, "continued", "", seed, float(rate), trained)
                for bank in BANKS if arm == "moc" else ("",):
                    tuned = work / f"{continued.name}-chats{bank and f'-{bank}'}"
                    run_once(tuned, "midus-sft", *_fine_tuning(continued, tuned, bank, seed, arguments))
                    yield measured(tuned, arm, "tuned", bank, seed, float(rate), trained)


def _fine_tuning(model: Path, output: Path, bank: str, seed: int, arguments: argparse.Namespace) -> list[str | Path]:
    """The words of the command that trains a whole model on chats."""
    options: dict[str, Any] = {
        "model": model,
        "output": output,
        "data": chats().train,
        "trainable": "all",
        "learning_rate": arguments.chat_rate,
        "value_learning_rate": arguments.chat_rate,
        "value_schedule": "fixed",
        "max_steps": arguments.chat_steps,
        "seed": seed,
    }
    for name, value in BANKS.get(bank, {}).items():
        options[name] = value * float(arguments.chat_rate) if isinstance(value, float) else json.dumps(value)
    return [_CONFIGS / "sft" / "demo.yaml", *(f"{name}={value}" for name, value in options.items())]


def _measure(model: Path, max_tokens: int, limit: int) -> dict[str, float]:
    """Losses on both texts, and accuracies."""
    common: list[Any] = [model, "--json", "--sequence-length", 256, "--max-tokens", max_tokens]
    tasks = ["--config", _CONFIGS / "eval" / "demo.yaml", "--data", benchmarks(), "--limit", limit]
    domain = json.loads(run_command("midus-eval", *common, "--text", addresses().held_out, *tasks))["models"][0]
    general = json.loads(run_command("midus-eval", *common, "--text", articles()))["models"][0]
    accuracies = {task: domain["tasks"][task]["acc_norm"] for task in TASKS}
    return {
        "domain_loss": math.log(domain["perplexity"]["perplexity"]),
        "general_loss": math.log(general["perplexity"]["perplexity"]),
        **accuracies,
    }


if __name__ == "__main__":
    main()

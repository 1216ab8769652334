"""What chapters and dense layers retain: a model learns a domain, is fine-tuned on chats, and is measured after each stage.

    python -m experiments.retention --work outputs/retention
    python -m experiments.retention --work outputs/retention --seeds 0,1,2 --rates 1e-3,3e-4

Two models are made from SmolLM2-135M: one with Mixture of Chapters, and one with four blocks of LLaMA-Pro, each
inserted after seven or eight layers. Both have the same number of new parameters (14.1 M, within 0.3 %). First only the
new parameters are trained, on presidential addresses. Then each model is fine-tuned on chats as a whole; the model with
chapters three times: with its bank at the same learning rate as everything else, at a tenth of this rate, and frozen
(appendix A.4.4 of the paper). After each stage the loss on held-out addresses, the loss on Wikipedia articles, which
neither stage trains on, and accuracies on two sets of questions are measured. Every step is a command that a person
could type, and is skipped if its folder exists; an interrupted run is resumed.

In a row, `stage` is `base`, `continued` or `tuned`, `bank` says how fine-tuning treats the bank, and `rate` is the
learning rate of the first stage. Losses are in nats per token, and accuracies are normalised by length.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import evaluated, loss_of, results_of, study, train_once, upscale_once
from material.addresses import addresses
from material.articles import articles
from material.benchmarks import benchmarks
from material.chats import chats
from material.smollm2 import smollm2_135m

TASKS = ("piqa", "openbookqa")
_CONFIGS = Path(__file__).parent.parent / "configs"

# Methods, and further arguments of `upscale` for each.
VARIANTS: dict[str, list[str]] = {
    "moc": ["--set layers=7", "--set memory_tokens=7552", "--set chapters=118"],
    "llama-pro": ["--placement 7,16,24,33"],
}

BANKS: dict[str, dict[str, Any]] = {
    "equal": {},
    "tenth": {"value_learning_rate": 0.1},  # of the rate of everything else
    "frozen": {"frozen": ["value"]},
}


def main() -> None:
    parser = study(__doc__)
    listed(parser, "--variants", VARIANTS)
    listed(parser, "--seeds", (0,))
    listed(parser, "--rates", ("1e-3",), "of the first stage")
    parser.add_argument("--steps", type=int, default=50, help="of 1,024 tokens, on addresses (default: 50)")
    parser.add_argument("--chat-rate", default="1e-4", help="of fine-tuning (default: 1e-4)")
    parser.add_argument("--chat-steps", type=int, default=50, help="of 4 chats (default: 50)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of each text that is measured (default: 8192)")
    parser.add_argument("--limit", type=int, default=100, help="questions of each set (default: 100)")
    arguments = parser.parse_args()
    columns = {"model": "{variant}", "stage": "{stage}", "bank": "{bank}", "seed": "{seed}", "rate": "{rate:g}"}
    columns |= {"domain loss": "{domain_loss:.4f}", "general loss": "{general_loss:.4f}"}
    columns |= {task: f"{{{task}:.4f}}" for task in TASKS}
    tell(_rows(arguments), columns, results_of("retention", arguments), run_columns())


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    def measured(model: Path, variant: str, stage: str, bank: str, seed: int, rate: float, trained: int) -> Row:
        common = ["--sequence-length", 256, "--max-tokens", arguments.max_tokens]
        tasks = ["--config", _CONFIGS / "eval" / "demo.yaml", "--data", benchmarks(), "--limit", arguments.limit]
        domain = evaluated(model, *common, "--text", addresses().held_out, *tasks)
        return {
            "variant": variant,
            "stage": stage,
            "bank": bank,
            "seed": seed,
            "rate": rate,
            "trained_parameters": trained,
            "domain_loss": math.log(domain["perplexity"]["perplexity"]),
            "general_loss": loss_of(model, articles(), *common),
            **{task: domain["tasks"][task]["acc_norm"] for task in TASKS},
        }

    yield measured(smollm2_135m(), "base", "base", "", 0, 0.0, 0)
    for variant in arguments.variants.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            upscaled = work / f"{variant}-{seed}"
            flags = " ".join(VARIANTS[variant]).split()
            trained = upscale_once(upscaled, smollm2_135m(), variant, seed, *flags)["trainable"]
            for rate in arguments.rates.split(","):
                continued = work / f"{upscaled.name}-{rate}"
                options = {
                    "model_name_or_path": upscaled,
                    "corpus": addresses().train,
                    "max_steps": arguments.steps,
                    "learning_rate": rate,
                    "value_learning_rate": rate,
                    "value_schedule": "fixed",
                    "seed": seed,
                }
                train_once(continued, options, recipe=_CONFIGS / "train" / "demo.yaml")
                yield measured(continued, variant, "continued", "", seed, float(rate), trained)
                for bank in BANKS if variant == "moc" else ("",):
                    tuned = work / f"{continued.name}-chats{bank and f'-{bank}'}"
                    options = _fine_tuning(continued, bank, seed, arguments)
                    train_once(tuned, options, "midus sft", _CONFIGS / "sft" / "demo.yaml")
                    yield measured(tuned, variant, "tuned", bank, seed, float(rate), trained)


def _fine_tuning(model: Path, bank: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `midus sft` for training a whole model on chats, without the output."""
    options: dict[str, Any] = {
        "model_name_or_path": model,
        "dataset_name": chats().train,
        "trainable": "all",
        "learning_rate": arguments.chat_rate,
        "value_learning_rate": arguments.chat_rate,
        "value_schedule": "fixed",
        "max_steps": arguments.chat_steps,
        "seed": seed,
    }
    for name, value in BANKS.get(bank, {}).items():
        options[name] = value * float(arguments.chat_rate) if isinstance(value, float) else json.dumps(value)
    return options


if __name__ == "__main__":
    main()

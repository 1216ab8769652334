"""How much a pretrained model learns in its first steps with attention over the depth, by how that is joined with the sequence.

    python -m experiments.depth_start --work outputs/depth-start
    python -m experiments.depth_start --work outputs/depth-start --arms added --rates 5e-3 --gate-rates 1e-4 --steps 100

The six topmost layers of SmolLM2-135M get attention over the depth (method moda) with each `joining`, or LoRA adapters with as many
parameters, 1.1 million. These alone are trained, on presidential addresses, by `midus-train`: AdamW, a cosine schedule behind 10 %
warm-up, two sequences of 256 tokens a step. The loss is that of addresses that are not trained on, before the first step and behind
the last. Gates have the rate of all else, or one of their own where `--gate-rates` names some.

A row has no `gate_rate` where gates have the rate of all else. Every step is a command that a person would type. What is in the
folder is not done again, and its rows are told again without being appended.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import Row, keep, listed, run_columns
from experiments.steps import events_of, remembered, results_of, study, train_once, upscale_once
from material.addresses import addresses
from material.smollm2 import smollm2_135m

ARMS = ("added", "interpolated", "lora")
_LAYERS, _NUM_LAYERS = 6, 30
_RANK = 18
"""Of adapters on all linear maps of six layers: 1,099,008 parameters, where attention over the depth has 1,105,965."""
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_TOKENS, _SEQUENCES = 256, 2


def main() -> None:
    parser = study(__doc__)
    listed(parser, "--arms", ARMS)
    listed(parser, "--rates", ("1e-3", "5e-3"))
    parser.add_argument(
        "--gate-rates", default="", help="rates of gates, joined by commas (default: that of all else)"
    )
    parser.add_argument("--steps", type=int, default=30, help="of 512 tokens (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of new parameters and the order of texts (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of held-out text (default: 4096)")
    arguments = parser.parse_args()
    rows, run = [], run_columns()
    for row, is_new in _rows(arguments):
        rows.append(row)
        if is_new:
            keep(row, results_of("depth_start", arguments), run)
    print("\n".join(table(rows)))


def table(rows: Sequence[Row]) -> list[str]:
    """Rows in markdown, with what was learned: by how much the loss fell."""
    lines = ["| arm | rate | rate of gates | steps | loss before | loss | learned |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        gate_rate = "" if row["gate_rate"] is None else f"{row['gate_rate']:g}"
        cells = [row["arm"], f"{row['rate']:g}", gate_rate, str(row["steps"])]
        cells += [f"{loss:.4f}" for loss in (row["loss_before"], row["loss"], row["loss_before"] - row["loss"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rows(arguments: argparse.Namespace) -> Iterator[tuple[Row, bool]]:
    """Every model's row, and whether it was not there before."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    for arm in arguments.arms.split(","):
        model = smollm2_135m()  # itself, if adapters are trained
        if arm != "lora":
            model = work / f"{arm}-{arguments.seed}"
            upscale_once(model, smollm2_135m(), "moda", arguments.seed, joining=arm, layers=f"late:{_LAYERS}")
        for rate in arguments.rates.split(","):
            for gate_rate in [""] if arm == "lora" else arguments.gate_rates.split(","):
                parts = [arm, arguments.seed, rate, gate_rate, arguments.steps, arguments.max_tokens]
                output = work / "-".join(str(part) for part in parts if part != "")
                options = _training(arm, model, rate, gate_rate, arguments)

                def measure(arm: str = arm, output: Path = output, options: dict[str, Any] = options) -> Row:
                    train_once(output, options)
                    losses = {event["step"]: event["eval_loss"] for event in events_of(output) if "eval_loss" in event}
                    return {
                        "arm": arm,
                        "rate": options["learning_rate"],
                        "gate_rate": options.get("gate_learning_rate"),
                        "steps": arguments.steps,
                        "seed": arguments.seed,
                        "max_tokens": arguments.max_tokens,
                        "loss_before": losses[0],
                        "loss": losses[arguments.steps],
                    }

                yield remembered(work / f"{output.name}.row.json", measure)


def _training(arm: str, model: Path, rate: str, gate_rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What `midus-train` is told."""
    layers = list(range(_NUM_LAYERS - _LAYERS, _NUM_LAYERS))
    adapters = {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": _LINEAR, "layers_to_transform": layers}
    texts = addresses()
    return {
        "model": model,
        "corpus": texts.train,
        **({"adapters": adapters} if arm == "lora" else {"trainable": "new"}),
        "sequence_length": _TOKENS,
        "batch_size": _SEQUENCES,
        "max_steps": arguments.steps,
        "learning_rate": float(rate),
        **({"gate_learning_rate": float(gate_rate)} if gate_rate else {}),
        "schedule": "cosine",
        "warmup_ratio": 0.1,
        "precision": "fp32",
        "log_every": 1,
        "eval_text": texts.held_out,
        "eval_max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
    }


if __name__ == "__main__":
    main()

"""How much a pretrained model learns in its first steps with attention over the depth, by how that is joined with the sequence.

    python -m experiments.depth_start --work outputs/depth-start
    python -m experiments.depth_start --work outputs/depth-start --arms added --rates 5e-3 --gate-rates 1e-4 --steps 100

The six topmost layers of SmolLM2-135M get attention over the depth (method moda) with each `joining`, or LoRA adapters with as many
parameters, 1.1 million. These alone are trained, on presidential addresses, by `midus-train`: AdamW, a cosine schedule behind 10 %
warm-up, two sequences of 256 tokens a step. The loss is that of addresses that are not trained on, before the first step and behind
the last. Gates have the rate of all else, or one of their own where `--gate-rates` names some.

Every step is a command that a person would type. What is in the folder is not done again, and its rows are told again without being
appended.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import run_once
from benchmarks.tracked import Run, append, this_run
from material.addresses import addresses
from material.smollm2 import smollm2_135m

DEPTH_START_RESULTS = Path(__file__).parent / "results" / "depth_start.csv"
ARMS = ("added", "interpolated", "lora")
_LAYERS, _NUM_LAYERS = 6, 30
_RANK = 18
"""Of adapters on all linear maps of six layers: 1,099,008 parameters, where attention over the depth has 1,105,965."""
_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_TOKENS, _SEQUENCES = 256, 2


@dataclass(frozen=True)
class Row(Run):
    """One trained model; losses of held-out text in nats per token.

    `gate_rate` is the rate of gates, none where they have that of all else.
    """

    arm: str
    rate: float
    gate_rate: float | None
    steps: int
    seed: int
    max_tokens: int
    loss_before: float
    loss: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument("--arms", default=",".join(ARMS), help=f"joined by commas (default: {','.join(ARMS)})")
    parser.add_argument("--rates", default="1e-3,5e-3", help="joined by commas (default: 1e-3,5e-3)")
    parser.add_argument(
        "--gate-rates", default="", help="rates of gates, joined by commas (default: that of all else)"
    )
    parser.add_argument("--steps", type=int, default=30, help="of 512 tokens (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of new parameters and the order of texts (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of held-out text (default: 4096)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    rows = []
    for row, is_new in _rows(this_run("cpu"), arguments):
        rows.append(row)
        if is_new and not arguments.no_append:
            append([row], DEPTH_START_RESULTS)
    print("\n".join(table(rows)))


def table(rows: Sequence[Row]) -> list[str]:
    """Rows in markdown, with what was learned: by how much the loss fell."""
    lines = ["| arm | rate | rate of gates | steps | loss before | loss | learned |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        gate_rate = "" if row.gate_rate is None else f"{row.gate_rate:g}"
        cells = [row.arm, f"{row.rate:g}", gate_rate, str(row.steps)]
        cells += [f"{row.loss_before:.4f}", f"{row.loss:.4f}", f"{row.loss_before - row.loss:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[tuple[Row, bool]]:
    """Every model's row, and whether it was not there before."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    for arm in arguments.arms.split(","):
        model = _model(work, arm, arguments.seed)
        for rate in arguments.rates.split(","):
            for gate_rate in [None] if arm == "lora" else arguments.gate_rates.split(","):
                output = work / "-".join(
                    filter(
                        None,
                        [arm, str(arguments.seed), rate, gate_rate, str(arguments.steps), str(arguments.max_tokens)],
                    )
                )
                file = work / f"{output.name}.row.json"
                is_new = not file.is_file()
                if is_new:
                    recipe = work / f"{output.name}.json"
                    recipe.write_text(
                        json.dumps(_recipe(arm, model, output, rate, gate_rate, arguments)), encoding="utf-8"
                    )
                    run_once(output, "midus-train", recipe)
                    before, after = _losses(output / "log.jsonl", arguments.steps)
                    row = Row(
                        **asdict(run),
                        arm=arm,
                        rate=float(rate),
                        gate_rate=float(gate_rate) if gate_rate else None,
                        steps=arguments.steps,
                        seed=arguments.seed,
                        max_tokens=arguments.max_tokens,
                        loss_before=before,
                        loss=after,
                    )
                    file.write_text(json.dumps(asdict(row)), encoding="utf-8")
                yield Row(**json.loads(file.read_text(encoding="utf-8"))), is_new


def _model(work: Path, arm: str, seed: int) -> Path:
    """The model that an arm trains: the base itself, if adapters do."""
    if arm == "lora":
        return smollm2_135m()
    model = work / f"{arm}-{seed}"
    options = ["--set", f"joining={arm}", "--set", f"layers=late:{_LAYERS}"]
    run_once(
        model,
        "upscale",
        "--base",
        smollm2_135m(),
        "--method",
        "moda",
        *options,
        "--seed",
        str(seed),
        "--output",
        model,
    )
    return model


def _recipe(
    arm: str, model: Path, output: Path, rate: str, gate_rate: str | None, arguments: argparse.Namespace
) -> dict[str, Any]:
    """What `midus-train` is told; JSON is YAML as well."""
    layers = list(range(_NUM_LAYERS - _LAYERS, _NUM_LAYERS))
    adapters = {"r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": _LINEAR, "layers_to_transform": layers}
    texts = addresses()
    return {
        "model": str(model),
        "output": str(output),
        "corpus": str(texts.train),
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
        "eval_text": str(texts.held_out),
        "eval_max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
    }


def _losses(log: Path, steps: int) -> tuple[float, float]:
    """Of held-out text before the first step and after so many steps."""
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    losses = {event["step"]: event["eval_loss"] for event in events if "eval_loss" in event}
    return losses[0], losses[steps]


if __name__ == "__main__":
    main()

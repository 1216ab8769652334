"""How a pretrained model takes attention over the depth: the loss as heads begin to read it, and the first steps of training.

    python -m benchmarks.depth_start --work outputs/depth-start
    python -m benchmarks.depth_start --work outputs/depth-start --depth-weights mixed --rates 1e-3 --steps 100

SmolLM2-135M of method moda, all layers and both kinds of slots, with each `depth_weight`. First the number of every head is set to
one value after the other, and the held-out loss is measured beside the share of attention that goes to the depth. No command sets
these numbers, so this is done through the library, with what `midus-eval` and `midus-depth` call. Then the new parameters are trained
from 0, the base frozen, by `midus-train`: AdamW at a constant rate without warm-up, sequences of 256 tokens, two a step. A run of one
step is the beginning of a run of 30: both read the same sequences in the same order.

Texts are Wikipedia articles; the loss is that of every tenth, which is not trained on. What is in the folder is not done again, and
its rows are told again without being appended.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.commands import run_once
from benchmarks.split_articles import read_texts, split_articles
from benchmarks.tracked import RESULTS, Run, append, this_run
from material.smollm2 import smollm2_135m

DEPTH_START_RESULTS = RESULTS / "depth_start.csv"
DEPTH_WEIGHTS = ("mixed", "multiplied")
_TOKENS, _SEQUENCES = 256, 2


@dataclass(frozen=True)
class Row(Run):
    """One model; the loss of held-out text in nats per token.

    `weight` is what the number of every head is set to, none where it was trained; `rate` and `steps` are those of training. `shares`
    are the shares of attention that go to the depth, means of tokens and heads, of each layer that reads it, from the first to the
    last, separated by spaces.
    """

    depth_weight: str
    weight: float | None
    rate: float | None
    steps: int
    seed: int
    max_tokens: int
    loss: float
    shares: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, which a later run goes on with")
    parser.add_argument(
        "--depth-weights",
        default=",".join(DEPTH_WEIGHTS),
        help=f"joined by commas (default: {','.join(DEPTH_WEIGHTS)})",
    )
    parser.add_argument("--weights", default="0,1e-4,1e-3,1", help="joined by commas (default: 0,1e-4,1e-3,1)")
    parser.add_argument("--rates", default="1e-4,1e-3", help="joined by commas (default: 1e-4,1e-3)")
    parser.add_argument("--steps", default="1,30", help="of 512 tokens, joined by commas (default: 1,30)")
    parser.add_argument("--seed", type=int, default=0, help="of projections and of the order of texts (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of held-out text (default: 2048)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    rows = []
    for row, is_new in _rows(this_run("cpu"), arguments):
        rows.append(row)
        if is_new and not arguments.no_append:
            append([row], DEPTH_START_RESULTS)
    print("\n".join(table(rows)))


def table(rows: Sequence[Row]) -> list[str]:
    """Rows in markdown; the share of the depth is that of the later half of the layers that read it, least and greatest."""
    lines = [
        "| depth_weight | number of every head | rate | steps | held-out loss | share of the depth, later layers |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        weight = "trained" if row.weight is None else f"{row.weight:g}"
        rate = "" if row.rate is None else f"{row.rate:g}"
        cells = [row.depth_weight, weight, rate, str(row.steps), f"{row.loss:.4f}", _range(row.shares)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _range(shares: str) -> str:
    found = [float(share) for share in shares.split()]
    later = found[len(found) // 2 :]
    return f"{min(later):.1%} to {max(later):.1%}" if later else ""


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[tuple[Row, bool]]:
    """Every model's row, and whether it was not there before."""
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    train, held_out = split_articles(work)
    seed, tokens = arguments.seed, arguments.max_tokens
    upscaled = {}
    for depth_weight in arguments.depth_weights.split(","):
        model = upscaled[depth_weight] = work / f"{depth_weight}-{seed}"
        words = ["--method", "moda", "--set", f"depth_weight={depth_weight}", "--seed", seed]
        run_once(model, "upscale", "--base", smollm2_135m(), *words, "--output", model)
        found = {
            weight: work / f"{model.name}-at-{weight}-{tokens}.row.json" for weight in arguments.weights.split(",")
        }
        missing = [weight for weight, file in found.items() if not file.is_file()]
        measured = measured_at(model, held_out, [float(weight) for weight in missing], tokens) if missing else []
        for weight, (loss, shares) in zip(missing, measured, strict=True):
            row = Row(
                **asdict(run),
                depth_weight=depth_weight,
                weight=float(weight),
                rate=None,
                steps=0,
                seed=seed,
                max_tokens=tokens,
                loss=loss,
                shares=" ".join(f"{share:.6f}" for share in shares),
            )
            _keep(row, found[weight])
        for weight, file in found.items():
            yield _kept(file), weight in missing
    for rate in arguments.rates.split(","):
        for depth_weight, model in upscaled.items():
            for steps in map(int, arguments.steps.split(",")):
                output = work / f"{model.name}-{rate}-{steps}-{tokens}"
                file = work / f"{output.name}.row.json"
                is_new = not file.is_file()
                if is_new:
                    recipe = work / f"{output.name}.yaml"
                    recipe.write_text(
                        _recipe(model, output, train, held_out, rate, steps, arguments), encoding="utf-8"
                    )
                    run_once(output, "midus-train", recipe)
                    row = Row(
                        **asdict(run),
                        depth_weight=depth_weight,
                        weight=None,
                        rate=float(rate),
                        steps=steps,
                        seed=seed,
                        max_tokens=tokens,
                        loss=_loss(output / "log.jsonl", steps),
                        shares="",
                    )
                    _keep(row, file)
                yield _kept(file), is_new


def measured_at(
    folder: Path, text: Path, weights: Sequence[float], max_tokens: int
) -> list[tuple[float, list[float]]]:
    """A model with the number of every head set to one value after the other.

    Returns:
        For each value the loss of a text, and the share of attention that goes to the depth, of each layer that reads it.
    """
    import torch

    import midus_hf.models  # noqa: F401 - registers the classes
    from midus_hf.analysis.depth_reading import depth_readings
    from midus_hf.analysis.depth_records import record_depth
    from midus_hf.evaluation.perplexity import measure, prepare_text
    from midus_hf.saved_models import load_model, load_tokenizer

    model, _ = load_model(str(folder), "float32")
    prepared = prepare_text(load_tokenizer(str(folder)), read_texts(text), model.config, max_tokens=max_tokens)
    numbers = [tensor for name, tensor in model.named_parameters() if name.endswith(".depth_weight")]
    assert numbers, f"{folder} has no number of a head"
    found = []
    for weight in weights:
        with torch.no_grad():
            for number in numbers:
                number.fill_(weight)
        with record_depth(model) as records:
            perplexity = measure(model, prepared).perplexity
        found.append((math.log(perplexity), [reading.mean_depth_share for reading in depth_readings(records)]))
    return found


def _recipe(
    model: Path, output: Path, train: Path, held_out: Path, rate: str, steps: int, arguments: argparse.Namespace
) -> str:
    options = {
        "model": model,
        "output": output,
        "corpus": train,
        "trainable": "new",
        "sequence_length": _TOKENS,
        "batch_size": _SEQUENCES,
        "max_steps": steps,
        "learning_rate": rate,
        "schedule": "constant_with_warmup",
        "warmup_ratio": 0,
        "precision": "fp32",
        "log_every": 1,
        "eval_text": held_out,
        "eval_max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
    }
    return "".join(f"{key}: {value}\n" for key, value in options.items())


def _loss(log: Path, steps: int) -> float:
    """Of held-out text after so many steps."""
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    (loss,) = [event["eval_loss"] for event in events if "eval_loss" in event and event["step"] == steps]
    return loss


def _keep(row: Row, file: Path) -> None:
    file.write_text(json.dumps(asdict(row)), encoding="utf-8")


def _kept(file: Path) -> Row:
    return Row(**json.loads(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()

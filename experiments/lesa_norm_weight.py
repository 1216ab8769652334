"""LESA's weight of the norm loss: perplexity right after upscaling, over weights, seeds and where norms come from.

    python -m experiments.lesa_norm_weight
    python -m experiments.lesa_norm_weight --weights 0,5e-4 --seeds 0 --no-append

Base, text and windows are those of `initial_perplexity.py`. What is predicted does not depend on the norms, so each model is
made once with the norms of layer 0; for `mean` the norms that `avg-deus` gives the same layers, the means of the neighbours',
are put in their place.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.tracked import MACHINE, append, commit
from experiments.initial_perplexity import add_measure, measure_of, upscaled

NORM_WEIGHT_RESULTS = Path(__file__).parent / "results" / "lesa_norm_weight.csv"
WEIGHTS = "0,5e-6,5e-5,1.5e-4,5e-4"
SEEDS = "0,1,2"


@dataclass
class Row:
    """One line of the results; `norm_ratio` and `cosine_to_mean` are means over all predicted matrices."""

    date: str
    commit: str
    machine: str
    base: str
    norm_weight: float
    seed: int
    norm_init: str
    perplexity: float
    norm_ratio: float
    cosine_to_mean: float
    tokens: int
    upscale_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_measure(parser)
    parser.add_argument("--weights", default=WEIGHTS, help=f"joined by commas (default: {WEIGHTS})")
    parser.add_argument("--seeds", default=SEEDS, help=f"joined by commas (default: {SEEDS})")
    parser.add_argument("--norms", default="layer0,mean", help="joined by commas (default: layer0,mean)")
    arguments = parser.parse_args()
    measure = measure_of(arguments)
    weights, seeds = arguments.weights.split(","), arguments.seeds.split(",")
    commit_now = commit()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        norms = {"layer0": {}, "mean": _mean_norms(measure.base, Path(work))}
        for seed in seeds:
            for weight in weights:
                output = Path(work) / "upscaled"
                options = ("preset=release", f"norm_weight={weight}")
                report, record = upscaled(measure.base, output, "lesa", options, "--seed", seed, "--no-verify")
                for norm_init in arguments.norms.split(","):
                    result, _ = measure.perplexity(output, lambda model, new=norms[norm_init]: _put(model, new))
                    rows.append(
                        Row(
                            date=date.today().isoformat(),
                            commit=commit_now,
                            machine=MACHINE,
                            base=measure.base.name,
                            norm_weight=float(weight),
                            seed=int(seed),
                            norm_init=norm_init,
                            perplexity=result.perplexity,
                            norm_ratio=_mean(record["measurements"], "norm_ratio"),
                            cosine_to_mean=_mean(record["measurements"], "cosine_to_mean"),
                            tokens=result.tokens,
                            upscale_s=round(report["seconds"], 1),
                        )
                    )
                    if not arguments.no_append:
                        append(rows[-1:], NORM_WEIGHT_RESULTS)
                    print(f"{weight}, seed {seed}, {norm_init}: {result.perplexity:.4f}", file=sys.stderr)
                shutil.rmtree(output)
    print(_table(rows))


def _mean_norms(base: Path, work: Path) -> dict[str, Any]:
    """The norms of new layers that are means of their neighbours', by their full name."""
    from safetensors.torch import load_file

    _, record = upscaled(base, work / "means", "avg-deus", (), "--no-verify")
    new = [f"model.layers.{index}." for index, layer in enumerate(record["plan"]) if "base" not in layer]
    files = sorted((work / "means").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    shutil.rmtree(work / "means")
    return {name: tensor for name, tensor in tensors.items() if "norm" in name and name.startswith(tuple(new))}


def _put(model: Any, tensors: dict[str, Any]) -> None:
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys


def _mean(measurements: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.mean(row[key] for row in measurements)


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| norm_weight | norms of layer 0: median | lowest to highest | means: median | lowest to highest | norm ratio | cosine |",
        "|---|---|---|---|---|---|---|",
    ]
    for weight in sorted({row.norm_weight for row in rows}):
        cells = [f"{weight:g}"]
        of_weight = [row for row in rows if row.norm_weight == weight]
        for norm_init in ("layer0", "mean"):
            found = [row.perplexity for row in of_weight if row.norm_init == norm_init]
            cells += (
                [f"{statistics.median(found):,.2f}", f"{min(found):,.2f} to {max(found):,.2f}"] if found else ["", ""]
            )
        cells += [f"{statistics.mean(row.norm_ratio for row in of_weight):.3f}"]
        cells += [f"{statistics.mean(row.cosine_to_mean for row in of_weight):.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Weight of the norm loss in LESA: perplexity right after upscaling, by weight, seed and origin of the norms.

    python -m experiments.lesa_norm_weight
    python -m experiments.lesa_norm_weight --weights 0,5e-4 --seeds 0 --no-append

Base, text and windows are the same as in `initial_perplexity.py`. LESA's predictions do not depend on the norms, so
each model is made once, with the norms of layer 0. For `mean`, these are replaced by the norms that `avg-deus` gives
the same layers: the means of the neighbours' norms. `norm_ratio` and `cosine_to_mean` are means over all predicted
matrices.
"""

import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.rows import table
from benchmarks.study import Row, keep, listed, short_run_columns
from experiments.initial_perplexity import Measure, add_measure, measure_of, upscaled
from experiments.steps import results_of, study


def main() -> None:
    parser = study(__doc__, work=None)
    add_measure(parser)
    listed(parser, "--weights", ("0", "5e-6", "5e-5", "1.5e-4", "5e-4"))
    listed(parser, "--seeds", (0, 1, 2))
    listed(parser, "--norms", ("layer0", "mean"))
    arguments = parser.parse_args()
    measure = measure_of(arguments)
    run = {**short_run_columns(), "base": measure.base.name}
    weights, seeds, norms = (getattr(arguments, name).split(",") for name in ("weights", "seeds", "norms"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        for row in _rows(measure, weights, seeds, norms, Path(work)):
            rows.append(row)
            keep(row, results_of("lesa_norm_weight", arguments), run)
            line = f"{row['norm_weight']:g}, seed {row['seed']}, {row['norm_init']}: {row['perplexity']:.4f}"
            print(line, file=sys.stderr)
    print(_table(rows))


def _rows(
    measure: Measure, weights: Sequence[str], seeds: Sequence[str], norms: Sequence[str], work: Path
) -> Iterator[Row]:
    tensors = {"layer0": {}, "mean": _mean_norms(measure.base, work)}
    for seed in seeds:
        for weight in weights:
            output = work / "upscaled"
            options = ("preset=release", f"norm_weight={weight}")
            report, record = upscaled(measure.base, output, "lesa", options, "--seed", seed, "--no-verify")
            for norm_init in norms:
                result, _ = measure.perplexity(output, lambda model, new=tensors[norm_init]: _put(model, new))
                yield {
                    "norm_weight": float(weight),
                    "seed": int(seed),
                    "norm_init": norm_init,
                    "perplexity": result.perplexity,
                    "norm_ratio": _mean(record["measurements"], "norm_ratio"),
                    "cosine_to_mean": _mean(record["measurements"], "cosine_to_mean"),
                    "tokens": result.tokens,
                    "upscale_s": round(report["seconds"], 1),
                }
            shutil.rmtree(output)


def _mean_norms(base: Path, work: Path) -> dict[str, Any]:
    """Return the norms of new layers as means of their neighbours' norms, by full tensor name."""
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
    header = ["norm_weight", "norms of layer 0: median", "lowest to highest", "means: median", "lowest to highest"]
    lines = []
    for weight in sorted({row["norm_weight"] for row in rows}):
        cells = [f"{weight:g}"]
        of_weight = [row for row in rows if row["norm_weight"] == weight]
        for norm_init in ("layer0", "mean"):
            perplexities = [row["perplexity"] for row in of_weight if row["norm_init"] == norm_init]
            if perplexities:
                cells += [
                    f"{statistics.median(perplexities):,.2f}",
                    f"{min(perplexities):,.2f} to {max(perplexities):,.2f}",
                ]
            else:
                cells += ["", ""]
        cells += [f"{_mean(of_weight, name):.3f}" for name in ("norm_ratio", "cosine_to_mean")]
        lines.append(cells)
    return table([*header, "norm ratio", "cosine"], lines)


if __name__ == "__main__":
    main()

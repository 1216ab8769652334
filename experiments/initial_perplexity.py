"""Perplexity right after upscaling, before any training, of every method on the same base.

    python -m experiments.initial_perplexity                         # SmolLM2-135M, held-out presidential addresses
    python -m experiments.initial_perplexity --only lesa,solar --no-append

Each model is made by the `upscale` command with half as many new layers as the base has, or the nearest number that the
method can place: once with the method's own placement and, if the method accepts any placement, once in the same gaps
as all others. If a model's perplexity equals the base's, it does so in every digit of a float64.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.rows import table
from benchmarks.study import Row, keep, short_run_columns
from experiments.steps import results_of, run_command, study

# The last K gaps. Every method that inserts layers can fill them, as the papers of most dense methods do.
SAME_GAPS = "top-heavy"
# Placement of a method that orders the layers itself.
ITS_OWN = "its own"


@dataclass(frozen=True)
class Variant:
    """A method with its options."""

    name: str
    method: str
    options: tuple[str, ...] = ()


VARIANTS = [
    Variant("midus-hml", "midus-hml"),
    Variant("midus-pkm", "midus-pkm"),
    Variant("midus-linear", "midus-linear"),
    Variant("moc", "moc"),
    Variant("llama-pro", "llama-pro"),
    Variant("opt-deus", "opt-deus"),
    Variant("avg-deus, identity=auto", "avg-deus", ("identity=auto",)),
    Variant("attenuated-copy", "attenuated-copy"),
    Variant("llama-pro, identity=none", "llama-pro", ("identity=none",)),
    Variant("linear-combination, 0.75 next", "linear-combination", ("coefficients={previous: 0.25, next: 0.75}",)),
    Variant("avg-deus", "avg-deus"),
    Variant("opt-deus, identity=none", "opt-deus", ("identity=none",)),
    Variant("solar", "solar"),
    Variant("lesa", "lesa"),
    Variant("lesa, norm_weight=0", "lesa", ("norm_weight=0",)),
    Variant("lesa, norm_init=mean", "lesa", ("norm_init=mean",)),
]


@dataclass(frozen=True)
class Measure:
    """Base, text and size of the measurement.

    Args:
        base: Folder of the base.
        text: A text, or a folder of texts.
        max_tokens: Number of tokens to predict.
        sequence_length: Tokens per window.
    """

    base: Path
    text: Path
    max_tokens: int
    sequence_length: int

    def perplexity(self, folder: Path, change: Callable[[Any], None] = lambda model: None) -> tuple[Any, Any]:
        """Return the perplexity result and the model."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import midus_hf  # noqa: F401 - registers the classes that host memory
        from midus_hf.documents import read_documents
        from midus_hf.evaluation.perplexity import perplexity

        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        change(model)
        result = perplexity(
            model,
            AutoTokenizer.from_pretrained(folder),
            read_documents(self.text),
            sequence_length=self.sequence_length,
            max_tokens=self.max_tokens,
        )
        return result, model


def add_measure(parser: argparse.ArgumentParser) -> None:
    """Add the options of `Measure`."""
    parser.add_argument("--base", help="folder of a base (default: SmolLM2-135M from the package registries)")
    parser.add_argument("--text", help="a text, or a folder of texts (default: held-out presidential addresses)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens to predict (default: 8192)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a window (default: 256)")


def measure_of(arguments: argparse.Namespace) -> Measure:
    """Return the `Measure` of the options of `add_measure`. The default base and text are downloaded."""
    base, text = arguments.base, arguments.text
    if base is None:
        from material.smollm2 import smollm2_135m

        base = smollm2_135m()
    if text is None:
        from material.addresses import addresses

        text = addresses().held_out
    return Measure(Path(base), Path(text), arguments.max_tokens, arguments.sequence_length)


def upscaled(base: Path, output: Path, method: str, options: tuple[str, ...], *further: str) -> tuple[dict, dict]:
    """Run `upscale`; return the JSON that it printed and the record that it wrote."""
    flags = [*(word for option in options for word in ("--set", option)), *further]
    printed = run_command("upscale", "--base", base, "--method", method, "--output", output, "--json", *flags)
    return json.loads(printed), json.loads((output / "upscale.json").read_text())


def main() -> None:
    parser = study(__doc__, work=None)
    add_measure(parser)
    parser.add_argument("--only", help="variants, by method, joined by commas (default: all)")
    arguments = parser.parse_args()
    measure = measure_of(arguments)
    chosen = arguments.only.split(",") if arguments.only else [variant.method for variant in VARIANTS]
    run = {**short_run_columns(), "base": measure.base.name}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        for row in _rows(measure, [variant for variant in VARIANTS if variant.method in chosen], Path(work)):
            row["equals_base"] = not rows or row["perplexity"] == rows[0]["perplexity"]
            rows.append(row)
            keep(row, results_of("initial_perplexity", arguments), run)
            print(f"{row['variant']}, {row['placement']}: {row['perplexity']:.4f}", file=sys.stderr)
    same = [row for row in rows if row["placement"] in ("", SAME_GAPS)]
    print(f"Placement {SAME_GAPS}:\n\n{_table(same, rows[0])}\n")
    print(f"Each method's own placement:\n\n{_table([row for row in rows if row['own_placement']], rows[0])}")


def _rows(measure: Measure, variants: list[Variant], work: Path) -> Iterator[Row]:
    def measured(variant: str, folder: Path, placement: str, own: bool, report: dict, record: dict) -> Row:
        result, model = measure.perplexity(folder)
        return {
            "variant": variant,
            "placement": placement,
            "own_placement": own,
            "promises_identity": record.get("promises_identity", True),
            "layers": model.config.num_hidden_layers,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "perplexity": result.perplexity,
            "kl_divergence": record.get("kl_divergence"),
            "tokens": result.tokens,
            "upscale_s": round(report["seconds"], 1) if report else None,
        }

    yield measured("base", measure.base, "", True, {}, {})
    for variant in variants:
        for placement, own in _placements(variant.method):
            output = work / "upscaled"
            further = () if placement == ITS_OWN else ("--placement", placement)
            report, record = upscaled(measure.base, output, variant.method, variant.options, *further)
            yield measured(variant.name, output, placement, own, report, record)
            shutil.rmtree(output)


def _placements(method: str) -> list[tuple[str, bool]]:
    """Return the placements to measure, each with whether it is the method's own."""
    from upscalers.methods.contract import get_method

    own = get_method(method).default_placement
    if own is None or own == SAME_GAPS:
        return [(own or ITS_OWN, True)]
    return [(SAME_GAPS, False), (own, True)]


def _table(rows: list[Row], base: Row) -> str:
    header = ["method", "placement", "promises at the start", "layers", "parameters", "perplexity"]
    lines = []
    for row in sorted(rows, key=lambda row: row["perplexity"]):
        perplexity = f"{row['perplexity']:,.4f}{' = base' if row['equals_base'] and row is not base else ''}"
        divergence = "" if row["kl_divergence"] is None else f"{row['kl_divergence']:.3g}"
        promise = "" if row is base else "the base, exactly" if row["promises_identity"] else "nothing"
        cells = [row["variant"], row["placement"], promise, str(row["layers"]), f"{row['parameters'] / 1e6:.1f} M"]
        lines.append([*cells, perplexity, divergence])
    return table([*header, "KL from the base, nats"], lines)


if __name__ == "__main__":
    main()

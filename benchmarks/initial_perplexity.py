"""Perplexity right after upscaling, before any training: every method on the same base, side by side.

    python benchmarks/initial_perplexity.py                         # SmolLM2-135M, held-out presidential addresses
    python benchmarks/initial_perplexity.py --only lesa,solar --no-append

Each model is made by the `upscale` command with the method's own placement and as many new layers as half the base has, or
the nearest number that the method can place. A model whose perplexity equals the base's does so in every digit of a float64.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tracked import MACHINE, RESULTS, append, commit

PERPLEXITY_RESULTS = RESULTS / "initial_perplexity.csv"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Variant:
    """One upscaling."""

    name: str
    method: str
    options: tuple[str, ...] = ()


VARIANTS = [
    Variant("midus-hml", "midus-hml"),
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
]


@dataclass
class Row:
    """One line of the results."""

    date: str
    commit: str
    machine: str
    base: str
    variant: str
    layers: int
    parameters: int
    perplexity: float
    equals_base: bool
    kl_divergence: float | None
    tokens: int
    upscale_s: float | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder of a base (default: SmolLM2-135M from the package registries)")
    parser.add_argument("--text", help="a text, or a folder of texts (default: held-out presidential addresses)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="tokens to predict (default: 8192)")
    parser.add_argument("--sequence-length", type=int, default=256, help="tokens of a window (default: 256)")
    parser.add_argument("--only", help="variants, by method, joined by commas (default: all)")
    parser.add_argument("--no-append", action="store_true", help="print the table, leave the CSV alone")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    base, text = arguments.base, arguments.text
    if base is None:
        from material.smollm2 import smollm2_135m

        base = smollm2_135m()
    if text is None:
        from material.addresses import addresses

        text = addresses().held_out
    chosen = arguments.only.split(",") if arguments.only else [variant.method for variant in VARIANTS]
    commit_now = commit()

    def row(variant: str, folder: Path, report: dict | None, record: dict | None, of_base: float | None) -> Row:
        result, config, parameters = _measured(folder, Path(text), arguments.max_tokens, arguments.sequence_length)
        return Row(
            date=date.today().isoformat(),
            commit=commit_now,
            machine=MACHINE,
            base=Path(base).name,
            variant=variant,
            layers=config["num_hidden_layers"],
            parameters=parameters,
            perplexity=result.perplexity,
            equals_base=of_base is None or result.perplexity == of_base,
            kl_divergence=record["kl_divergence"] if record else None,
            tokens=result.tokens,
            upscale_s=round(report["seconds"], 1) if report else None,
        )

    rows = [row("base", Path(base), None, None, None)]
    with tempfile.TemporaryDirectory() as work:
        for variant in VARIANTS:
            if variant.method not in chosen:
                continue
            output = Path(work) / "upscaled"
            report = _upscale(Path(base), variant, output)
            record = json.loads((output / "upscale.json").read_text())
            rows.append(row(variant.name, output, report, record, rows[0].perplexity))
            shutil.rmtree(output)
            print(f"{variant.name}: {rows[-1].perplexity:.4f}", file=sys.stderr)
    print(_table(rows))
    if not arguments.no_append:
        append(rows, PERPLEXITY_RESULTS)


def _upscale(base: Path, variant: Variant, output: Path) -> dict:
    command = [str(Path(sys.executable).with_name("upscale")), "--base", str(base), "--method", variant.method]
    command += ["--output", str(output), "--json", *(word for option in variant.options for word in ("--set", option))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}")
    return json.loads(done.stdout)


def _measured(folder: Path, text: Path, max_tokens: int, sequence_length: int):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import midus_hf  # noqa: F401 - registers the classes that host memory
    from midus_hf.documents import read_documents
    from midus_hf.evaluation.perplexity import perplexity

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    result = perplexity(
        model,
        AutoTokenizer.from_pretrained(folder),
        read_documents(text),
        sequence_length=sequence_length,
        max_tokens=max_tokens,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return result, model.config.to_dict(), parameters


def _table(rows: list[Row]) -> str:
    lines = ["| method | layers | parameters | perplexity | KL from the base, nats |", "|---|---|---|---|---|"]
    for row in rows:
        perplexity = f"{row.perplexity:.4f}{' = base' if row.equals_base and row.variant != 'base' else ''}"
        divergence = "" if row.kl_divergence is None else f"{row.kl_divergence:.3g}"
        lines.append(f"| {row.variant} | {row.layers} | {row.parameters / 1e6:.1f} M | {perplexity} | {divergence} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

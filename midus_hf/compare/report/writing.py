"""Files of a comparison's report, in the folder of the comparison."""

import csv
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from midus_hf.compare.options import rate_name
from midus_hf.compare.report.findings import Findings
from midus_hf.compare.report.sentences import sentences
from midus_hf.compare.report.tables import as_markdown, tables
from midus_hf.compare.results import Result
from midus_hf.look.page import Section, write_page

_HOW_TO_READ = (
    "Losses are nats per token of held-out text, each text counting alike; ± is the standard deviation over seeds, and says "
    "nothing of other texts and questions. Each model is measured against its own state right after upscaling: learned is what "
    "the loss of the domain fell by, forgotten what the loss outside it rose by. Where that state was not seen to be the base's, "
    "the difference between the two by midus eval is taken off. Each variant is reported at the rate that ended with its lowest "
    "loss of the domain. The same text chooses the rate and gives that loss, which flatters variants with more rates. A null "
    "control is the same memory with its addressing taken away, trained at the variant's best rate, which need not be the null "
    "control's own best. Losses of the base, and those after fine-tuning or shuffling, are measured by midus eval on weights as they "
    "are saved; the others by the Trainer in the precision of training, on packed sequences whose first tokens are not predicted. A "
    "loss of one kind cannot be subtracted from one of the other. Seconds and tokens per second are those of this machine with all "
    "else that ran on it."
)


def write_report(root: Path, findings: Findings, results: Sequence[Result]) -> list[Path]:
    """Write `report.md`, `runs.csv` and `report.html`, a page that needs no other file.

    The page is written only if matplotlib is installed and a variant has results.
    """
    summary, all_tables = sentences(findings), tables(findings)
    title = f"{', '.join(findings.variants) or 'Nothing yet'} on {findings.comparison.base}"
    markdown, runs, page = root / "report.md", root / "runs.csv", root / "report.html"
    parts = [
        f"# {title}",
        "\n".join(f"- {sentence}" for sentence in summary),
        *map(as_markdown, all_tables),
        _HOW_TO_READ,
    ]
    markdown.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    write_runs(runs, [findings.base, *results], list(findings.comparison.texts))
    if importlib.util.find_spec("matplotlib") is None or not findings.variants:
        return [markdown, runs]
    from midus_hf.compare.report.pictures import pictures

    write_page(page, title, [Section("", [*summary, _HOW_TO_READ], all_tables, pictures(findings))])
    return [markdown, runs, page]


def write_runs(path: Path, results: Sequence[Result], texts: Sequence[str]) -> None:
    """Write a CSV file with a row per run and step at which texts were measured."""
    head = "variant control_of control rate seed new_parameters trained_parameters step tokens seconds".split()
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*head, *(f"loss_{name}" for name in texts)])
        for result in results:
            own = [result.variant, result.control_of, result.control, rate_name(result.rate), result.seed]
            for point in result.curve:
                losses = [point.losses.get(name, math.nan) for name in texts]
                counts = [result.new_parameters, result.trained_parameters]
                writer.writerow([*own, *counts, point.step, point.tokens, point.seconds, *losses])

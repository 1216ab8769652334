"""Tables and plots from the tracked results alone: equal CSV files give equal bytes."""

import argparse
from pathlib import Path

from benchmarks.tracked import read

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"


def sections(results: Path) -> dict[str, str]:
    """Return the generated sections in Markdown, by the name in their markers."""
    from benchmarks.report.goals import goals_table
    from benchmarks.report.rows import over_rounds
    from benchmarks.report.tables import model_section, op_section

    ops, models = read(results / "ops.csv"), over_rounds(read(results / "model.csv"))
    return {
        "goals": goals_table(ops, models),
        "ops": op_section(ops),
        "models": model_section(models),
    }


def with_sections(document: str, generated: dict[str, str]) -> str:
    """Replace each section of a document, between `<!-- NAME: generated -->` and `<!-- NAME: end -->`."""
    for name, text in generated.items():
        begin, end = f"<!-- {name}: generated -->\n", f"<!-- {name}: end -->"
        before, found_begin, rest = document.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(
                f"the document lacks {begin.strip()!r} followed by {end!r}; put both where {name} shall be."
            )
        document = f"{before}{begin}{text.strip()}\n{end}{after}"
    return document


def run(arguments: argparse.Namespace) -> int:
    """Write the tables into the document and draw the plots, or print the tables of ops; return 0."""
    if arguments.print_ops:
        from benchmarks.report.tables import op_section

        print(op_section(read(arguments.results / "ops.csv"), has_all=True))
        return 0
    from benchmarks.report.plots import draw

    document = arguments.document.read_text(encoding="utf-8")
    arguments.document.write_text(with_sections(document, sections(arguments.results)), encoding="utf-8")
    for path in draw(arguments.results, arguments.images):
        print(path)
    return 0

"""The page that compares methods names every one of them, and prices them as a dry run does."""

import re
from pathlib import Path

import pytest

from tests.upscalers.real_configs import LLAMA_3_2_1B, write_config
from upscalers.methods.contract import METHODS
from upscalers.runs.upscale import upscale

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "choosing.md").read_text(encoding="utf-8")
INDEX = (DOCS / "methods" / "README.md").read_text(encoding="utf-8")
SHIPPED = sorted(name for name, method in METHODS.items() if method.__module__.startswith("upscalers."))
PRICED = [name for name in SHIPPED if name != "slices"]
"""What slices cost depends on which they are."""

BYTES_TRAINED, BYTES_FROZEN = 16, 2


def row(method: str) -> list[str]:
    """The cells behind the name of a method in the table of costs."""
    costs = PAGE.partition("\n## What each costs\n")[2]
    lines = [line for line in costs.splitlines() if line.startswith(f"| {method} |")]
    assert lines, f"{method} has no row under 'What each costs' in docs/choosing.md; add one"
    return [cell.strip() for cell in lines[0].strip("|").split("|")][1:]


@pytest.mark.parametrize("method", SHIPPED)
def test_every_method_is_in_the_decision_table_with_its_page(method):
    named = re.compile(rf"(?<![\w-]){method}(?![\w-])")
    row = next(line for line in INDEX.splitlines() if line.startswith(f"| {method} |"))
    (page,) = re.findall(r"\]\(([\w-]+\.md)\)", row)
    decisions = [line for line in PAGE.partition("\n## ")[0].splitlines() if named.search(line)]
    assert any(f"(methods/{page})" in line for line in decisions), f"no row leads to docs/methods/{page} for {method}"


@pytest.mark.parametrize("method", PRICED)
def test_costs_are_those_of_a_dry_run(method, tmp_path):
    report = upscale(base=write_config(tmp_path / "base", LLAMA_3_2_1B), method=method, dry_run=True)
    counts = report.parameters
    at_a_time = counts.trainable if counts.fetched is None else counts.fetched  # the rest of a bank stays on the disk
    frozen = counts.total - (counts.trainable if counts.fetched is None else 0)
    state = BYTES_TRAINED * at_a_time + BYTES_FROZEN * frozen
    assert row(method) == [
        f"{counts.new:,}",
        f"{counts.trainable:,}",
        f"{report.bytes.written:,}",
        f"{state / 1e9:.1f} GB",
        "yes" if report.promises_identity else "no",
    ]

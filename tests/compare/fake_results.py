"""Results of runs as a comparison would have measured them, and what is found in them."""

from collections.abc import Sequence

from midus_hf.compare.plan import Comparison, VariantOptions
from midus_hf.compare.report import Findings, findings
from midus_hf.compare.run import Point, Result

DOMAIN, RETENTION, VALIDATION = "plants", "stars", "herbs"


def comparison(variants: Sequence[str], **changes) -> Comparison:
    """One text to learn, one to keep, one by which one of three rates is chosen; without it there is one rate."""
    rates = [1e-2, 1e-3, 1e-4] if changes.get("validation", True) else [1e-3]
    arguments = {
        "base": "base",
        "output_dir": "out",
        "variants": {name: VariantOptions(rates=rates) for name in variants},
        "train": {"corpus": "corpus", "max_steps": 10},
        "domain": {DOMAIN: "plants.txt"},
        "retention": {RETENTION: "stars.txt"},
        "validation": {VALIDATION: "herbs.txt"},
        **changes,
    }
    return Comparison(**arguments)


def result(
    variant: str,
    learned: Sequence[float],
    forgotten: Sequence[float] | None = None,
    seed: int = 0,
    rate: float = 1e-3,
    loss: float = 3.0,
    kept: float = 2.0,
    **changes,
) -> Result:
    """A run from losses of 3 and 2, or others: how far that of the domain has fallen, and the other risen, at each moment.

    The loss of the validation text lies 1 above that of the domain.
    """
    forgotten = [0.0] * len(learned) if forgotten is None else forgotten
    changes_of = [(0.0, 0.0), *zip(learned, forgotten, strict=True)]
    curve = [
        Point(step, {DOMAIN: loss - down, RETENTION: kept + up, VALIDATION: loss + 1 - down})
        for step, (down, up) in enumerate(changes_of)
    ]
    arguments = {
        "trained_parameters": 1000,
        "tokens": 100 * len(learned),
        "seconds": 2.0,
        "peak_memory_bytes": 10**9,
        **changes,
    }
    return Result(variant=variant, rate={"learning_rate": rate}, seed=seed, curve=curve, **arguments)


BASE = Result("base", {}, 0, [Point(0, {DOMAIN: 3.0, RETENTION: 2.0, VALIDATION: 4.0})])

HML = [result("hml", [0.25, 0.5], [0.0, 0.125], seed=0), result("hml", [0.25, 0.75], [0.0, 0.375], seed=1)]
FULL = [result("full", [0.5, 1.0], [0.25, 1.0], seed=0), result("full", [0.5, 1.5], [0.5, 2.0], seed=1)]
FULL_SLOW = [result("full", [0.25, 0.5], [0.0, 0.25], seed=seed, rate=1e-4) for seed in (0, 1)]
NULL = [
    result("hml+one-row", [0.25, learned], seed=seed, control="one-row", control_of="hml")
    for seed, learned in ((0, 0.25), (1, 0.5))
]
# Runs of what was upscaled, and did not compute what the base computes: their losses start at 7 and 3.
ELSEWHERE = {"loss": 7.0, "kept": 3.0, "starts_at_base": False, "request": {"upscale": {"method": "solar"}}}
SOLAR = [result("solar", [4.0, 4.25], [-1.0, -0.5], seed=seed, **ELSEWHERE) for seed in (0, 1)]


def found(results, variants=("hml", "full"), failures=None, missing=0, **changes) -> Findings:
    """Return what is found in results of these variants."""
    return findings(comparison(variants, **changes), BASE, results, failures or {}, missing)


def rows_of(table) -> dict[str, dict[str, str]]:
    """Return the rows of a table by their first run, each row by the heads of the columns."""
    return {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}

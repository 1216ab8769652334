"""Results of runs as a comparison would have measured them."""

from collections.abc import Sequence

from midus_workbench.options import ArmOptions, Comparison
from midus_workbench.results import Point, Result

DOMAIN, RETENTION = "plants", "stars"


def comparison(arms: Sequence[str], **changes) -> Comparison:
    """One text to learn, one to keep."""
    given = {
        "base": "base",
        "output": "out",
        "arms": {name: ArmOptions() for name in arms},
        "train": {"corpus": "corpus", "max_steps": 10},
        "domain": {DOMAIN: "plants.txt"},
        "retention": {RETENTION: "stars.txt"},
        **changes,
    }
    return Comparison(**given)


def result(
    arm: str,
    learned: Sequence[float],
    forgotten: Sequence[float] | None = None,
    seed: int = 0,
    rate: float = 1e-3,
    loss: float = 3.0,
    kept: float = 2.0,
    **changes,
) -> Result:
    """A run from losses of 3 and 2, or others: how far that of the domain has fallen, and the other risen, at each moment."""
    forgotten = [0.0] * len(learned) if forgotten is None else forgotten
    changes_of = [(0.0, 0.0), *zip(learned, forgotten, strict=True)]
    curve = [
        Point(step, 100 * step, None if step == 0 else float(step), {DOMAIN: loss - down, RETENTION: kept + up})
        for step, (down, up) in enumerate(changes_of)
    ]
    given = {"trained_parameters": 1000, "seconds": 2.0, "peak_memory_bytes": 10**9, **changes}
    return Result(arm=arm, rate={"learning_rate": rate}, seed=seed, curve=curve, **given)


BASE = Result("base", {}, 0, [Point(0, 0, None, {DOMAIN: 3.0, RETENTION: 2.0})])

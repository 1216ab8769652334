"""Results of runs as a comparison would have measured them."""

from midus_hf.compare.plan import Comparison, VariantOptions
from midus_hf.compare.run import Point, Result

DOMAIN, RETENTION, VALIDATION = "plants", "stars", "herbs"


def comparison(variants, **changes) -> Comparison:
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
    }
    return Comparison(**{**arguments, **changes})


def result(variant, learned, forgotten=None, seed=0, rate=1e-3, loss=3.0, kept=2.0, **changes) -> Result:
    """A run from losses of 3 and 2, or others: how far that of the domain has fallen, and the other risen, at each moment.

    The loss of the validation text lies 1 above that of the domain.
    """
    risen = [0.0, *(forgotten or [0.0] * len(learned))]
    curve = [
        Point(step, {DOMAIN: loss - down, RETENTION: kept + up, VALIDATION: loss + 1 - down})
        for step, (down, up) in enumerate(zip([0.0, *learned], risen, strict=True))
    ]
    arguments = {"trained_parameters": 1000, "tokens": 100 * len(learned), "seconds": 2.0, "peak_memory_bytes": 10**9}
    return Result(variant, {"learning_rate": rate}, seed, curve, **{**arguments, **changes})


BASE = Result("base", {}, 0, [Point(0, {DOMAIN: 3.0, RETENTION: 2.0, VALIDATION: 4.0})])

"""What to doubt in a comparison: reasons why variants differ in more than their methods."""

import dataclasses
import statistics
from collections.abc import Mapping

from midus_hf.compare.findings import Findings, VariantFindings
from midus_hf.compare.options import Rate, rate_name
from midus_hf.compare.origins import KINDS, identity, short

# Seeds below which a spread says little, the share by which sizes may differ, and the step of a search of rates.
_ENOUGH_SEEDS = 3
_SHARE = 0.1
# Keys of `midus train` that change what the loss of a text is, beside the window.
_READING = ("document_mask", "path_column", "text_column", "bf16", "fp16")
_STEP = 3


@dataclasses.dataclass(frozen=True)
class Doubt:
    """A reason to doubt rows of a report.

    Args:
        reason: The reason, as the beginning of a sentence.
        variants: What holds for each variant that the reason concerns, in words; empty where its name says all.
    """

    reason: str
    variants: Mapping[str, str]

    @property
    def sentence(self) -> str:
        """The reason with the variants that it concerns."""
        return f"{self.reason}: {', '.join(f'{name} {detail}'.strip() for name, detail in self.variants.items())}."


def doubts(findings: Findings) -> list[Doubt]:
    """Return each reason for which variants cannot be compared as they stand, with the variants that it concerns."""
    variants = findings.variants
    several_tokens = len({variant.tokens for variant in variants}) > 1
    several_rates = len({variant.num_rates for variant in variants}) > 1
    reasons = {
        "Fewer than three seeds, which say little of chance": {
            variant.name: f"with {len(variant.results)}"
            for variant in variants
            if len(variant.results) < _ENOUGH_SEEDS
        },
        "Trained on unequal numbers of tokens": {
            variant.name: f"on {variant.tokens:,.0f}" for variant in variants if several_tokens
        },
        "Tried at unequal numbers of rates, and more rates are more chances to end low": {
            variant.name: f"at {variant.num_rates}" for variant in variants if several_rates
        },
        "The best rate is an end of the list, so that a better one may lie beyond": {
            variant.name: f"at {variant.rate} (add {', '.join(beyond)})"
            for variant in variants
            if (beyond := _rates_beyond(findings, variant))
        },
        "Rates that are not done or ended at no finite number, and were not chosen": {
            name: f"at {' and '.join(rates)}" for name, rates in findings.not_chosen.items()
        },
        "Trains a number of parameters that is more than 10 % off the median of those that do not train all": _sizes(
            findings
        ),
        "Not seen to start at the base, from which learned and forgotten are counted all the same": {
            variant.name: "" for variant in variants if variant.starts_elsewhere
        },
        "Read texts or compute in different ways, so that losses are not of the same predictions": _ways(findings),
        "Models are chosen for a document by the whole document, whose loss is then measured": {
            name: ""
            for name, options in findings.comparison.variants.items()
            if options.one_per_stage and any(variant.name == name for variant in findings.variants)
        },
        "Not causal, so that losses cannot be compared, since tokens are read before they are predicted": {
            variant.name: "" for variant in variants if not all(result.is_causal for result in variant.results)
        },
        **{f"Made with different {kind}": origin_words(findings, kind) for kind in KINDS},
    }
    return [Doubt(reason, names) for reason, names in reasons.items() if names]


def origin_words(findings: Findings, kind: str) -> dict[str, str]:
    """Return what each variant was made with, where the base and the variants differ in this kind of origin; else nothing."""
    rows = {
        "base": [findings.base],
        **{variant.name: [*variant.results, *variant.controls] for variant in findings.variants},
    }
    if len({identity(kind, result.origin) for results in rows.values() for result in results}) <= 1:
        return {}
    return {
        name: " and ".join(dict.fromkeys(short(kind, result.origin) for result in results))
        for name, results in rows.items()
    }


def shared_origin(findings: Findings) -> str:
    """Return a sentence on the data, base, code and machine that all rows share; empty if they share none."""
    shared = [f"{kind} {short(kind, findings.base.origin)}" for kind in KINDS if not origin_words(findings, kind)]
    return f"All rows were made with {'; '.join(shared)}." if shared else ""


def _rates_beyond(findings: Findings, variant: VariantFindings) -> list[str]:
    """Return rates to add where the chosen rate has the highest or the lowest value of a key that was searched."""
    rates = findings.comparison.rates_of(variant.name)
    chosen = next((rate for rate in rates if rate_name(rate) == variant.rate), {})
    beyond: list[Rate] = []
    for key, value in chosen.items():
        values = [rate[key] for rate in rates if key in rate]
        if len(set(values)) > 1 and value in (min(values), max(values)):
            further = value * _STEP if value == max(values) else value / _STEP
            beyond.append({**chosen, key: float(f"{further:.3g}")})
    return [rate_name(rate) for rate in beyond]


def _ways(findings: Findings) -> dict[str, str]:
    """Return the keys by which each variant reads texts and computes, where they differ among variants; else nothing."""
    ways = {}
    for variant in findings.variants:
        train = variant.results[0].request.get("train") or {}
        keys = [f"{key}={train[key]}" for key in _READING if train.get(key)]
        ways[variant.name] = f"with {', '.join(keys)}" if keys else "by default"
    return ways if len(set(ways.values())) > 1 else {}


def _sizes(findings: Findings) -> dict[str, str]:
    """Return the trained parameters of variants that are far from the median of variants that train a part of their model."""
    counts = {
        variant.name: variant.results[0].trained_parameters
        for variant in findings.variants
        if not variant.results[0].trains_all
    }
    if not counts:
        return {}
    median = statistics.median(counts.values())
    return {
        name: f"{count:,} of {median:,.0f}" for name, count in counts.items() if abs(count - median) > _SHARE * median
    }

"""Findings of a comparison: what each variant learned and forgot at its best rate, in numbers and sentences."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from midus_hf.compare.learning import Spread, best_rate, by_rate, falls, mean_loss, paired, spread, verdict
from midus_hf.compare.options import Comparison, rate_name
from midus_hf.compare.results import Result
from midus_hf.compare.variants import SHUFFLED


@dataclasses.dataclass(frozen=True)
class VariantFindings:
    """Findings about one variant, at the rate at which the loss of the domain ended lowest, in nats per token.

    `results` are those at this rate, one per seed, and `num_rates` counts the rates with results. `ends` are mean final losses of the
    domain by seed, and `domain_loss` is their spread. `learned` is what the loss of the domain fell by, `forgotten` what the loss of
    the retention texts rose by, both counted from `origin`; None without these texts. `advantages` say how far the loss of the domain
    ended below that of each null control, over the seeds that both have; for `shuffled-addresses`, by how much it rises when the
    variant's values are permuted.
    """

    name: str
    rate: str
    num_rates: int
    results: Sequence[Result]
    ends: Mapping[int, float]
    domain_loss: Spread | None
    learned: Spread | None
    forgotten: Spread | None
    advantages: Mapping[str, Spread]

    @property
    def starts_elsewhere(self) -> bool:
        """True if, for any seed, the model was not verified to start from what the base computes."""
        return any(result.upscaled is not None for result in self.results)

    @property
    def tokens(self) -> float:
        """Number of tokens trained on, the mean over seeds."""
        return statistics.fmean(result.tokens for result in self.results)


@dataclasses.dataclass(frozen=True)
class Findings:
    """Findings of a comparison, which reports are written from.

    `variants` rise by their loss of the domain; without domain texts they are in the order of the comparison. `failures` say why runs
    failed, by name, and `missing` is the number of runs that are not done, of null controls too.
    """

    comparison: Comparison
    base: Result
    variants: Sequence[VariantFindings]
    failures: Mapping[str, str]
    missing: int


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Return the findings of a comparison from its results.

    Results of null controls count only at the best rate of their variant.
    """
    variants = [
        _variant_findings(name, comparison, base, results)
        for name in comparison.variants
        if any(result.variant == name for result in results)
    ]
    variants.sort(key=lambda variant: 0.0 if variant.domain_loss is None else variant.domain_loss.mean)
    return Findings(comparison, base, variants, failures, missing)


def _variant_findings(name: str, comparison: Comparison, base: Result, results: Sequence[Result]) -> VariantFindings:
    domain, retention = list(comparison.domain), list(comparison.retention)
    rates = by_rate(result for result in results if result.variant == name)
    rate = rate_name(best_rate([result for group in rates.values() for result in group], domain))
    best = rates[rate]
    ends = {result.seed: mean_loss(result.losses, domain) for result in best} if domain else {}
    controls = [result for result in results if result.control_of == name and rate_name(result.rate) == rate]
    return VariantFindings(
        name=name,
        rate=rate,
        num_rates=len(rates),
        results=best,
        ends=ends,
        domain_loss=spread(list(ends.values())) if domain else None,
        learned=spread([falls(result, base, domain)[-1] for result in best]) if domain else None,
        forgotten=spread([-falls(result, base, retention)[-1] for result in best]) if retention else None,
        advantages=_advantages(best, ends, controls, domain) if domain else {},
    )


def _advantages(
    results: Sequence[Result], ends: Mapping[int, float], controls: Sequence[Result], domain: Sequence[str]
) -> dict[str, Spread]:
    """Return the advantage of a variant over each null control that shares a seed with it: trained ones first, then shuffled."""
    losses: dict[str, dict[int, float]] = {}
    for result in controls:
        assert result.control is not None
        losses.setdefault(result.control, {})[result.seed] = mean_loss(result.losses, domain)
    advantages = {control: paired(ends, by_seed) for control, by_seed in losses.items()}
    saved = {result.seed: mean_loss(result.saved, domain) for result in results if result.saved is not None}
    shuffled = {result.seed: mean_loss(result.shuffled, domain) for result in results if result.shuffled is not None}
    advantages[SHUFFLED] = paired(saved, shuffled)
    return {control: advantage for control, advantage in advantages.items() if advantage is not None}


def with_spread(numbers: Spread | None, form: str = "{:.4f}") -> str:
    """Return a mean as text, followed by ± and the standard deviation over seeds if there are several seeds."""
    if numbers is None:
        return ""
    text = form.format(numbers.mean)
    return text if numbers.deviation is None else f"{text} ± {form.format(numbers.deviation).lstrip('+')}"


def sentences(findings: Findings) -> list[str]:
    """Return the sentences that open a report: who learned most, null controls that were not beaten, cautions and missing runs."""
    if not findings.variants:
        return ["No run is done yet."]
    lines = [_learned_most(findings)] if findings.comparison.domain else []
    for variant in findings.variants:
        for control, advantage in variant.advantages.items():
            conclusion = verdict(advantage)
            if conclusion.endswith("beat it"):
                lines.append(f"{variant.name} {conclusion.removesuffix('it')}its null control {control}.")
    lines += cautions(findings)
    if findings.missing:
        failed = f", of which {len(findings.failures)} failed" if findings.failures else ""
        lines.append(f"Runs that are not done: {findings.missing}{failed}.")
    return lines


def _learned_most(findings: Findings) -> str:
    first, *others = findings.variants
    base = mean_loss(findings.base.losses, list(findings.comparison.domain))
    sentence = f"{first.name} ends with the lowest loss of the domain, {with_spread(first.domain_loss)} nats per token"
    if others:
        sentence += f"; {others[0].name} follows with {with_spread(others[0].domain_loss)}"
    sentence += f". The base has {base:.4f}."
    difference = paired(first.ends, others[0].ends) if others else None
    if difference is None or difference.half_interval is None:
        return sentence
    chance = "which is more than chance of seeds" if difference.is_above_zero else "which may be chance"
    return (
        f"{sentence} With the same seeds these two differ by {difference.mean:.4f} ± {difference.half_interval:.4f} "
        f"(95 %), {chance}."
    )


def cautions(findings: Findings) -> list[str]:
    """Return a sentence, with the variants that it holds for, per reason why variants do not differ in their methods alone."""
    variants = findings.variants
    several_tokens = len({variant.tokens for variant in variants}) > 1
    several_rates = len({variant.num_rates for variant in variants}) > 1
    reasons = {
        "One seed, which says nothing of chance": [variant.name for variant in variants if len(variant.results) == 1],
        "Trained on unequal numbers of tokens": [
            f"{variant.name} on {variant.tokens:,.0f}" for variant in variants if several_tokens
        ],
        "Tried at unequal numbers of rates, and more rates are more chances to end low": [
            f"{variant.name} at {variant.num_rates}" for variant in variants if several_rates
        ],
        "Not seen to start at the base, from which learned and forgotten are counted all the same": [
            variant.name for variant in variants if variant.starts_elsewhere
        ],
        "Not causal, so that losses cannot be compared, since tokens are read before they are predicted": [
            variant.name for variant in variants if not all(result.is_causal for result in variant.results)
        ],
    }
    return [f"{reason}: {', '.join(names)}." for reason, names in reasons.items() if names]

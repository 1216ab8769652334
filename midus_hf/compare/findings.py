"""Findings of a comparison: what each variant learned and forgot at its chosen rate, in numbers and sentences."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from midus_hf.compare.learning import (
    Spread,
    by_rate,
    chosen_rate,
    differences,
    falls,
    mean_loss,
    paired,
    spread,
    verdict,
)
from midus_hf.compare.options import Comparison, rate_name
from midus_hf.compare.results import Result
from midus_hf.compare.variants import SHUFFLED


@dataclasses.dataclass(frozen=True)
class VariantFindings:
    """Findings about one variant, at the rate that the validation texts chose, in nats per token.

    `results` are its results at this rate, one per seed, `controls` the results of its null controls, and `num_rates` counts the
    rates with results. `ends` are mean final losses of the domain by seed. `learned_by_seed` is what the loss of the domain fell
    by, `forgotten_by_seed` what the loss of the retention texts rose by, both counted from `origin`; they are empty without these
    texts. `advantages` say how far the loss of the domain ended below that of each null control, over the seeds that both have;
    for `shuffled-addresses`, by how much it rises when the variant's values are permuted.
    """

    name: str
    rate: str
    num_rates: int
    results: Sequence[Result]
    controls: Sequence[Result]
    ends: Mapping[int, float]
    learned_by_seed: Mapping[int, float]
    forgotten_by_seed: Mapping[int, float]
    advantages: Mapping[str, Spread]

    @property
    def domain_loss(self) -> Spread | None:
        """Spread of `ends`; None without domain texts."""
        return spread(list(self.ends.values())) if self.ends else None

    @property
    def learned(self) -> Spread | None:
        """Spread over seeds of what was learned; None without domain texts."""
        return spread(list(self.learned_by_seed.values())) if self.learned_by_seed else None

    @property
    def forgotten(self) -> Spread | None:
        """Spread over seeds of what was forgotten; None without retention texts."""
        return spread(list(self.forgotten_by_seed.values())) if self.forgotten_by_seed else None

    @property
    def is_certified(self) -> bool:
        """True if the trained model of every seed came with a certificate."""
        return all(result.is_certified for result in self.results)

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

    `variants` rise by their loss of the domain; without domain texts they are in the order of the comparison. `not_chosen` are names
    of the rates, by variant, whose run with the first seed is not done or ended at no finite number; variants without any result
    are left out. `failures` say why runs failed,
    by name, and `missing` is the number of runs that are not done, of null controls too.
    """

    comparison: Comparison
    base: Result
    variants: Sequence[VariantFindings]
    not_chosen: Mapping[str, Sequence[str]]
    failures: Mapping[str, str]
    missing: int

    @property
    def reference(self) -> VariantFindings | None:
        """The variant that others are subtracted from: the comparison's `reference`, or the one that learned most.

        None if it has no result, or there is no domain text.
        """
        name = self.comparison.reference
        able = [one for one in self.variants if one.learned is not None and name in (None, one.name)]
        return max(able, key=lambda one: 0.0 if one.learned is None else one.learned.mean) if able else None


def findings(
    comparison: Comparison, base: Result, results: Sequence[Result], failures: Mapping[str, str], missing: int = 0
) -> Findings:
    """Return the findings of a comparison from its results.

    Results of null controls count only at the chosen rate of their variant.
    """
    variants = [
        one for name in comparison.variants if (one := _variant_findings(name, comparison, base, results)) is not None
    ]
    variants.sort(key=lambda variant: 0.0 if variant.domain_loss is None else variant.domain_loss.mean)
    begun = dict.fromkeys(result.variant for result in results if result.control is None)
    not_chosen = {name: _not_chosen(name, comparison, results) for name in comparison.variants if name in begun}
    not_chosen = {name: rates for name, rates in not_chosen.items() if rates}
    return Findings(comparison, base, variants, not_chosen, failures, missing)


def _variant_findings(
    name: str, comparison: Comparison, base: Result, results: Sequence[Result]
) -> VariantFindings | None:
    """Return the findings about a variant; None if none of its runs with the first seed ended at a finite number."""
    domain, retention = list(comparison.domain), list(comparison.retention)
    own = [result for result in results if result.variant == name]
    searches = [result for result in own if result.seed == comparison.seeds[0]]
    chosen = chosen_rate(searches, list(comparison.validation))
    if chosen is None:
        return None
    rates, rate = by_rate(own), rate_name(chosen)
    best = rates[rate]
    ends = {result.seed: mean_loss(result.losses, domain) for result in best} if domain else {}
    controls = [result for result in results if result.control_of == name and rate_name(result.rate) == rate]
    return VariantFindings(
        name=name,
        rate=rate,
        num_rates=len(rates),
        results=best,
        controls=controls,
        ends=ends,
        learned_by_seed={result.seed: falls(result, base, domain)[-1] for result in best} if domain else {},
        forgotten_by_seed={result.seed: -falls(result, base, retention)[-1] for result in best} if retention else {},
        advantages=_advantages(best, ends, controls, domain) if domain else {},
    )


def _not_chosen(name: str, comparison: Comparison, results: Sequence[Result]) -> list[str]:
    """Return the names of a variant's rates that could not be chosen."""
    searches = [result for result in results if result.variant == name and result.seed == comparison.seeds[0]]
    able = {rate_name(one.rate) for one in searches if chosen_rate([one], list(comparison.validation)) is not None}
    return [named for named in map(rate_name, comparison.rates_of(name)) if named not in able]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A variant minus the reference, seed by seed, in nats per token.

    `learned` and `forgotten` are spreads over the seeds that both have, `forgotten` None without retention texts. `ahead` counts the
    seeds with which the variant learned more.
    """

    variant: str
    learned: Spread
    forgotten: Spread | None
    ahead: int


def paired_differences(findings: Findings) -> list[Difference]:
    """Return the difference of each variant to the reference; empty without a reference, and without common seeds."""
    reference = findings.reference
    if reference is None:
        return []
    pairs = []
    for variant in findings.variants:
        learned = differences(reference.learned_by_seed, variant.learned_by_seed)
        if variant.name != reference.name and learned:
            forgotten = paired(reference.forgotten_by_seed, variant.forgotten_by_seed)
            ahead = sum(difference > 0 for difference in learned)
            pairs.append(Difference(variant.name, spread(learned), forgotten, ahead))
    return pairs


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
    """Return the sentences that open a report: who learned most, null controls that were not beaten, and missing runs."""
    if not findings.variants:
        return ["No run is done yet."]
    lines = [_learned_most(findings)] if findings.comparison.domain else []
    for variant in findings.variants:
        for control, advantage in variant.advantages.items():
            conclusion = verdict(advantage)
            if conclusion.endswith("beat it"):
                lines.append(f"{variant.name} {conclusion.removesuffix('it')}its null control {control}.")
    if findings.missing:
        failed = f", of which {len(findings.failures)} failed" if findings.failures else ""
        lines.append(f"Runs that are not done: {findings.missing}{failed}.")
    return lines


def _learned_most(findings: Findings) -> str:
    first, *others = findings.variants
    domain = list(findings.comparison.domain)
    start = statistics.fmean(mean_loss(result.start.losses, domain) for result in first.results)
    sentence = f"{first.name} ends with the lowest loss of the domain, {with_spread(first.domain_loss)} nats per token"
    if others:
        sentence += f"; {others[0].name} follows with {with_spread(others[0].domain_loss)}"
    sentence += f". {first.name} began with {start:.4f}."
    difference = paired(first.ends, others[0].ends) if others else None
    if difference is None or difference.half_interval is None:
        return sentence
    chance = "which is more than chance of seeds" if difference.is_above_zero else "which may be chance"
    return (
        f"{sentence} With the same seeds these two differ by {difference.mean:.4f} ± {difference.half_interval:.4f} "
        f"(95 %), {chance}."
    )

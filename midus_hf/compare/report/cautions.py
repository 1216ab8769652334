"""Cautions of a report: sentences about differences between variants that are not differences of their methods."""

from collections.abc import Sequence

from midus_hf.compare.learning import by_rate, compared
from midus_hf.compare.report.findings import Findings, VariantFindings


def cautions(findings: Findings) -> list[str]:
    """Return a sentence per reason why variants do not differ in their methods alone.

    The reasons: a single seed, different numbers of tokens or of rates, rates tried with different seeds, a best rate at an end of
    its range, a start that is not the base, and a model that is not causal.

    Args:
        findings: Findings of a comparison with results of at least one variant.
    """
    variants = findings.variants.values()
    sentences = []
    single = [variant.name for variant in variants if len(variant.best) == 1]
    if len(single) == len(variants):
        sentences.append("One seed: nothing here says how much of a difference is chance.")
    elif single:
        sentences.append(
            f"{_list(single)} {_have(single)} one seed: nothing says how much of a difference to others is chance."
        )
    tokens = {variant.name: variant.tokens for variant in variants}
    least, most = min(tokens, key=tokens.__getitem__), max(tokens, key=tokens.__getitem__)
    if tokens[least] < tokens[most]:
        sentences.append(
            f"Variants were not trained on equally many tokens: {least} on {tokens[least]:,.0f}, {most} on {tokens[most]:,.0f}."
        )
    counts = {len(variant.rates) for variant in variants}
    if len(counts) > 1:
        listed = ", ".join(f"{variant.name} at {len(variant.rates)}" for variant in variants)
        sentences.append(
            f"Variants were not tried at equally many rates, and more rates are more chances to end low: {listed}."
        )
    sentences += filter(None, map(_of_seeds, variants))
    ends = [f"{variant.name} ({variant.rate})" for variant in variants if variant.is_at_an_end_of_its_rates]
    if ends:
        sentences.append(
            f"At the lowest or highest rate that was tried, and perhaps better beyond it: {', '.join(ends)}."
        )
    elsewhere = [variant.name for variant in variants if variant.starts_elsewhere]
    if elsewhere:
        sentences.append(
            f"{_list(elsewhere)} {'was' if len(elsewhere) == 1 else 'were'} not seen to start at the base: what was learned and "
            "forgotten is counted from the base's losses, not from the start."
        )
    ahead = [variant.name for variant in variants if not variant.is_causal]
    if ahead:
        sentences.append(
            f"Not causal: {', '.join(ahead)}. A model that reads tokens before it predicts them has losses that cannot be compared."
        )
    return sentences


def _of_seeds(variant: VariantFindings) -> str | None:
    """Return the caution for a variant whose rates were tried with different seeds; None if the seeds are the same."""
    tried = {rate: sorted(result.seed for result in results) for rate, results in by_rate(variant.results).items()}
    if len({tuple(seeds) for seeds in tried.values()}) == 1:
        return None
    shared = sorted(compared(variant.results)[1])
    listed = "; ".join(f"{rate} with {', '.join(map(str, seeds))}" for rate, seeds in tried.items())
    caution = f"{variant.name} was not tried with the same seeds at every rate ({listed})"
    if not shared:
        return f"{caution}, which have no seed in common: its best rate may be that of the luckier seed."
    which = f"seed{'s' if len(shared) > 1 else ''} {', '.join(map(str, shared))}"
    return f"{caution}: its best rate is the best of {which}, which the rates with the most seeds share."


def _list(names: Sequence[str]) -> str:
    """Return the names as prose: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"

"""What keeps arms from being compared as if they differed in their methods alone, told in words."""

from collections.abc import Sequence

from midus_hf.compare.learning import by_rate, compared
from midus_hf.compare.report.findings import ArmFindings, Findings


def cautions(found: Findings) -> list[str]:
    """What keeps arms from being compared as if they differed in their methods alone.

    Args:
        found: Of a comparison with one arm or more.
    """
    arms = found.arms.values()
    told = []
    single = [arm.name for arm in arms if len(arm.best) == 1]
    if len(single) == len(arms):
        told.append("One seed: nothing here says how much of a difference is chance.")
    elif single:
        told.append(
            f"{_list(single)} {_have(single)} one seed: nothing says how much of a difference to others is chance."
        )
    tokens = {arm.name: arm.tokens for arm in arms}
    least, most = min(tokens, key=tokens.__getitem__), max(tokens, key=tokens.__getitem__)
    if tokens[least] < tokens[most]:
        told.append(
            f"Arms were not trained on as many tokens: {least} on {tokens[least]:,.0f}, {most} on {tokens[most]:,.0f}."
        )
    counts = {len(arm.rates) for arm in arms}
    if len(counts) > 1:
        words = ", ".join(f"{arm.name} at {len(arm.rates)}" for arm in arms)
        told.append(f"Arms were not tried at as many rates, and more of them are more chances to end low: {words}.")
    told += filter(None, map(_of_seeds, arms))
    ends = [f"{arm.name} ({arm.rate})" for arm in arms if arm.is_at_an_end_of_its_rates]
    if ends:
        told.append(f"At the lowest or highest rate that was tried, and perhaps better beyond it: {', '.join(ends)}.")
    elsewhere = [arm.name for arm in arms if arm.starts_elsewhere]
    if elsewhere:
        told.append(
            f"{_list(elsewhere)} {'was' if len(elsewhere) == 1 else 'were'} not seen to start at the base: what was learned and "
            "forgotten is counted from the base's losses, not from the start."
        )
    ahead = [arm.name for arm in arms if not arm.is_causal]
    if ahead:
        told.append(
            f"Not causal: {', '.join(ahead)}. Losses are of tokens that were read in part before they were predicted, and none to "
            "compare."
        )
    return told


def _of_seeds(arm: ArmFindings) -> str | None:
    """What is told of an arm whose rates were tried with different seeds."""
    tried = {rate: sorted(result.seed for result in results) for rate, results in by_rate(arm.results).items()}
    if len({tuple(seeds) for seeds in tried.values()}) == 1:
        return None
    shared = sorted(compared(arm.results)[1])
    words = "; ".join(f"{rate} with {', '.join(map(str, seeds))}" for rate, seeds in tried.items())
    told = f"{arm.name} was not tried with the same seeds at every rate ({words})"
    if not shared:
        return f"{told}, which have no seed in common: its best rate may be that of the luckier seed."
    which = f"seed{'s' if len(shared) > 1 else ''} {', '.join(map(str, shared))}"
    return f"{told}: its best rate is the best of {which}, which those of most seeds have in common."


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _have(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"

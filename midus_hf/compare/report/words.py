"""Numbers and findings in words."""

from midus_hf.compare.learning import Spread, mean_loss, paired
from midus_hf.compare.report.cautions import cautions
from midus_hf.compare.report.findings import Findings


def with_spread(numbers: Spread | None, form: str = "{:.4f}") -> str:
    """The mean, and behind it the standard deviation over seeds where there are several.

    Args:
        numbers: None for nothing.
        form: Of each number. Default: four digits behind the point.
    """
    if numbers is None:
        return ""
    told = form.format(numbers.mean)
    return told if numbers.deviation is None else f"{told} ± {form.format(numbers.deviation).lstrip('+')}"


def short_count(number: int) -> str:
    """A number of parameters: `8.89M`.

    Args:
        number: 0 or more.
    """
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def sentences(found: Findings) -> list[str]:
    """What a person wants to know first.

    Args:
        found: Of a comparison.
    """
    if not found.arms:
        return ["No run is done yet."]
    told = [_learned_most(found)]
    equal = found.at_equal_learning() if found.compares_forgetting else []
    if len(equal) > 1:
        told.append(_forgot_least(found))
    told += _controls(found)
    told += cautions(found)
    if found.missing:
        told.append(_missing(found))
    return told


def _missing(found: Findings) -> str:
    failed = len(found.failures)
    if found.missing == 1:
        return f"1 run is not done{'; it failed' if failed else ''}."
    return f"{found.missing} runs are not done{f', of which {failed} failed' if failed else ''}."


def _learned_most(found: Findings) -> str:
    first, *others = sorted(found.arms.values(), key=lambda arm: arm.domain_loss.mean)
    words = f"{first.name} ends with the lowest loss of the domain, {with_spread(first.domain_loss)} nats per token"
    if others:
        words += f"; {others[0].name} follows with {with_spread(others[0].domain_loss)}"
    words += f". The base has {mean_loss(found.base.end, found.domain):.4f}."
    return words + (_between(paired(first.ends, others[0].ends)) if others else "")


def _between(difference: Spread | None) -> str:
    """What seeds say of a difference; nothing of one seed."""
    if difference is None or difference.half_interval is None:
        return ""
    chance = "which is more than chance of seeds" if difference.is_above_zero else "which may be chance"
    return f" Of the same seeds these two differ by {difference.mean:.4f} ± {difference.half_interval:.4f} (95 %), {chance}."


def _forgot_least(found: Findings) -> str:
    first, second, *others = found.at_equal_learning()
    changes = [with_spread(one.forgotten, "{:+.4f}") for one in (first, second)]
    learned = f"When {found.common_learning:.4f} nats are learned, as {2 + len(others)} of {len(found.arms)} arms did"
    # Where the loss fell for both of them, nobody has forgotten anything.
    least = "has forgotten least" if second.forgotten.mean > 0 else "has gained most outside as well"
    return (
        f"{learned}, {first.arm} {least}: the loss outside the domain has changed by {changes[0]}, that of "
        f"{second.arm}, the next, by {changes[1]}.{_between(paired(first.by_seed, second.by_seed))}"
    )


def _controls(found: Findings) -> list[str]:
    told = []
    for arm in found.arms:
        of_words: dict[str, list[str]] = {}
        for one in found.verdicts(arm):
            of_words.setdefault(one.words, []).append(one.control)
        for words, verb in (("does not beat it", "does not beat"), ("not shown to beat it", "is not shown to beat")):
            if words in of_words:
                names = of_words[words]
                told.append(f"{arm} {verb} its null control{'s' * (len(names) > 1)} {', '.join(names)}.")
    return told

"""Numbers and findings as text."""

from collections.abc import Sequence

from midus_hf.compare.learning import Spread, mean_loss, paired
from midus_hf.compare.report.findings import Findings


def with_spread(numbers: Spread | None, form: str = "{:.4f}") -> str:
    """Return a mean as text, followed by ± and the standard deviation over seeds if there are several seeds."""
    if numbers is None:
        return ""
    text = form.format(numbers.mean)
    return text if numbers.deviation is None else f"{text} ± {form.format(numbers.deviation).lstrip('+')}"


def short_count(number: int) -> str:
    """Return a count, 0 or more, as short text of three significant digits: `8.89M`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def sentences(findings: Findings) -> list[str]:
    """Return the sentences that open a report: who learned most, null controls, cautions and missing runs."""
    if not findings.variants:
        return ["No run is done yet."]
    lines = [_learned_most(findings)] if findings.domain else []
    lines += [*_controls(findings), *cautions(findings)]
    failed = len(findings.failures)
    if findings.missing == 1:
        lines.append(f"1 run is not done{'; it failed' if failed else ''}.")
    elif findings.missing:
        lines.append(f"{findings.missing} runs are not done{f', of which {failed} failed' if failed else ''}.")
    return lines


def _learned_most(findings: Findings) -> str:
    first, *others = findings.ranked
    sentence = f"{first.name} ends with the lowest loss of the domain, {with_spread(first.domain_loss)} nats per token"
    if others:
        sentence += f"; {others[0].name} follows with {with_spread(others[0].domain_loss)}"
    sentence += f". The base has {mean_loss(findings.base.end, findings.domain):.4f}."
    difference = paired(first.ends, others[0].ends) if others else None
    if difference is None or difference.half_interval is None:
        return sentence
    chance = "which is more than chance of seeds" if difference.is_above_zero else "which may be chance"
    return (
        f"{sentence} With the same seeds these two differ by {difference.mean:.4f} ± {difference.half_interval:.4f} "
        f"(95 %), {chance}."
    )


def _controls(findings: Findings) -> list[str]:
    lines = []
    for variant in findings.variants:
        by_conclusion: dict[str, list[str]] = {}
        for one in findings.verdicts(variant):
            by_conclusion.setdefault(one.conclusion, []).append(one.control)
        for conclusion, verb in (
            ("does not beat it", "does not beat"),
            ("not shown to beat it", "is not shown to beat"),
        ):
            if conclusion in by_conclusion:
                names = by_conclusion[conclusion]
                lines.append(f"{variant} {verb} its null control{'s' * (len(names) > 1)} {', '.join(names)}.")
    return lines


def cautions(findings: Findings) -> list[str]:
    """Return a sentence per reason why variants do not differ in their methods alone.

    The reasons: a single seed, different numbers of tokens or of rates, a best rate at an end of its range, a start that is not the
    base, and a model that is not causal.
    """
    variants = findings.variants.values()
    sentences = []
    single = [variant.name for variant in variants if len(variant.best) == 1]
    if len(single) == len(variants):
        sentences.append("One seed: nothing here says how much of a difference is chance.")
    elif single:
        verb = "has" if len(single) == 1 else "have"
        sentences.append(
            f"{_list(single)} {verb} one seed: nothing says how much of a difference to others is chance."
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
    ends = [f"{variant.name} ({variant.rate})" for variant in variants if variant.is_at_an_end_of_its_rates]
    if ends:
        sentences.append(
            f"At the lowest or highest rate that was tried, and perhaps better beyond it: {', '.join(ends)}."
        )
    elsewhere = [variant.name for variant in variants if variant.starts_elsewhere]
    if elsewhere:
        verb = "was" if len(elsewhere) == 1 else "were"
        sentences.append(
            f"{_list(elsewhere)} {verb} not seen to start at the base: what was learned and forgotten is counted from the base: "
            "what training changed, together with what upscaling had changed."
        )
    ahead = [variant.name for variant in variants if not variant.is_causal]
    if ahead:
        sentences.append(
            f"Not causal: {', '.join(ahead)}. A model that reads tokens before it predicts them has losses that cannot be compared."
        )
    return sentences


def _list(names: Sequence[str]) -> str:
    """Return the names as prose: `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

"""What records of chapters come to: how evenly they are read, how steadily, and which texts each is read for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from midus_hf.analysis.chapters.records import ChapterCounts, ChapterRecords

_MOST_TYPICAL = 5


@dataclass(frozen=True)
class TextReading:
    """What the tokens of a text read in one memory.

    Args:
        tokens: Of the text.
        unguided_share: Share of the tokens whose chapters were chosen by nothing, as those of the first chunk of a row are. They are
            left out of entropy, stability and what texts are told apart by, since all of them read alike.
        read_shares: `[C]`, share of the tokens that read each chapter; 1 for shared ones.
        entropy: Of the router's distribution over routed chapters, in nats, the mean over tokens. None if nothing
            guides any.
        effective_chapters: `exp` of the entropy of how reads are shared among routed chapters: as many chapters, read equally
            often, would be as even.
        dead_chapters: Chapters that no token reads.
        stability_within: Overlap of the chapters of one stretch with those of the next, their common chapters over all of theirs,
            the mean over neighbouring stretches. None if no row has two.
        stability_between: The same of rows of different documents, each chapter weighed by the share of a row's tokens that read
            it. None if there is one document.
        attention_mass: `[C]`, share of attention that goes to each chapter, the mean over query heads and tokens.
        shared_mass: Of shared chapters together.
        routed_mass: Of routed chapters together.
        added_to_attention: Norm of what the memory adds to a token over that of what self-attention adds, the mean over tokens.
        added_to_residual: The same over that of the residual stream that the memory reads.
    """

    tokens: int
    unguided_share: float
    read_shares: list[float]
    entropy: float | None
    effective_chapters: float
    dead_chapters: list[int]
    stability_within: float | None
    stability_between: float | None
    attention_mass: list[float]
    shared_mass: float
    routed_mass: float
    added_to_attention: float
    added_to_residual: float


@dataclass(frozen=True)
class TypicalChapter:
    """A chapter that is read more for one text than for the others.

    Args:
        chapter: Its number.
        read_share: Share of the text's tokens that read it.
        lift: How much more of this text's reads it has than of the mean text's.
    """

    chapter: int
    read_share: float
    lift: float


@dataclass(frozen=True)
class ChapterStats:
    """What was read in one memory of one layer.

    Args:
        layer: Index of the decoder layer.
        memory: Its name.
        chapters: C, shared ones included.
        shared_chapters: S.
        k: Chapters that the router chooses.
        greatest_entropy: That the router's could be, log (C - S).
        texts: By name.
        overall: Of all tokens of all texts.
        mutual_information: Between the text and the routed chapter that is read, in nats, where every text weighs the same. None
            for one text, or if a text has no token whose chapters were chosen by something.
        greatest_information: That it could be, the logarithm of the number of texts. None for one text.
        lifts: For each text, `[C - S]`, how much more of its reads each routed chapter has than of the mean text's. None where no
            text reads it. Empty where `mutual_information` is None.
        typical: For each text its most typical chapters, those that add most to the information first.
    """

    layer: int
    memory: str
    chapters: int
    shared_chapters: int
    k: int
    greatest_entropy: float
    texts: dict[str, TextReading]
    overall: TextReading
    mutual_information: float | None
    greatest_information: float | None
    lifts: dict[str, list[float | None]]
    typical: dict[str, list[TypicalChapter]]


def chapter_stats(records: ChapterRecords) -> list[ChapterStats]:
    """What records come to, by layer.

    Args:
        records: Of texts that have been read.
    """
    places = sorted({place for of_text in records.counts.values() for place in of_text})
    return [
        _of_memory(*place, {text: of_text[place] for text, of_text in records.counts.items() if place in of_text})
        for place in places
    ]


def _of_memory(layer: int, memory: str, counts: Mapping[str, ChapterCounts]) -> ChapterStats:
    first = next(iter(counts.values()))
    shared = first.num_shared
    information, lifts, typical = _specialisation(counts)
    return ChapterStats(
        layer=layer,
        memory=memory,
        chapters=len(first.reads),
        shared_chapters=shared,
        k=first.k,
        greatest_entropy=math.log(len(first.reads) - shared),
        texts={text: _of_text(of_text) for text, of_text in counts.items()},
        overall=_of_text(ChapterCounts.total(list(counts.values()))),
        mutual_information=information,
        greatest_information=math.log(len(counts)) if len(counts) > 1 else None,
        lifts=lifts,
        typical=typical,
    )


def _of_text(counts: ChapterCounts) -> TextReading:
    sums = {name: value.item() for name, value in counts.sums.items()}
    tokens = sums["tokens"]
    routed = _shares(counts.reads, counts.num_shared)
    mass = (counts.mass / tokens).cpu()
    return TextReading(
        tokens=round(tokens),
        unguided_share=sums["unguided"] / tokens,
        read_shares=(counts.reads / tokens).tolist(),
        entropy=_mean(sums["entropy"], tokens - sums["unguided"]),
        effective_chapters=torch.special.entr(routed).sum().exp().item(),
        dead_chapters=(counts.reads == 0).nonzero().flatten().tolist(),
        stability_within=_mean(sums["within"], sums["pairs_within"]),
        stability_between=_mean(sums["between"], sums["pairs_between"]),
        attention_mass=mass.tolist(),
        shared_mass=mass[: counts.num_shared].sum().item(),
        routed_mass=mass[counts.num_shared :].sum().item(),
        added_to_attention=sums["to_attention"] / tokens,
        added_to_residual=sums["to_residual"] / tokens,
    )


def _specialisation(
    counts: Mapping[str, ChapterCounts],
) -> tuple[float | None, dict[str, list[float | None]], dict[str, list[TypicalChapter]]]:
    """Mutual information between text and routed chapter, lifts, and what is typical of each text."""
    if len(counts) < 2 or not all(of_text.guided_reads.any() for of_text in counts.values()):
        return None, {}, {}
    shares_of_texts = [_shares(of_text.guided_reads, of_text.num_shared) for of_text in counts.values()]
    given_text = torch.stack(shares_of_texts)  # [N, C - S]
    lift = given_text / given_text.mean(0).clamp(min=torch.finfo(torch.float64).tiny)
    information = torch.special.xlogy(given_text, lift)  # [N, C - S]
    typical = {}
    for (text, of_text), of_chapters, lifts in zip(counts.items(), information, lift, strict=True):
        best = of_chapters.topk(min(_MOST_TYPICAL, len(of_chapters)))
        shares = (of_text.reads / of_text.sums["tokens"]).cpu()
        typical[text] = [
            TypicalChapter(
                routed + of_text.num_shared, shares[routed + of_text.num_shared].item(), lifts[routed].item()
            )
            for value, routed in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            if value > 0
        ]
    is_read = given_text.any(0).tolist()
    told = {
        text: [value if known else None for value, known in zip(of_text, is_read, strict=True)]
        for text, of_text in zip(counts, lift.tolist(), strict=True)
    }
    return max(0.0, information.sum(1).mean().item()), told, typical


def _shares(reads: torch.Tensor, num_shared: int) -> torch.Tensor:
    """Share of the reads of routed chapters that each has, `[C - S]`, on the CPU."""
    routed = reads[num_shared:].cpu()
    return routed / routed.sum()


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None

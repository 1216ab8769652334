"""Statistics of records of chapters: how evenly and how steadily chapters are read, and by which texts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from midus_hf.analysis.chapters.records import ChapterCounts, ChapterRecords

_MOST_TYPICAL = 5


@dataclass(frozen=True)
class TextReading:
    """Statistics of what the tokens of a text read in one memory.

    Args:
        tokens: Number of tokens of the text.
        unguided_share: Share of unguided tokens, for which the router has nothing to choose by, as in the first chunk of a row.
            Unguided tokens all read alike, so entropy, stability and the comparison of texts leave them out.
        read_shares: Share of tokens that read each chapter, `[C]`; 1 for shared chapters.
        entropy: Entropy of the router's distribution over routed chapters, in nats, averaged over guided tokens. None if no
            token is guided.
        effective_chapters: `exp` of the entropy of the reads' distribution over routed chapters: so many chapters, read
            equally often, would give the same entropy.
        dead_chapters: Chapters that no token reads.
        stability_within: Overlap of the chapters of neighbouring stretches (chapters in both over chapters in either), averaged
            over pairs. A stretch is a run of tokens that are routed together. None if no row has two guided stretches.
        stability_between: Overlap of the chapters of consecutive rows of different documents, each chapter weighed by the share
            of a row's tokens that read the chapter, averaged over pairs. None if there is only one document.
        attention_mass: Share of attention that goes to each chapter, `[C]`, averaged over query heads and tokens.
        shared_mass: Share of attention that goes to all shared chapters together.
        routed_mass: Share of attention that goes to all routed chapters together.
        added_to_attention: Norm of the memory's output over the norm of self-attention's output, averaged over tokens.
        added_to_residual: Norm of the memory's output over the norm of the residual stream that the memory reads, averaged over
            tokens.
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
    """A chapter that one text reads more than the other texts do.

    Args:
        chapter: Number of the chapter, from 0.
        read_share: Share of the text's tokens that read the chapter.
        lift: The chapter's share of this text's reads, divided by the mean of that share over all texts.
    """

    chapter: int
    read_share: float
    lift: float


@dataclass(frozen=True)
class ChapterStats:
    """Statistics of one memory in one layer.

    Args:
        layer: Index of the decoder layer.
        memory: Name of the memory.
        chapters: C, the number of chapters, including shared chapters.
        shared_chapters: S, the number of shared chapters.
        k: Number of routed chapters that the router chooses.
        greatest_entropy: Greatest possible entropy of the router, log (C - S), in nats.
        texts: Statistics of each text, by the text's name.
        overall: Statistics over all tokens of all texts.
        mutual_information: Mutual information of the text and the routed chapter that is read, in nats; all texts weigh the
            same. None for a single text, or if a text has no guided tokens.
        greatest_information: Greatest possible mutual information, the logarithm of the number of texts. None for a single text.
        lifts: For each text, the lift of each routed chapter, `[C - S]`: the chapter's share of the text's reads, divided by the
            mean of that share over all texts. None for a chapter that no text reads. Empty if `mutual_information` is None.
        typical: For each text, at most 5 typical chapters, in descending order of what they add to the mutual information.
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
    """Return the statistics of each memory in each layer, in the order of layers, from records of texts that a model read."""
    places = sorted({key for of_text in records.counts.values() for key in of_text})
    return [
        _of_memory(*key, {text: of_text[key] for text, of_text in records.counts.items() if key in of_text})
        for key in places
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
    """Return the mutual information of text and routed chapter, and the lifts and typical chapters of each text."""
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
    lifts_of_texts = {
        text: [value if known else None for value, known in zip(of_text, is_read, strict=True)]
        for text, of_text in zip(counts, lift.tolist(), strict=True)
    }
    return max(0.0, information.sum(1).mean().item()), lifts_of_texts, typical


def _shares(reads: torch.Tensor, num_shared: int) -> torch.Tensor:
    """Return each routed chapter's share of all reads of routed chapters, `[C - S]`, on the CPU."""
    routed = reads[num_shared:].cpu()
    return routed / routed.sum()


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None

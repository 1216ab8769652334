"""What texts lose without a chapter: a map of causes, where shares of reads are one of correlations."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from midus_hf.analysis.chapters.edits import swap_chapters, zero_chapters
from midus_hf.analysis.chapters.interventions import close_chapters, hosts_of, swap_in_layers, zero_in_layers
from midus_hf.analysis.chapters.records import ChapterRecords, record_chapters
from midus_hf.analysis.inside.loss_effects import Effect, effect_between
from midus_hf.analysis.text_rows import TextRows, adding, read_rows
from midus_hf.analysis.watched_models import MemoryPlace

Mode = Literal["zero", "swap-random", "drop"]


@dataclass(frozen=True)
class AblatedChapter:
    """What a model loses without one chapter.

    Args:
        chapter: Its number.
        read_share: Share of the tokens of all texts that read it, the mean over the layers that are changed.
        swapped_with: The chapter that stood in its place, where mode is `swap-random`.
        effects: By text.
    """

    chapter: int
    read_share: float
    swapped_with: int | None
    effects: dict[str, Effect]


@dataclass(frozen=True)
class Ablation:
    """What a model loses without each of some chapters.

    Args:
        mode: What was done to them.
        memory: Name of the memory.
        layers: That were changed.
        losses: Of each text as the model is, in nats per predicted token.
        tokens: That were predicted of each text.
        chapters: In the order of their numbers.
    """

    mode: Mode
    memory: str
    layers: list[int]
    losses: dict[str, float]
    tokens: dict[str, int]
    chapters: list[AblatedChapter]


def ablate(
    model: PreTrainedModel,
    texts: Sequence[TextRows],
    *,
    chapters: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    mode: Mode = "zero",
    top: int | None = None,
    memory: str | None = None,
    batch_size: int = 4,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Ablation:
    """Measure the loss on texts without each chapter, one after another, and compare it with the loss as it is.

    A chapter that no token reads in the layers that are changed is not tried where that cannot change anything: the effect is
    exactly 0.

    Args:
        model: Put in eval mode for the while; parameters are as before afterwards.
        texts: From `text_rows`.
        chapters: Numbers of those that are tried. Default: all, but for `drop` the routed ones.
        layers: Indices of the layers that do without. Default: all that read chapters.
        mode: `zero` puts zeros in the place of its rows, `swap-random` exchanges its rows with those of another chapter of its kind,
            and `drop` lets routers open the next best one. Default: `"zero"`.
        top: Try the so many most read ones of them alone. Default: all.
        memory: Name of one of several memories of chapters. Default: the only one.
        batch_size: Rows per forward pass. Default: 4.
        seed: Of the choice for `swap-random`. Default: 0.
        progress: Called with the tokens read so far, and of all. Default: none.

    Raises:
        ValueError: As `hosts_of` and `close_chapters`; if the mode is unknown, `top` is less than 1, or a chapter has none to be
            swapped with.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; expected one of: {', '.join(get_args(Mode))}.")
    if top is not None and top < 1:
        raise ValueError(f"top is {top}; expected at least 1.")
    hosts = hosts_of(model, chapters or (), layers, memory)
    changed = [hosted.layer for hosted in hosts]
    name, module = hosts[0].name, hosts[0].module
    num_shared, num_chapters = module.num_shared, module.num_chapters
    if chapters is None:
        chapters = range(num_shared if mode == "drop" else 0, num_chapters)
    partners = _partners(chapters, num_shared, num_chapters, seed) if mode == "swap-random" else {}

    def intervention(chapter: int) -> contextlib.AbstractContextManager[None]:
        if mode == "drop":
            return close_chapters(model, [chapter], layers=changed, memory=name)
        if mode == "zero" and layers is None:
            return zero_chapters(model, [chapter], memory=name)
        if mode == "zero":
            return zero_in_layers(model, chapter, changed, memory=name)
        if layers is None:
            return swap_chapters(model, chapter, partners[chapter], memory=name)
        return swap_in_layers(model, chapter, partners[chapter], changed, memory=name)

    if chapters:
        with intervention(chapters[0]):  # what is refused is refused before anything is measured
            pass
    tokens_each = sum(text.num_tokens for text in texts)
    told = adding(progress, tokens_each * (1 + min(len(chapters), top or len(chapters))))
    with record_chapters(model, name) as records:
        usual = {
            text.name: read_rows(model, text, batch_size=batch_size, records=records, progress=told) for text in texts
        }
    shares = _read_shares(records, name, changed)
    most_read = sorted(chapters, key=lambda chapter: -shares[chapter])[:top]
    ablated = []
    for chapter in sorted(most_read):
        if shares[chapter] == 0 and (mode != "swap-random" or shares[partners[chapter]] == 0):
            effects = {text.name: Effect(0.0, 0.0 if len(text.rows) > 1 else None) for text in texts}
            told(tokens_each)
        else:
            with intervention(chapter):
                effects = {
                    text.name: effect_between(
                        usual[text.name], read_rows(model, text, batch_size=batch_size, progress=told)
                    )
                    for text in texts
                }
        ablated.append(AblatedChapter(chapter, shares[chapter], partners.get(chapter), effects))
    return Ablation(
        mode,
        name,
        changed,
        {text: losses.mean for text, losses in usual.items()},
        {text: int(losses.tokens.sum()) for text, losses in usual.items()},
        ablated,
    )


def _partners(chapters: Sequence[int], num_shared: int, num_chapters: int, seed: int) -> dict[int, int]:
    """For each chapter another one, shared or routed as it is."""
    choice = random.Random(seed)
    partners = {}
    for chapter in chapters:
        kind = range(num_shared) if chapter < num_shared else range(num_shared, num_chapters)
        others = [number for number in kind if number != chapter]
        if not others:
            raise ValueError(
                f"chapter {chapter} is the only one of its kind, shared or routed; expected another to swap it with. Leave it out, "
                "or choose mode zero."
            )
        partners[chapter] = choice.choice(others)
    return partners


def _read_shares(records: ChapterRecords, name: str, layers: Sequence[int]) -> list[float]:
    """Share of the tokens of all texts that read each chapter, the mean over layers."""
    counts = [of_text[MemoryPlace(layer, name)] for of_text in records.counts.values() for layer in layers]
    reads = torch.stack([of_place.reads.cpu() for of_place in counts]).sum(0)
    return (reads / torch.stack([of_place.sums["tokens"].cpu() for of_place in counts]).sum()).tolist()

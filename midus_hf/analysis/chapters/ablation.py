"""Ablation: the loss of texts without a chapter. Ablation shows causes, while the share of reads shows correlations only."""

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from midus_hf.analysis.chapters.edits import hosts_of, swap_chapters, zero_chapters
from midus_hf.analysis.chapters.interventions import close_chapters, swap_in_layers, zero_in_layers
from midus_hf.analysis.chapters.records import ChapterRecords, record_chapters
from midus_hf.analysis.text_rows import Effect, TextRows, adding, effect_between, read_rows
from midus_hf.analysis.watched_models import MemoryPlace

Mode = Literal["zero", "swap-random", "drop"]


@dataclass(frozen=True)
class AblatedChapter:
    """Change of the loss when one chapter is ablated.

    Args:
        chapter: Number of the chapter, from 0.
        read_share: Share of the tokens of all texts that read the chapter, averaged over the changed layers.
        swapped_with: Number of the chapter that took its place in mode `swap-random`; None in other modes.
        effects: Change of the loss of each text, by the text's name.
    """

    chapter: int
    read_share: float
    swapped_with: int | None
    effects: dict[str, Effect]


@dataclass(frozen=True)
class Ablation:
    """Losses of texts without each of several chapters.

    Args:
        mode: Kind of change that was made to the chapters.
        memory: Name of the memory.
        layers: Indices of the changed layers.
        losses: Loss of each text with the unchanged model, in nats per predicted token.
        tokens: Number of predicted tokens of each text.
        chapters: Results per chapter, in ascending order of the chapters' numbers.
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
    """Measure the loss of texts without each chapter, one chapter at a time, and compare it with the unchanged model's loss.

    If no token reads a chapter in the changed layers, the ablation cannot change anything: the effect is set to exactly 0
    without a measurement. In mode `swap-random` this requires that no token reads the chapter's partner either.

    Args:
        model: A causal language model with chapters. It is in eval mode during the measurement; its parameters are restored.
        texts: Texts, as `text_rows` returns them.
        chapters: Numbers of the chapters to ablate. Default: all chapters; in mode `drop`, all routed chapters.
        layers: Indices of the layers to change. Default: all layers that read chapters.
        mode: `zero` replaces a chapter's rows by zeros, `swap-random` exchanges the rows with a random chapter of the same kind
            (shared or routed), and `drop` makes routers open the next best chapter. Default: `"zero"`.
        top: Ablate only this number of `chapters`, the most read ones. Default: all.
        memory: Name of the memory, if the model has several memories of chapters. Default: the only one.
        batch_size: Rows per forward pass. Default: 4.
        seed: Seed of the random choice in mode `swap-random`. Default: 0.
        progress: Called with the number of tokens read so far and the total number. Default: none.

    Raises:
        ValueError: For the reasons of `hosts_of`, `zero_chapters` and `close_chapters`; if the mode is unknown, if `top` is less
            than 1, or if there is no chapter of the same kind to swap a chapter with.
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
        with intervention(chapters[0]):  # raises for a bad request before anything is measured
            pass
    tokens_each = sum(text.num_tokens for text in texts)
    advance = adding(progress, tokens_each * (1 + min(len(chapters), top or len(chapters))))
    with record_chapters(model, name) as records:
        usual = {
            text.name: read_rows(model, text, batch_size=batch_size, records=records, progress=advance)
            for text in texts
        }
    shares = _read_shares(records, name, changed)
    most_read = sorted(chapters, key=lambda chapter: -shares[chapter])[:top]
    ablated = []
    for chapter in sorted(most_read):
        if shares[chapter] == 0 and (mode != "swap-random" or shares[partners[chapter]] == 0):
            effects = {text.name: Effect(0.0, 0.0 if len(text.rows) > 1 else None) for text in texts}
            advance(tokens_each)
        else:
            with intervention(chapter):
                effects = {
                    text.name: effect_between(
                        usual[text.name], read_rows(model, text, batch_size=batch_size, progress=advance)
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
    """Choose for each chapter another chapter of the same kind, shared or routed."""
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
    """Return the share of the tokens of all texts that read each chapter, averaged over layers."""
    counts = [of_text[MemoryPlace(layer, name)] for of_text in records.counts.values() for layer in layers]
    reads = torch.stack([of_place.reads.cpu() for of_place in counts]).sum(0)
    return (reads / torch.stack([of_place.sums["tokens"].cpu() for of_place in counts]).sum()).tolist()

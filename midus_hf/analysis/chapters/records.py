"""What the tokens of texts read of chapters, recorded while a model reads these texts."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.chapters.memories import memories_of_chapters
from midus_hf.analysis.watched_models import HostedMemory, MemoryPlace, held_hooks
from midus_hf.memory.routing.pooling import Routing
from midus_hf.ops.dispatch.private_torch import is_in_backward


class ChapterCounts:
    """What the tokens of one text read in one memory: sums over tokens, float64.

    Args:
        num_chapters: C, shared ones included.
        num_shared: S.
        device: Where the memory computes.
    """

    SUMS = (
        "tokens",
        "unguided",  # tokens whose chapters were chosen by nothing, as those of the first chunk are
        "entropy",  # of the router, over the other tokens
        "within", "pairs_within",  # overlap of neighbouring stretches, and how many were compared
        "between", "pairs_between",  # overlap of rows of different documents, likewise
        "to_attention", "to_residual",  # norm of what is added, relative to what attention adds and to what is read
    )  # fmt: skip

    def __init__(self, num_chapters: int, num_shared: int, device: torch.device):
        self.num_shared, self.k = num_shared, 0
        self.reads = torch.zeros(num_chapters, dtype=torch.float64, device=device)
        self.guided_reads = torch.zeros_like(self.reads)  # where there was something to choose by
        self.mass = torch.zeros_like(self.reads)
        self.sums = {name: self.reads.new_zeros(()) for name in self.SUMS}
        self._last_row: tuple[int, torch.Tensor] | None = None

    @classmethod
    def total(cls, parts: Sequence["ChapterCounts"]) -> "ChapterCounts":
        """The counts of several texts, added up."""
        whole = cls(len(parts[0].reads), parts[0].num_shared, parts[0].reads.device)
        for part in parts:
            whole.k = part.k
            whole.reads += part.reads
            whole.guided_reads += part.guided_reads
            whole.mass += part.mass
            for name in cls.SUMS:
                whole.sums[name] += part.sums[name]
        return whole

    def add_routing(self, routing: Routing, documents: Sequence[int], real: torch.Tensor | None) -> None:
        """Add which chapters the tokens of a batch read.

        Args:
            routing: Of the batch.
            documents: The document of each row.
            real: `[B, T]`, false for padding. Default: no token is padding.
        """
        of_token = routing.pooled.stretches.of_token  # [B, T]
        tokens = torch.ones_like(of_token, dtype=torch.float64) if real is None else real.double()
        self.k = routing.chosen.shape[-1]
        guided = tokens * routing.pooled.states.any(-1)[of_token]
        rows = self._reads_of_rows(routing.chosen[of_token], guided)
        self.reads += self._reads_of_rows(routing.chosen[of_token], tokens).sum(0)
        self.guided_reads += rows.sum(0)
        self.sums["tokens"] += tokens.sum()
        self.sums["unguided"] += (tokens - guided).sum()
        chances = routing.logits[:, self.num_shared :].double().softmax(-1)
        self.sums["entropy"] += (torch.special.entr(chances).sum(-1)[of_token] * guided).sum()
        self._compare_stretches(routing.chosen, of_token, guided)
        self._compare_rows(rows / guided.sum(1, keepdim=True).clamp(min=1), documents)

    def add_mass(self, chapters: torch.Tensor, mass: torch.Tensor, real: torch.Tensor | None) -> None:
        """Add how attention is shared among chapters.

        Args:
            chapters: `[B, T, n]`, that each token reads.
            mass: `[B, T, n]`, of each token.
            real: `[B, T]`, false for padding. Default: no token is padding.
        """
        wide = mass.double() if real is None else mass.double() * real.unsqueeze(-1)
        self.mass.scatter_add_(0, chapters.flatten(), wide.flatten())

    def add_norms(
        self, added: torch.Tensor, attention: torch.Tensor, read: torch.Tensor, real: torch.Tensor | None
    ) -> None:
        """Add how long what the memory adds is, relative to what attention adds and to what is read, all `[B, T, D]`."""
        norms = added.double().norm(dim=-1)
        for name, other in (("to_attention", attention), ("to_residual", read)):
            ratio = norms / other.double().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            self.sums[name] += (ratio if real is None else ratio * real).sum()

    def _reads_of_rows(self, chosen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """How many tokens `[B, T]`, of which each reads chapters `[B, T, k]`, read each chapter, `[B, C]`, by row."""
        rows = self.reads.new_zeros(len(tokens), len(self.reads))
        rows.scatter_add_(1, chosen.flatten(1), tokens.repeat_interleave(self.k, dim=1))
        rows[:, : self.num_shared] = tokens.sum(1, keepdim=True)
        return rows

    def _compare_stretches(self, chosen: torch.Tensor, of_token: torch.Tensor, guided: torch.Tensor) -> None:
        """Compare the chapters `[N, k]` of stretches that follow each other, where guided tokens `[B, T]` of two do."""
        follows = (of_token[:, 1:] != of_token[:, :-1]) & (guided[:, 1:] > 0) & (guided[:, :-1] > 0)
        before, behind = chosen[of_token[:, :-1][follows]], chosen[of_token[:, 1:][follows]]  # [P, k]
        same = (behind[:, :, None] == before[:, None, :]).any(-1).sum(-1).double()
        self.sums["within"] += (same / (2 * self.k - same)).sum()
        self.sums["pairs_within"] += len(same)

    def _compare_rows(self, shares: torch.Tensor, documents: Sequence[int]) -> None:
        """Compare the share of tokens `[B, C]` that read each chapter with that of the row before; a row of zeros has none."""
        for document, row in zip(documents, shares[:, self.num_shared :], strict=True):
            if self._last_row is not None and self._last_row[0] != document:
                before = self._last_row[1]
                both = row.any() & before.any()
                overlap = torch.minimum(row, before).sum() / torch.maximum(row, before).sum().clamp(min=1)
                self.sums["between"] += overlap * both
                self.sums["pairs_between"] += both
            self._last_row = (document, row)


class ChapterRecords:
    """What was recorded, by text and place.

    Args:
        found: The memories that are recorded.
    """

    def __init__(self, found: Sequence[HostedMemory]):
        self._found = {hosted.place: hosted for hosted in found}
        self.counts: dict[str, dict[MemoryPlace, ChapterCounts]] = {}
        self._reading: tuple[str, Sequence[int]] = ("", ())

    def begin(self, text: str, documents: Sequence[int]) -> None:
        """Say what the next forward pass reads.

        Args:
            text: Its name.
            documents: The document of each row of the batch.
        """
        self._reading = (text, documents)

    def at(self, place: MemoryPlace) -> tuple[ChapterCounts, Sequence[int]]:
        """The counts of a memory for the text that is read now, and the document of each row of the batch."""
        text, documents = self._reading
        of_text = self.counts.setdefault(text, {})
        if place not in of_text:
            hosted = self._found[place]
            device = next(hosted.memory.parameters()).device
            of_text[place] = ChapterCounts(hosted.module.num_chapters, hosted.module.num_shared, device)
        return of_text[place], documents


@contextlib.contextmanager
def record_chapters(model: nn.Module, memory: str | None = None) -> Iterator[ChapterRecords]:
    """Record, while the context is open, which chapters each memory of a model reads, and how attention is shared among them.

    Routing and the scores of attention are computed a second time beside the forward pass, which gives what it gave before.
    Code that `torch.compile` has made runs uncompiled while the context is open. Before each pass `ChapterRecords.begin` says
    what it reads.

    Args:
        model: As for `memories_of_chapters`. Its memories and attentions have hooks more while the context is open.
        memory: Name of one of several memories of chapters. Default: all.

    Raises:
        ValueError: As `memories_of_chapters`.
    """
    found = memories_of_chapters(model, memory)
    records = ChapterRecords(found)
    with held_hooks() as hold:
        for hosted in found:
            attention: list[torch.Tensor] = []
            hold(_behind_attention(hosted.block).register_forward_hook(_keeper(attention)))
            before, behind = _recorder(records, hosted.place, attention)
            for module in hosted.modules:
                hold(module.register_forward_pre_hook(before, with_kwargs=True))
                hold(module.register_forward_hook(behind, with_kwargs=True))
        yield records


def _behind_attention(block: Any) -> nn.Module:
    """The module that gives what attention adds to the residual stream."""
    norm = block.attention_output_norm
    return block.self_attn if norm is None else getattr(block, norm)


def _keeper(kept: list[torch.Tensor]) -> Callable[..., None]:
    """A forward hook that keeps what a module has just given."""

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        kept[:] = [(output[0] if isinstance(output, tuple) else output).detach()]

    return keep


def _recorder(
    records: ChapterRecords, place: MemoryPlace, attention: Sequence[torch.Tensor]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks before and behind a memory's forward. Routing is found before it, since the pass changes the state of a cache."""
    routings: list[Routing] = []

    def before(memory: Any, arguments: tuple[torch.Tensor, ...], given: dict[str, Any]) -> None:
        routing = routing_of(memory, arguments, given)
        routings[:] = [] if routing is None else [routing]

    def behind(memory: Any, arguments: tuple[torch.Tensor, ...], given: dict[str, Any], output: torch.Tensor) -> None:
        if not routings:
            return
        read, routing = arguments[0], routings.pop()
        real = None if given.get("tokens") is None else given["tokens"].real
        counts, documents = records.at(place)
        with torch.no_grad():
            counts.add_routing(routing, documents, real)
            chapters, mass = memory.attention_mass(read, routing, tables=given.get("tables"))
            counts.add_mass(chapters, mass, real)
            counts.add_norms(output, attention[0].to(output.device), read, real)

    return before, behind


@torch.no_grad()
def routing_of(memory: Any, arguments: tuple[torch.Tensor, ...], given: Mapping[str, Any]) -> Routing | None:
    """Return which chapters a memory opens in a pass; None where a pass repeats another for the backward pass, or reads no token.

    Args:
        memory: Of chapters.
        arguments: Of its forward pass.
        given: Of its forward pass, by keyword.
    """
    if is_in_backward() or not arguments[0].numel():
        return None
    return memory.route(arguments[0], **{name: given.get(name) for name in ("tokens", "state", "prompt_mask")})

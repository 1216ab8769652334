"""Records and counts of which chapters the tokens of texts read, taken while a model reads the texts."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.chapters.edits import memories_of_chapters
from midus_hf.analysis.slots.usage import Usage
from midus_hf.analysis.watched_models import HostedMemory, MemoryPlace, held_hooks
from midus_hf.memory.routing.pooling import Routing
from midus_hf.ops.dispatch.private_torch import is_in_backward


class ChapterCounts:
    """Sums over the reads of one text's tokens in one memory with C chapters, of which the first S are shared, float64."""

    SUMS = (
        "tokens",
        "unguided",  # tokens whose router input is zero, as in the first chunk
        "entropy",  # of the router, summed over guided tokens
        "within", "pairs_within",  # overlap of neighbouring stretches, and the number of pairs
        "between", "pairs_between",  # overlap of rows of different documents, and the number of pairs
        "to_attention", "to_residual",  # norm of the memory's output over the norms of attention's output and of the memory's input
    )  # fmt: skip

    def __init__(self, num_chapters: int, num_shared: int, device: torch.device):
        self.num_shared, self.k = num_shared, 0
        self.reads = torch.zeros(num_chapters, dtype=torch.float64, device=device)
        self.guided_reads = torch.zeros_like(self.reads)  # reads of guided tokens only
        self.mass = torch.zeros_like(self.reads)
        self.sums = {name: self.reads.new_zeros(()) for name in self.SUMS}
        self._last_row: tuple[int, torch.Tensor] | None = None

    @classmethod
    def total(cls, parts: Sequence["ChapterCounts"]) -> "ChapterCounts":
        """Return the sum of the counts of several texts."""
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
        """Add the chapters that the tokens of a batch read.

        Args:
            routing: Routing of the batch.
            documents: Number of the document that each row belongs to.
            real: `[B, T]`, false for padding. None: no token is padding.
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
        """Add the shares of each token's attention that the chapters that the token reads get, both `[B, T, n]`."""
        wide = mass.double() if real is None else mass.double() * real.unsqueeze(-1)
        self.mass.scatter_add_(0, chapters.flatten(), wide.flatten())

    def add_norms(
        self, added: torch.Tensor, attention: torch.Tensor, read: torch.Tensor, real: torch.Tensor | None
    ) -> None:
        """Add the norm of the memory's output over the norms of attention's output and of the memory's input, `[B, T, D]`."""
        norms = added.double().norm(dim=-1)
        for name, other in (("to_attention", attention), ("to_residual", read)):
            ratio = norms / other.double().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
            self.sums[name] += (ratio if real is None else ratio * real).sum()

    def _reads_of_rows(self, chosen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the number of tokens per row that read each chapter, `[B, C]`; `chosen` is `[B, T, k]`, `tokens` `[B, T]`."""
        rows = self.reads.new_zeros(len(tokens), len(self.reads))
        rows.scatter_add_(1, chosen.flatten(1), tokens.repeat_interleave(self.k, dim=1))
        rows[:, : self.num_shared] = tokens.sum(1, keepdim=True)
        return rows

    def _compare_stretches(self, chosen: torch.Tensor, of_token: torch.Tensor, guided: torch.Tensor) -> None:
        """Compare the chapters `[N, k]` of neighbouring stretches, if the tokens `[B, T]` at their border are guided."""
        follows = (of_token[:, 1:] != of_token[:, :-1]) & (guided[:, 1:] > 0) & (guided[:, :-1] > 0)
        before, behind = chosen[of_token[:, :-1][follows]], chosen[of_token[:, 1:][follows]]  # [P, k]
        same = (behind[:, :, None] == before[:, None, :]).any(-1).sum(-1).double()
        self.sums["within"] += (same / (2 * self.k - same)).sum()
        self.sums["pairs_within"] += len(same)

    def _compare_rows(self, shares: torch.Tensor, documents: Sequence[int]) -> None:
        """Compare each row's shares `[B, C]` with the previous row's, if the documents differ and neither row is all zeros."""
        for document, row in zip(documents, shares[:, self.num_shared :], strict=True):
            if self._last_row is not None and self._last_row[0] != document:
                before = self._last_row[1]
                both = row.any() & before.any()
                overlap = torch.minimum(row, before).sum() / torch.maximum(row, before).sum().clamp(min=1)
                self.sums["between"] += overlap * both
                self.sums["pairs_between"] += both
            self._last_row = (document, row)


class ChapterRecords:
    """Counts of reads of some memories, per text and per place of a memory."""

    def __init__(self, hosts: Sequence[HostedMemory]):
        self._hosts = {hosted.place: hosted for hosted in hosts}
        self.counts: dict[str, dict[MemoryPlace, ChapterCounts]] = {}
        self._reading: tuple[str, Sequence[int]] = ("", ())

    def begin(self, text: str, documents: Sequence[int]) -> None:
        """Announce the name of the text that the next forward pass reads, and the number of the document of each row."""
        self._reading = (text, documents)

    def at(self, memory_place: MemoryPlace) -> tuple[ChapterCounts, Sequence[int]]:
        """Return a memory's counts for the text that is being read, and the document of each row of the batch."""
        text, documents = self._reading
        of_text = self.counts.setdefault(text, {})
        if memory_place not in of_text:
            hosted = self._hosts[memory_place]
            device = next(hosted.memory.parameters()).device
            of_text[memory_place] = ChapterCounts(hosted.module.num_chapters, hosted.module.num_shared, device)
        return of_text[memory_place], documents


@contextlib.contextmanager
def record_chapters(model: nn.Module, memory: str | None = None) -> Iterator[ChapterRecords]:
    """Record, while the context is open, which chapters each memory reads and how attention is shared among them.

    Call `ChapterRecords.begin` before each forward pass to announce what the pass reads. Routing and attention scores are
    computed a second time for the record; the output of the forward pass does not change. Compiled models run uncompiled while
    the context is open.

    Args:
        model: A model as in `memories_of_chapters`. Its memories and attention modules have additional hooks while the context
            is open.
        memory: Name of the memory. Default: memories of all names.

    Raises:
        ValueError: For the reasons of `memories_of_chapters`.
    """
    hosts = memories_of_chapters(model, memory)
    records = ChapterRecords(hosts)
    with held_hooks() as hold:
        for hosted in hosts:
            attention: list[torch.Tensor] = []
            hold(_behind_attention(hosted.block).register_forward_hook(_keeper(attention)))
            before, behind = _recorder(records, hosted.place, attention)
            for module in hosted.modules:
                hold(module.register_forward_pre_hook(before, with_kwargs=True))
                hold(module.register_forward_hook(behind, with_kwargs=True))
        yield records


def _behind_attention(block: Any) -> nn.Module:
    """Return the module whose output is what attention adds to the residual stream."""
    norm = block.attention_output_norm
    return block.self_attn if norm is None else getattr(block, norm)


def _keeper(kept: list[torch.Tensor]) -> Callable[..., None]:
    """Return a forward hook that keeps a module's latest output."""

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        kept[:] = [(output[0] if isinstance(output, tuple) else output).detach()]

    return keep


def _recorder(
    records: ChapterRecords, memory_place: MemoryPlace, attention: Sequence[torch.Tensor]
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return a pre-hook and a hook for a memory. The pre-hook routes, since the forward pass changes the state of the cache."""
    routings: list[Routing] = []

    def before(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        routing = _routing_of(memory, arguments, kwargs)
        routings[:] = [] if routing is None else [routing]

    def behind(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        if not routings:
            return
        read, routing = arguments[0], routings.pop()
        real = None if kwargs.get("tokens") is None else kwargs["tokens"].real
        counts, documents = records.at(memory_place)
        with torch.no_grad():
            counts.add_routing(routing, documents, real)
            chapters, mass = memory.attention_mass(read, routing, tables=kwargs.get("tables"))
            counts.add_mass(chapters, mass, real)
            counts.add_norms(output, attention[0].to(output.device), read, real)

    return before, behind


@contextlib.contextmanager
def record_chapter_usage(model: nn.Module) -> Iterator[Usage]:
    """Count, while the context is open, how many tokens open each routed chapter of each memory.

    Padding is not counted. Shared chapters are left out, since every token reads them. Routing is computed a second time for the
    count. While the context is open, compiled models run uncompiled, this one and all others.

    Args:
        model: A model as in `memories_of_chapters`. Its memories have an additional hook while the context is open.

    Raises:
        ValueError: For the reasons of `memories_of_chapters`.
    """
    hosts = memories_of_chapters(model)
    usage = Usage(
        {
            hosted.place: torch.zeros(
                1,
                hosted.module.num_chapters - hosted.module.num_shared,
                dtype=torch.int64,
                device=next(hosted.memory.parameters()).device,
            )
            for hosted in hosts
        }
    )
    with held_hooks() as hold:
        for hosted in hosts:
            for module in hosted.modules:
                hook = _counter(usage.counts[hosted.place][0], hosted.module.num_shared)
                hold(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield usage


def _counter(counts: torch.Tensor, num_shared: int) -> Any:
    """Return a pre-hook that counts opened chapters. It runs before the forward pass changes the state that routing reads."""

    def count(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        routing = _routing_of(memory, arguments, kwargs)
        if routing is not None:
            tokens = routing.pooled.counts.to(torch.int64).unsqueeze(-1).expand_as(routing.chosen)  # [B, U, k]
            counts.scatter_add_(0, (routing.chosen - num_shared).flatten().to(counts.device), tokens.flatten())

    return count


@torch.no_grad()
def _routing_of(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> Routing | None:
    """Return the routing of a memory's forward pass; None for a pass without tokens, or repeated by activation checkpointing."""
    if is_in_backward() or not arguments[0].numel():
        return None
    return memory.route(arguments[0], **{name: kwargs.get(name) for name in ("tokens", "state", "prompt_mask")})

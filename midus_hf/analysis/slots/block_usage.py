"""How often each block of a model's banks is fetched: usage, as of slots."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.analysis.slots.usage import MemoryUsage, summarise
from midus_hf.analysis.text_rows import TextRows
from midus_hf.analysis.watched_models import bare_model, decoder_of, held_hooks
from midus_hf.banks.block_reader import GENERIC
from midus_hf.config.fetched_blocks import BankLayout


class BankLevel(NamedTuple):
    """A level of the tree that a bank has blocks for.

    Args:
        memory: By whose name the bank goes.
        level: Counted from 1.
    """

    memory: str
    level: int

    def __str__(self) -> str:
        return f"{self.memory} level {self.level}"


class BlockUsage:
    """Counts of tokens that were read with each block.

    Args:
        layouts: Of the banks, by the name of the memory.
    """

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.counts = {
            BankLevel(name, level): torch.zeros(1, layout.blocks.nodes(level), dtype=torch.int64)
            for name, layout in layouts.items()
            for level in layout.levels
        }
        """Tokens by block, `[1, nodes]`, int64, by level; the generic memory's are in `generic_tokens`."""
        self.generic_tokens = 0
        """Tokens of rows that fetched the generic memory."""

    def count(self, paths: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add rows.

        Args:
            paths: `[B, p]`, integers, by which rows fetched; -1 throughout for the generic memory.
            tokens: `[B]`, int64, that each row has.
        """
        paths, tokens = paths.cpu().long(), tokens.cpu()
        of_tree = paths[:, 0] != GENERIC
        self.generic_tokens += int(tokens[~of_tree].sum())
        for place, counts in self.counts.items():
            counts[0].scatter_add_(0, paths[of_tree, place.level - 1], tokens[of_tree])

    def summary(self) -> dict[BankLevel, MemoryUsage]:
        """What the counts come to, by level."""
        return summarise(self.counts)


def bank_layouts(model: nn.Module) -> dict[str, BankLayout]:
    """The layouts of the banks that a model's texts fetch blocks from, by the name of the memory; none of another model.

    Args:
        model: A causal language model, compiled or not, or what accelerate or PEFT has wrapped around one.
    """
    banks = getattr(decoder_of(model), "own_banks", None)
    return {} if banks is None else dict(banks.layouts)


def usage_by_rows(layouts: Mapping[str, BankLayout], rows: TextRows) -> BlockUsage:
    """What rows of a text fetch when a model reads them: their paths tell it, so nothing is computed.

    Args:
        layouts: From `bank_layouts`.
        rows: With paths.
    """
    paths = rows.fetched_by(0, len(rows.rows))
    assert paths is not None, "rows fetch by paths"
    usage = BlockUsage(layouts)
    usage.count(paths, torch.tensor([len(row) for row in rows.rows]))
    return usage


@contextlib.contextmanager
def record_block_usage(model: nn.Module) -> Iterator[BlockUsage]:
    """Count, while the context is open, how many tokens are read with each block of each bank.

    A row of a pass fetches one block per level, for all its tokens; padding does not count. What `torch.compile` has compiled,
    of this model or another, runs uncompiled while the context is open.

    Args:
        model: As for `bank_layouts`. Its decoder has a hook more while the context is open.

    Raises:
        ValueError: If the model has no bank; within the context, if a pass brings blocks that were fetched before.
    """
    layouts = bank_layouts(model)
    if not layouts:
        raise ValueError(
            f"the texts of this {bare_model(model).config.model_type} model fetch no blocks; expected one with hierarchical memory."
        )
    usage = BlockUsage(layouts)
    num_levels = max(layout.num_levels for layout in layouts.values())
    without_ids = any(layout.blocks.without_ids == "generic" for layout in layouts.values())

    def count(decoder: nn.Module, arguments: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
        if given.get("memory_blocks") is not None:
            raise ValueError(
                "memory_blocks is given, which does not tell of which nodes blocks are; expected memory_ids while usage is recorded."
            )
        paths = given.get("memory_ids")
        if paths is None and not without_ids:
            return
        tokens = arguments[0] if arguments else given.get("input_ids")
        tokens = given["inputs_embeds"] if tokens is None else tokens
        paths = torch.full((len(tokens), num_levels), GENERIC) if paths is None else paths
        usage.count(paths, _lengths(tokens, given.get("attention_mask")))

    with held_hooks() as hold:
        hold(decoder_of(model).register_forward_hook(count, with_kwargs=True))  # after what it refuses
        yield usage


def _lengths(tokens: torch.Tensor, mask: Any) -> torch.Tensor:
    """Tokens of each row, `[B]`, without padding where a mask of two dimensions tells it."""
    rows, width = tokens.shape[:2]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return (mask[:, -width:] != 0).sum(-1)  # of a cached pass it has what was read before as well
    return torch.full((rows,), width)

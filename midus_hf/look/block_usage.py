"""Usage of blocks: how often texts fetch each block of a model's banks."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from midus_hf.banks.block_reader import GENERIC
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.look.text_rows import TextRows
from midus_hf.look.usage import MemoryUsage, summarise
from midus_hf.look.watched_models import bare_model, decoder_of, held_hooks


class BankLevel(NamedTuple):
    """A level of the topic tree for which a bank holds blocks.

    Args:
        memory: Name of the memory that the bank belongs to.
        level: Level of the tree, counted from 1.
    """

    memory: str
    level: int

    def __str__(self) -> str:
        return f"{self.memory} level {self.level}"


class BlockUsage:
    """Number of tokens that were read with each block.

    Args:
        layouts: Layout of each bank, by the name of its memory.
    """

    def __init__(self, layouts: Mapping[str, BankLayout]):
        # Tokens per block, `[1, nodes]`, int64, for each level. Tokens of the generic memory are in `generic_tokens`
        # instead.
        self.counts = {
            BankLevel(name, level): torch.zeros(1, layout.blocks.nodes(level), dtype=torch.int64)
            for name, layout in layouts.items()
            for level in layout.levels
        }
        # Number of tokens in rows that fetched the generic memory.
        self.generic_tokens = 0

    def count(self, paths: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the rows of a batch to the counts.

        Args:
            paths: Path by which each row fetched its blocks, `[B, p]`, integers; -1 throughout for the generic memory.
            tokens: Number of tokens in each row, `[B]`, int64.
        """
        paths, tokens = paths.cpu().long(), tokens.cpu()
        of_tree = paths[:, 0] != GENERIC
        self.generic_tokens += int(tokens[~of_tree].sum())
        for bank_level, counts in self.counts.items():
            counts[0].scatter_add_(0, paths[of_tree, bank_level.level - 1], tokens[of_tree])

    def summary(self) -> dict[BankLevel, MemoryUsage]:
        """Return the usage of the blocks of each level."""
        return summarise(self.counts)


def bank_layouts(model: nn.Module) -> dict[str, BankLayout]:
    """Return the layouts of the banks from which a model fetches blocks, by the name of the memory; empty without a bank."""
    banks = getattr(decoder_of(model), "own_banks", None)
    return {} if banks is None else dict(banks.layouts)


def usage_by_rows(layouts: Mapping[str, BankLayout], rows: TextRows) -> BlockUsage:
    """Count the tokens of a text per block that its rows would fetch. The rows' paths name the blocks, so no model runs.

    Args:
        layouts: Layouts of the model's banks, as `bank_layouts` returns them.
        rows: Text whose `paths` are not None.
    """
    assert rows.row_paths is not None, "rows fetch by paths"
    usage = BlockUsage(layouts)
    usage.count(rows.row_paths, torch.tensor([len(row) for row in rows.rows]))
    return usage


@contextlib.contextmanager
def record_block_usage(model: nn.Module) -> Iterator[BlockUsage]:
    """Count, while the context is open, how many tokens are read with each block of each bank.

    Each row of a forward pass fetches one block per level for all of its tokens. Padding is not counted. While the context is
    open, compiled models run uncompiled, this one and all others.

    Args:
        model: A model as in `bank_layouts`. Its decoder has an additional hook while the context is open.

    Raises:
        ValueError: If the model has no bank; within the context, if a forward pass is called with `memory_blocks`.
    """
    layouts = bank_layouts(model)
    if not layouts:
        raise ValueError(
            f"the texts of this {bare_model(model).config.model_type} model fetch no blocks; expected one with hierarchical memory."
        )
    usage = BlockUsage(layouts)
    num_levels = max(layout.num_levels for layout in layouts.values())
    without_ids = any(layout.blocks.without_ids == "generic" for layout in layouts.values())

    def count(decoder: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("memory_blocks") is not None:
            raise ValueError(
                "memory_blocks is given, which does not name the blocks' nodes; expected memory_ids while usage is recorded."
            )
        paths = kwargs.get("memory_ids")
        if paths is None and not without_ids:
            return
        tokens = arguments[0] if arguments else kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        paths = torch.full((len(tokens), num_levels), GENERIC) if paths is None else paths
        usage.count(paths, _lengths(tokens, kwargs.get("attention_mask")))

    with held_hooks() as hold:
        hold(decoder_of(model).register_forward_hook(count, with_kwargs=True))  # counts only what the decoder accepts
        yield usage


def _lengths(tokens: torch.Tensor, mask: Any) -> torch.Tensor:
    """Return the number of tokens per row, `[B]`; padding is excluded if the mask has two dimensions."""
    rows, width = tokens.shape[:2]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return (mask[:, -width:] != 0).sum(-1)  # with a cache, the mask covers earlier passes too
    return torch.full((rows,), width)

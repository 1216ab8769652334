"""Fetching of the blocks of each question's path from a bank while the harness runs a model."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.fetching import check_tree

if TYPE_CHECKING:
    from midus_hf.topics.memory_retriever import MemoryRetriever
    from midus_hf.topics.tree import ClusterTree

# A function that takes N texts and returns their paths in a tree of topics, `[N, p]`, int64.
PathFinder = Callable[[Sequence[str]], torch.Tensor]


@contextlib.contextmanager
def fetching(model: nn.Module, path: Sequence[int]) -> Iterator[None]:
    """Make every row of every forward pass fetch the blocks of one path within the context."""

    def add_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tokens = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        return args, {**kwargs, "memory_ids": torch.tensor([list(path)] * len(tokens))}

    handle = model.register_forward_pre_hook(add_ids, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def fetches_blocks(model: Any) -> bool:
    return getattr(model, "banks", None) is not None


def open_retriever(model: Any, tree: str | None) -> "MemoryRetriever | None":
    """Return the retriever of a tree, after checking that it is the model's tree; None without a tree."""
    if tree is None:
        return None
    if not fetches_blocks(model):
        raise RequestError(f"retriever is {tree!r}, and this model fetches no blocks; leave it out.")
    from midus_hf.sources.progress import limit_bars
    from midus_hf.topics.memory_retriever import MemoryRetriever

    with limit_bars():
        retriever = MemoryRetriever.load(tree, device=str(model.device))
    check_tree_of(model, retriever.tree)
    return retriever


def check_tree_of(model: Any, tree: "ClusterTree") -> None:
    """Refuse a tree that is neither the one of the model's banks nor grown from it."""
    remedy = "If the model was saved with its tree, load the retriever from the folder of the model."
    about: dict[str, Any] = {
        "shape": (tree.levels, tree.branching),
        "roots": tree.roots,
        "grown_from": tree.grown_from,
    }
    check_tree(model.banks, tree.fingerprint, "the retriever", remedy, **about)

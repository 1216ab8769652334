"""Evaluation of models whose texts fetch blocks from a bank: by the path of what is asked, or of a whole document."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

PathFinder = Callable[[Sequence[str]], torch.Tensor]
"""The path of each of N texts in a tree of topics, `[N, p]`, int64."""


@contextlib.contextmanager
def fetching(model: nn.Module, path: Sequence[int]) -> Iterator[None]:
    """Within it every row of every pass of a model fetches the blocks of one path, whoever calls the model.

    Args:
        model: Whose memories fetch blocks.
        path: The node of each level.
    """

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
    """Whether the texts of a model fetch blocks."""
    return bool(getattr(model, "banks", None) and model.banks.layouts)


def by_path(
    items: Sequence[Any],
    texts: Sequence[str],
    find_paths: PathFinder,
    model: nn.Module,
    run: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """Run what has one path together, with its blocks.

    Args:
        items: What is run.
        texts: That paths are found by, one per item.
        find_paths: Finds them.
        model: That runs.
        run: Gives a result for each of some items.

    Returns:
        The results, in the order of the items.
    """
    different = list(dict.fromkeys(texts))
    path_of = dict(zip(different, map(tuple, find_paths(different).tolist()), strict=True))
    members: dict[tuple[int, ...], list[int]] = {}
    for index, text in enumerate(texts):
        members.setdefault(path_of[text], []).append(index)
    results: list[Any] = [None] * len(items)
    for path, indices in members.items():
        with fetching(model, path):
            found = run([items[index] for index in indices])
        for index, result in zip(indices, found, strict=True):
            results[index] = result
    return results


def question_of(task: Any, doc: dict[str, Any]) -> str:
    """What a task of the harness asks of a document, without worked examples: by it blocks are fetched (appendix B).

    Of tasks whose choices are contexts, it is what all choices have in common, and what follows them.

    Args:
        task: Of lm-evaluation-harness.
        doc: One of its documents.
    """
    text = task.doc_to_text(doc)
    if isinstance(text, str):
        return text
    columns = zip(*map(str, task.doc_to_choice(doc)), strict=False)  # as long as the shortest choice
    shared = "".join(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
    target = task.doc_to_target(doc)
    return " ".join(part.strip() for part in (shared, target) if isinstance(part, str) and part.strip())

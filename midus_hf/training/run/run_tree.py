"""The tree of topics of a run: the paths of its texts are paths of one tree, which is that of the model's banks."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.models.host import MemoryModel
from midus_hf.retrieval.cluster_tree import ClusterTree
from midus_hf.retrieval.tree_files import folder_of_tree
from midus_hf.training.data.clustered_corpus import ClusteredDataset
from midus_hf.training.data.held_out import HeldOut
from midus_hf.training.data.mixture import Mixture
from midus_hf.training.data.training_data import TrainingData
from midus_hf.training.options import TrainConfig

_REMEDY = "Assign texts by the tree of the model, or train a model whose bank was not trained yet."


@dataclasses.dataclass(frozen=True)
class RunTree:
    """What a run knows of the tree that its paths are of.

    Args:
        fingerprint: Of the tree; None where neither the texts nor the options say which it is.
        folder: That has the files of the tree; None where the options name none.
        shape: Levels and branching of these files; None without them.
    """

    fingerprint: str | None = None
    folder: Path | None = None
    shape: tuple[int, int] | None = None


def tree_of_run(config: TrainConfig, dataset: TrainingData, held_out: Mapping[str, HeldOut]) -> RunTree:
    """Find out which tree the paths of a run are of.

    Args:
        config: The options of the run.
        dataset: What `build_dataset` made of them.
        held_out: The held-out texts of the run.

    Raises:
        ValueError: If texts have paths of different trees, or of another tree than that of the options, or this cannot be read.
    """
    parts = dataset.parts if isinstance(dataset, Mixture) else [dataset]
    named = [
        (f"corpus {corpus.path!r}", part.tree)
        for corpus, part in zip(config.corpora, parts, strict=True)
        if isinstance(part, ClusteredDataset)
    ]
    named += [(f"eval_text {name}".rstrip(), text.tree) for name, text in held_out.items()]
    run_tree = RunTree()
    if config.tree is not None:
        tree = ClusterTree.load(config.tree)
        run_tree = RunTree(
            tree.fingerprint, folder_of_tree(Path(config.tree).expanduser()), (tree.levels, tree.branching)
        )
        named.insert(0, (f"tree {config.tree!r}", tree.fingerprint))
    return dataclasses.replace(run_tree, fingerprint=_common(named))


def use_tree(model: Any, run_tree: RunTree) -> None:
    """See that the banks of a model are those of the tree of a run, and let them be saved with it if they train.

    Args:
        model: As it was loaded.
        run_tree: From `tree_of_run`.

    Raises:
        ValueError: If a bank was trained with another tree, or the tree has another shape.
    """
    if run_tree == RunTree():
        return
    for module in model.modules():
        if isinstance(module, MemoryModel) and module.own_banks.are_open:
            banks = module.own_banks
            for name, layout in banks.layouts.items():
                shape = (layout.num_levels, layout.blocks.branching)
                if run_tree.shape not in (None, shape):
                    assert run_tree.shape is not None
                    raise ValueError(
                        f"tree {str(run_tree.folder)!r} has {run_tree.shape[0]} levels of {run_tree.shape[1]}, and memory {name!r} "
                        f"fetches blocks by a tree of {shape[0]} levels of {shape[1]}; expected one tree. Build one of this shape."
                    )
            banks.check_tree(run_tree.fingerprint, "the corpus", _REMEDY)
            banks.train_with_tree(run_tree.fingerprint, run_tree.folder)


def describe_tree(run_tree: RunTree, dataset: TrainingData) -> list[str]:
    """What a person is told of the tree of a run, a sentence each; nothing where no text has a path.

    Args:
        run_tree: From `tree_of_run`.
        dataset: What the run draws sequences from.
    """
    parts = dataset.parts if isinstance(dataset, Mixture) else [dataset]
    if not any(isinstance(part, ClusteredDataset) for part in parts):
        return []
    if run_tree.fingerprint is None:
        return [
            "no text says which tree its paths are of, so that nothing ties the bank to one; set tree to its folder"
        ]
    name = f"paths are of the tree {run_tree.fingerprint[:16]}"
    if run_tree.folder is None:
        return [f"{name}, which is saved beside the model if tree names its folder"]
    return [f"{name}, which is saved beside the model"]


def _common(named: Iterable[tuple[str, str | None]]) -> str | None:
    known = [(name, tree) for name, tree in named if tree is not None]
    for name, tree in known[1:]:
        if tree != known[0][1]:
            raise ValueError(
                f"{name} is of the tree with the fingerprint {tree[:16]}..., and {known[0][0]} of that with "
                f"{str(known[0][1])[:16]}...; expected one tree. Assign all texts by the same tree."
            )
    return known[0][1] if known else None

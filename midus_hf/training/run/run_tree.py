"""The tree of topics of a run: all paths of its texts must belong to one tree, which is the tree of the model's banks."""

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
    """The tree to which the paths of a run's texts belong.

    Args:
        fingerprint: Fingerprint of the tree; None if neither the texts nor the options give it.
        folder: Folder with the files of the tree; None if the options name none.
        shape: Levels and branching of the tree in this folder; None without a folder.
    """

    fingerprint: str | None = None
    folder: Path | None = None
    shape: tuple[int, int] | None = None


def tree_of_run(config: TrainConfig, dataset: TrainingData, held_out: Mapping[str, HeldOut]) -> RunTree:
    """Find the tree to which the paths of a run belong.

    Args:
        dataset: Sequences of the run, from `build_dataset`.
        held_out: Held-out texts of the run, by name.

    Raises:
        ValueError: If texts have paths of different trees, or of another tree than the options name, or the tree cannot
            be read.
    """
    parts = dataset.parts if isinstance(dataset, Mixture) else [dataset]
    named_trees = [
        (f"corpus {corpus.path!r}", part.tree)
        for corpus, part in zip(config.corpora, parts, strict=True)
        if isinstance(part, ClusteredDataset)
    ]
    named_trees += [(f"eval_text {name}".rstrip(), text.tree) for name, text in held_out.items()]
    run_tree = RunTree()
    if config.tree is not None:
        tree = ClusterTree.load(config.tree)
        run_tree = RunTree(
            tree.fingerprint, folder_of_tree(Path(config.tree).expanduser()), (tree.levels, tree.branching)
        )
        named_trees.insert(0, (f"tree {config.tree!r}", tree.fingerprint))
    return dataclasses.replace(run_tree, fingerprint=_common(named_trees))


def use_tree(model: Any, run_tree: RunTree) -> None:
    """Check that the banks of a model belong to the tree of a run, and save the tree with banks that train.

    Args:
        model: The model as it was loaded.
        run_tree: Tree of the run, from `tree_of_run`.

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
    """Return sentences about the tree of a run, for the user; empty if no text of the corpus has a path.

    Args:
        run_tree: Tree of the run, from `tree_of_run`.
        dataset: Sequences that the run trains on.
    """
    parts = dataset.parts if isinstance(dataset, Mixture) else [dataset]
    if not any(isinstance(part, ClusteredDataset) for part in parts):
        return []
    if run_tree.fingerprint is None:
        return [
            "no text names the tree of its paths, so the bank is not tied to a tree; set tree to the folder of the tree"
        ]
    name = f"paths are of the tree {run_tree.fingerprint[:16]}"
    if run_tree.folder is None:
        return [f"{name}, which is saved beside the model if tree names its folder"]
    return [f"{name}, which is saved beside the model"]


def _common(named: Iterable[tuple[str, str | None]]) -> str | None:
    known_trees = [(name, tree) for name, tree in named if tree is not None]
    for name, tree in known_trees[1:]:
        if tree != known_trees[0][1]:
            raise ValueError(
                f"{name} belongs to the tree with the fingerprint {tree[:16]}..., and {known_trees[0][0]} to the tree with "
                f"{str(known_trees[0][1])[:16]}...; expected one tree. Assign all texts by the same tree."
            )
    return known_trees[0][1] if known_trees else None

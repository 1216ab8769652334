"""One run of pretraining, from its options to the trained model, with the tree of topics that its texts have paths in."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, default_data_collator

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.topics.tree import ClusterTree
from midus_hf.topics.tree_files import folder_of_tree
from midus_hf.training.data.clustered_corpus import ClusteredDataset
from midus_hf.training.data.mixture import Mixture
from midus_hf.training.data.training_data import (
    TrainingData,
    build_dataset,
    describe_corpus,
    open_corpora,
    parts_of,
)
from midus_hf.training.options import TrainConfig
from midus_hf.training.run.held_out import HeldOut, describe_held_out, prepare_held_out
from midus_hf.training.run.run_setup import Chosen, check_request, choose_what_trains, make_run, training_arguments
from midus_hf.training.run.run_trainer import RunTrainer
from midus_hf.training.run.training_run import TrainingRun, TrainResult

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

    Raises:
        ValueError: If texts have paths of different trees, or of another tree than the options name, or the tree cannot
            be read.
    """
    run_tree = RunTree()
    trees: list[tuple[str, str]] = []
    if config.tree is not None:
        tree = ClusterTree.load(config.tree)
        folder = folder_of_tree(Path(config.tree).expanduser())
        run_tree = RunTree(tree.fingerprint, folder, (tree.levels, tree.branching))
        trees.append((f"tree {config.tree!r}", tree.fingerprint))
    for corpus, part in zip(config.corpora, parts_of(dataset), strict=True):
        if isinstance(part, ClusteredDataset) and part.tree is not None:
            trees.append((f"corpus {corpus.path!r}", part.tree))
    trees += [(f"eval_text {name}".rstrip(), text.tree) for name, text in held_out.items() if text.tree is not None]
    for name, fingerprint in trees[1:]:
        if fingerprint != trees[0][1]:
            raise ValueError(
                f"{name} belongs to the tree with the fingerprint {fingerprint[:16]}..., and {trees[0][0]} to the tree with "
                f"{trees[0][1][:16]}...; expected one tree. Assign all texts by the same tree."
            )
    return dataclasses.replace(run_tree, fingerprint=trees[0][1]) if trees else run_tree


def use_tree(model: Any, run_tree: RunTree) -> None:
    """Check that the banks of a model belong to the tree of a run, and save the tree with banks that train.

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
                if run_tree.shape is not None and run_tree.shape != shape:
                    raise ValueError(
                        f"tree {str(run_tree.folder)!r} has {run_tree.shape[0]} levels of {run_tree.shape[1]}, and memory {name!r} "
                        f"fetches blocks by a tree of {shape[0]} levels of {shape[1]}; expected one tree. Build one of this shape."
                    )
            banks.check_tree(run_tree.fingerprint, "the corpus", _REMEDY)
            banks.train_with_tree(run_tree.fingerprint, run_tree.folder)


def describe_tree(run_tree: RunTree, dataset: TrainingData) -> list[str]:
    """Return sentences about the tree of a run, for the user; empty if no text of the corpus has a path."""
    if not any(isinstance(part, ClusteredDataset) for part in parts_of(dataset)):
        return []
    if run_tree.fingerprint is None:
        return [
            "no text names the tree of its paths, so the bank is not tied to a tree; set tree to the folder of the tree"
        ]
    if run_tree.folder is None:
        return [
            f"paths are of the tree {run_tree.fingerprint[:16]}, which is saved beside the model if tree names its folder"
        ]
    return [f"paths are of the tree {run_tree.fingerprint[:16]}, which is saved beside the model"]


def train(config: TrainConfig) -> TrainResult:
    """Pretrain a model, from its weights or from the beginning.

    The function prints which layers train, and writes to `config.output_dir` the trained model and its tokenizer,
    checkpoints, `log.jsonl` and the options (`train_config.yaml`).

    Returns:
        The folder of the trained model, and the steps, tokens and last loss of the run.

    Raises:
        ValueError: If the options are wrong; nothing but cached tokens has been written then.
        FloatingPointError: If the loss, a gradient or a trained tensor stops being finite.
    """
    return prepare(config).execute()


def prepare(config: TrainConfig) -> TrainingRun:
    """Check the options of a run, cheapest checks first, load the model and the data, and open the output.

    Raises:
        ValueError: If the options are wrong; nothing but cached tokens has been written then.
    """
    request = check_request(config, "sequence_length")
    config, model_config = request.config, request.model_config
    memories = model_config.memories() if isinstance(model_config, MemoryConfig) else None
    if memories is not None and memories.reads_prompts:
        raise ValueError(
            "routing is 'prompt', and plain text has no prompts; expected chats, which midus sft trains on, or a model upscaled with "
            "routing = 'chunk'."
        )
    banks: dict[str, BankLayout] = {} if memories is None else memories.banks
    corpora = open_corpora(config, request.tokenizer, model_config.vocab_size, banks)
    arguments = training_arguments(config, gradient_accumulation_steps=request.passes)
    sequences_per_step = config.per_device_train_batch_size * request.passes * arguments.world_size
    dataset = build_dataset(config, corpora, sequences_per_step)
    if isinstance(dataset, Mixture):
        arguments.max_steps, arguments.train_sampling_strategy = dataset.steps, "sequential"
    corpus = config.corpora[0]
    held_out = prepare_held_out(config, request.tokenizer, model_config, corpus, banks)
    tree = tree_of_run(config, dataset, held_out)

    def choose(model: PreTrainedModel) -> Chosen:
        use_tree(model, tree)
        return choose_what_trains(config, model)

    return make_run(
        request,
        arguments,
        dataset,
        data_lines=[
            *describe_corpus(config, dataset),
            *describe_tree(tree, dataset),
            *describe_held_out(held_out, corpus),
        ],
        held_out=held_out,
        choose=choose,
        trainer_class=RunTrainer,
        data_collator=default_data_collator,
        generic_share=config.generic_share,
    )

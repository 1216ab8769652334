"""Banks of a checkpoint: listing of their blocks, and deletion into another checkpoint."""

import os
import re
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.anatomy.record import record_of
from midus_hf.config.errors import RequestError
from midus_hf.config.yaml_options import read_mapping
from midus_hf.files.checkpoint_files import BANKS_FOLDER, RUN_CONFIG
from midus_hf.memories.bank import bank_patterns, banks_of
from midus_hf.memories.hierarchical.bank_files import BlockFiles
from midus_hf.memories.hierarchical.options import GENERIC, BankLayout, HierarchicalOptions, block_layouts, level_file
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.checkpoint_edit import EditRequest, copied_for_edit

if TYPE_CHECKING:
    from midus_hf.memories.hierarchical.bank import MemoryBank
    from midus_hf.topics.tree import ClusterTree

# A level from 1, and the number of the node within it from 0; -1 for the generic memory.
Node = tuple[int, int]

_NODE = re.compile(r"([1-9]\d*):(\d+|generic)")


def delete(request: EditRequest, nodes: Sequence[str], subtree: bool = False) -> dict[str, Any]:
    """Delete the blocks of nodes in every bank, as if never written: what they learned is gone.

    No file of the output contains a deleted block: banks are written without them, and checkpoints to resume training from are left
    out. A node without a remaining block at or below it loses its centroid in the output's tree, so no text is assigned to it; other
    nodes keep numbers and centroids, also those above, means over all their windows.

    Args:
        request: The checkpoint to read and the folder to make; the memory whose bank is edited, by default all banks.
        nodes: Nodes whose blocks are deleted, each `LEVEL:NODE`.
        subtree: Whether to delete the blocks of all nodes below as well. Default: False.

    Returns:
        `{"command", "model", "output", "banks", "centroids", "also_taught", "copies", "seconds"}`. `banks` has the deleted written
        blocks by memory. `centroids` has the named nodes whose centroids are `deleted`, with all below, and `kept`, as they lead to
        other blocks; None without a tree. `also_taught` has the remaining written blocks that texts of the topics read, in any bank,
        `{"above", "same", "below", "generic"}`, and `weights`, whether the recorded run trained other weights than blocks, None if
        unknown. `copies` lists folders and files that still contain what was learned from the topics, or their texts.

    Raises:
        RequestError: If a node does not exist in any of the banks, or the output cannot be made.
    """
    started = time.perf_counter()
    output = request.required_output()
    with resolve_source(str(request.model), needs=((RUN_CONFIG,),)) as source:
        opened = open_base(source.folder)
        banks = _open_banks(opened)
        deleted: dict[str, list[Node]] = {}
        refusals: list[RequestError] = []
        named: set[Node] = set()
        for name in _select_banks(opened, banks, request.memory):
            layout = banks[name].layout
            try:
                chosen = _parse_nodes(nodes, layout, subtree)
            except RequestError as refusal:  # a bank may have no blocks at a level that another bank has
                refusals.append(refusal)
                continue
            deleted[name] = [node for node in chosen if banks[name].is_written(*node)]
            named |= {_parse_node(node, layout) for node in nodes}
        if not deleted:
            raise refusals[0]
        topics = sorted(node for node in named if node[1] != GENERIC)
        left = {
            name: {(level, node) for level in bank.layout.levels for node in bank.written(level)}
            - {*deleted.get(name, ())}
            for name, bank in banks.items()
        }
        tree = _tree_of(source.folder)
        gone, kept = (None, None) if tree is None else _centroids(tree, topics, set().union(*left.values()))
        after = tree.without(gone) if tree is not None and gone else None
        with copied_for_edit(opened, request) as partial, tempfile.TemporaryDirectory() as scratch:
            if after is not None:
                after.save(scratch)
            for name, bank in banks_of(opened.layout.memories).items():
                if isinstance(bank, BlockFiles):
                    bank.copy(source.folder, partial, deleted.get(name, ()), after, Path(scratch) if gone else None)
                else:
                    bank.copy(source.folder, partial)
        related = {
            **_find_related_blocks(banks, left, topics),
            "weights": _trained_weights(source.folder),
        }
        copies = _find_copies(source.folder, str(request.model))
    return {
        "command": "delete",
        "model": str(request.model),
        "output": str(output),
        "banks": {name: format_nodes(its_nodes) for name, its_nodes in deleted.items()},
        "centroids": None
        if gone is None or kept is None
        else {"deleted": format_nodes(gone), "kept": format_nodes(kept)},
        "also_taught": related,
        "copies": copies,
        "seconds": time.perf_counter() - started,
    }


def _find_related_blocks(
    banks: Mapping[str, "MemoryBank"], left: Mapping[str, set[Node]], topics: Sequence[Node]
) -> dict[str, list[str]]:
    """Find what else trained on the topics' texts: remaining blocks, by where they are."""
    kept: dict[str, set[Node]] = {"above": set(), "same": set(), "below": set(), "generic": set()}
    if not topics:
        return {where: [] for where in kept}
    for name, nodes in left.items():
        k = banks[name].layout.blocks.branching
        for node in nodes:
            if node[1] == GENERIC:
                kept["generic"].add(node)
            elif node in topics:
                kept["same"].add(node)
            elif any(_lies_in(topic, node, k) for topic in topics):
                kept["above"].add(node)
            elif any(_lies_in(node, topic, k) for topic in topics):
                kept["below"].add(node)
    return {where: format_nodes(sorted(nodes)) for where, nodes in kept.items()}


def _trained_weights(folder: Path) -> bool | None:
    """Return whether the recorded run trained other weights than blocks; None if none is recorded."""
    if not (folder / RUN_CONFIG).is_file():
        return None
    run = read_mapping(folder / RUN_CONFIG)
    opened = open_base(folder, needs_weights=False)
    record = record_of(opened.config)
    trainable = run.get("trainable", "auto")
    if run.get("adapters") or trainable not in ("auto", "new"):
        return True
    if record is None:
        return None
    memories = opened.layout.memories
    added = [memories.attached[name] for name in record.new_memories]
    only_blocks = bool(added) and all(
        isinstance(entry.options, HierarchicalOptions)
        and not entry.options.tensors(memories.sizes)
        and not entry.options.tables(memories.sizes, entry.layers)
        for entry in added
    )
    return bool(record.new_layers) or not only_blocks or (trainable == "auto" and record.trainable != "new")


def _find_copies(folder: Path, model: str) -> list[str]:
    run = read_mapping(folder / RUN_CONFIG) if (folder / RUN_CONFIG).is_file() else {}
    named: list[Any] = [run.get(key) or () for key in ("corpus", "dataset_name")]
    corpora = [str(name) for each in named for name in ([each] if isinstance(each, str) else each)]
    cache = datasets_cache()
    checkpoints = sorted(path.name for path in folder.glob("checkpoint-*"))
    return [model, *(f"{model}/{name}" for name in checkpoints), *corpora, *([str(cache)] if cache.is_dir() else [])]


def datasets_cache() -> Path:
    """Return the folder of copies of texts by the package datasets; it may not exist."""
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")))
    return Path(os.path.expanduser(os.environ.get("HF_DATASETS_CACHE", home / "datasets")))


def _tree_of(folder: Path) -> "ClusterTree | None":
    from midus_hf.topics.tree import RECORD_FILE, ClusterTree, folder_of_tree

    return ClusterTree.load(folder) if (folder_of_tree(folder) / RECORD_FILE).is_file() else None


def _centroids(tree: "ClusterTree", topics: Sequence[Node], left: Collection[Node]) -> tuple[list[Node], list[Node]]:
    left = [node for node in left if node[1] != GENERIC]
    k, centroids = tree.branching, tree.centroids
    nodes = [node for node in topics if not centroids[node[0] - 1][node[1]].isnan().any()]
    gone = [node for node in nodes if not any(_lies_in(other, node, k) for other in left)]
    # A path ends at a leaf: without one below a node, texts no longer find the node's own block.
    before = tree.takeable
    after = tree.without(gone)
    lost = [
        (level, number)
        for level, number in left
        if before[level - 1][number] and (after is None or not after.takeable[level - 1][number])
    ]
    gone = [node for node in gone if not any(_lies_in(node, other, k) for other in lost)]
    return gone, [node for node in nodes if node not in gone]


def _lies_in(node: Node, other: Node, branching: int) -> bool:
    return node[0] >= other[0] and node[1] // branching ** (node[0] - other[0]) == other[1]


def list_banks(model: str | Path, memory: str | None = None) -> dict[str, Any]:
    """Return `{"model", "fetched", "bank", "banks"}` of all banks, or of a memory's, with nodes per level."""
    with resolve_source(str(model), config_only=True, needs=(bank_patterns(),)) as source:
        opened = open_base(source.folder, needs_weights=False)
        banks = _open_banks(opened)
        listed = [_describe_bank(name, banks[name]) for name in _select_banks(opened, banks, memory)]
    sums = {key: sum(bank[key] for bank in listed) for key in ("fetched", "bank")}
    return {"model": str(model), **sums, "banks": listed}


def _describe_bank(name: str, bank: "MemoryBank") -> dict[str, Any]:
    """Return the numbers of a bank: its blocks, written and deleted nodes and bytes, by level."""
    layout = bank.layout
    levels = [
        {
            "level": level,
            "nodes": layout.blocks.nodes(level),
            "parameters": layout.record_numel(level),
            "written": [node for node in bank.written(level) if node != GENERIC],
            "deleted": [node for node in bank.deleted(level) if node != GENERIC],
            "generic": bank.is_written(level, GENERIC),
            "bytes_on_disk": (bank.folder / level_file(level)).stat().st_blocks * 512,
        }
        for level in layout.levels
    ]
    return {
        "memory": name,
        "type": layout.memory_type,
        "branching": layout.blocks.branching,
        "tree": bank.tree,
        "fetched": layout.fetched,
        "bank": layout.bank,
        "levels": levels,
    }


def _parse_nodes(names: Sequence[str], layout: BankLayout, subtree: bool) -> list[Node]:
    if not names:
        raise RequestError("no node is given; expected one or more, each LEVEL:NODE, such as 2:52.")
    nodes: set[Node] = set()
    for name in names:
        level, number = _parse_node(name, layout)
        if not subtree and level not in layout.levels:
            raise RequestError(f"level {level} has no blocks; expected one of {', '.join(map(str, layout.levels))}.")
        nodes |= set(_below(level, number, layout) if subtree else [(level, number)])
    return sorted(nodes)


def _parse_node(name: str, layout: BankLayout) -> Node:
    match = _NODE.fullmatch(name)
    if match is None:
        raise RequestError(f"node is {name!r}; expected LEVEL:NODE, such as 2:52, or LEVEL:generic.")
    level = int(match[1])
    if not 1 <= level <= layout.num_levels:
        raise RequestError(f"node {name!r} is of level {level}; expected 1 to {layout.num_levels}.")
    count = layout.blocks.nodes(level)
    number = GENERIC if match[2] == "generic" else int(match[2])
    if number >= count:
        raise RequestError(f"node {name!r} does not exist; expected 0 to {count - 1}, or generic.")
    return level, number


def _below(level: int, number: int, layout: BankLayout) -> Iterable[Node]:
    """Yield a node and all nodes below at levels with blocks; below a generic node, the generic ones."""
    k = layout.blocks.branching
    for deeper in range(level, layout.num_levels + 1):
        if deeper in layout.levels:
            if number == GENERIC:
                yield (deeper, GENERIC)
                continue
            first = number * k ** (deeper - level)
            yield from ((deeper, node) for node in range(first, first + k ** (deeper - level)))


def format_nodes(nodes: Iterable[Node]) -> list[str]:
    return [f"{level}:{'generic' if number == GENERIC else number}" for level, number in nodes]


def _open_banks(model: BaseCheckpoint) -> dict[str, "MemoryBank"]:
    from midus_hf.memories.hierarchical.bank import MemoryBank

    layouts = block_layouts(model.layout.memories)
    return {name: MemoryBank(model.folder / BANKS_FOLDER / name, layout) for name, layout in layouts.items()}


def _select_banks(model: BaseCheckpoint, banks: Mapping[str, Any], memory: str | None) -> list[str]:
    chosen = [name for name in banks if memory in (None, name)]
    if not chosen:
        raise RequestError(
            f"{model.folder} has no memory {'' if memory is None else f'{memory!r} '}that fetches blocks; expected a checkpoint "
            f"with one. Its are: {', '.join(banks) or 'none'}."
        )
    return chosen

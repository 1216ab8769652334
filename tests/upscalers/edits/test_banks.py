"""`midus edit blocks` and `delete`: in every bank; all else stays the same bytes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tiny import prompt, save_tiny_model
from topics.trees import random_tree
from training.tiny_run import tiny_config, tiny_tokenizer

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor
from midus_hf.files.checkpoint_files import BLOCK_STATES, RUN_CONFIG
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.fetching import check_tree
from midus_hf.memories.hierarchical.options import HierFFNOptions
from midus_hf.memories.hierarchical.training import train_blocks
from midus_hf.topics.tree import ClusterTree
from midus_hf.training.run import run_training
from tests.upscalers.checkpoints import edit_config
from tests.upscalers.contents import config_of, file_digests, load
from upscalers.edits import banks
from upscalers.edits.banks import delete
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

WRITTEN = [(1, 0), (1, 2), (2, 1), (2, 7), (2, -1)]
NAMES = ["hier-ffn", "hier-lora-vo"]


def bank_of(folder: Path, name: str = "hier-ffn") -> MemoryBank:
    return MemoryBank(folder / "memory_bank" / name, load(folder).banks.layouts[name])


def write_blocks(folder: Path, name: str = "hier-ffn") -> None:
    written, generator = bank_of(folder, name), torch.Generator().manual_seed(len(name))
    for level, index in WRITTEN:
        written.write(level, index, torch.randn(written.layout.record_numel(level), generator=generator))


@pytest.fixture
def run(chapters):
    return lambda *words: chapters(*words, "--json").json()


@pytest.fixture(scope="module")
def upscaled(tmp_path_factory):
    """A folder with a `base`, a model with a bank, `one`, and a model with two banks, `two`; read-only."""
    folder, options = tmp_path_factory.mktemp("upscaled"), {"sizes": [4, 2], "branching": 3}
    base = save_tiny_model("llama", folder / "base")
    upscale(base=base, method="hier-ffn", output=folder / "one", options=options, verify=False)
    upscale(base=folder / "one", method="hier-lora-vo", output=folder / "two", options=options, verify=False)
    write_blocks(folder / "one")
    for name in NAMES:
        write_blocks(folder / "two", name)
    return folder


@pytest.fixture(scope="module")
def trained(upscaled, tmp_path_factory):
    """The output of a run with checkpoints of two steps, in which block (2, 4) has learned."""
    folder = shutil.copytree(upscaled / "one", tmp_path_factory.mktemp("trained") / "run")
    model = load(folder)
    (blocks,) = train_blocks(model.banks).values()
    for step in (1, 2):
        (blocks.block(2, 4) * torch.randn(blocks.layout.record_numel(2))).sum().backward()
        blocks.step(1e-2, (0.9, 0.95), 1e-8, 0.0)
        model.save_pretrained(folder / f"checkpoint-{step}")
        blocks.save_state(folder / f"checkpoint-{step}" / BLOCK_STATES / "0")
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    blocks.save(folder / "memory_bank" / "hier-ffn")
    return folder


def blocks_in(folder: Path, name: str = "hier-ffn") -> dict[tuple[int, int], torch.Tensor]:
    opened = bank_of(folder, name)
    return {(level, index): opened.block(level, index) for level in (1, 2) for index in opened.written(level)}


def other_files(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in file_digests(folder).items() if "level-" not in name}


def files_with(folder: Path, record: torch.Tensor) -> set[str]:
    """The files that have stretches of a block's numbers anywhere, whatever they say that they hold."""
    stretches = [record[start : start + 16] for start in range(0, len(record) - 16, 64)]
    wanted = [stretch.numpy().tobytes() for stretch in stretches if stretch.count_nonzero() == 16]
    assert wanted
    contents = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {str(path.relative_to(folder)) for path, content in contents.items() if any(w in content for w in wanted)}


def test_blocks_lists_each_bank_and_their_sums(upscaled, run, chapters):
    listed = run("blocks", upscaled / "two")
    first, second = listed["banks"]
    assert [first["memory"], second["memory"]] == NAMES
    assert (first["fetched"], first["bank"]) == (4 * 3 * 32 * 6, 4 * 3 * 32 * (12 + 18))
    assert all(listed[key] == first[key] + second[key] for key in ("fetched", "bank"))
    for each in (first, second):
        one, two = each["levels"]
        assert (one["nodes"], one["written"], one["deleted"], one["generic"]) == (3, [0, 2], [], False)
        assert (two["nodes"], two["written"], two["deleted"], two["generic"]) == (9, [1, 7], [], True)
    assert "a text fetches 2,304 of 11,520 parameters" in chapters("blocks", upscaled / "one").out
    assert f"all banks: a text fetches {listed['fetched']:,} of" in chapters("blocks", upscaled / "two").out
    assert run("blocks", upscaled / "two", "--memory", NAMES[1])["banks"] == [second]


def test_deletion_changes_only_the_blocks(upscaled, tmp_path, run):
    nodes, path = ["--node", "1:0", "--node", "2:7", "--node", "2:3"], upscaled / "one" / "README.md"
    card = path.read_text()
    path.write_text(card.replace("---\n", "---\nmodel-index: []\n", 1))
    done = run("delete", upscaled / "one", *nodes, "--output", tmp_path / "out")
    path.write_text(card)  # without results, which the result does not have either
    before, after = blocks_in(upscaled / "one"), blocks_in(tmp_path / "out")
    assert done["banks"] == {"hier-ffn": ["1:0", "2:7"]}
    assert after.keys() == before.keys() - {(1, 0), (2, 7)}
    assert all(torch.equal(before[node], after[node]) for node in after)
    assert other_files(tmp_path / "out") == other_files(upscaled / "one")
    assert bank_of(tmp_path / "out").deleted(2) == [7]
    edited, tokens = load(tmp_path / "out"), prompt(5)
    with torch.no_grad():
        ids = torch.tensor([[0, 0]] * len(tokens))
        assert torch.equal(edited(tokens, memory_ids=ids).logits, edited(tokens).logits)
    assert strip(tmp_path / "out", tmp_path / "base")["base_confirmed"] is True
    again = run("delete", tmp_path / "out", "--node", "2:7", "--output", tmp_path / "again")
    assert again["banks"] == {"hier-ffn": []}
    assert bank_of(tmp_path / "again").deleted(2) == [7]


def test_deletion_covers_every_bank(upscaled, tmp_path, run, chapters):
    records = {name: blocks_in(upscaled / "two", name) for name in NAMES}
    told = chapters("delete", upscaled / "two", "--node", "2:7", "--output", tmp_path / "out").out
    assert "deleted 1 block of hier-ffn and 1 block of hier-lora-vo" in told
    for name in NAMES:
        assert not files_with(tmp_path / "out", records[name][2, 7])
        assert blocks_in(tmp_path / "out", name).keys() == records[name].keys() - {(2, 7)}
    done = run("delete", upscaled / "two", "--node", "2:7", "--memory", NAMES[1], "--output", tmp_path / "only")
    assert done["banks"] == {NAMES[1]: ["2:7"]}
    assert (2, 7) in blocks_in(tmp_path / "only", NAMES[0])


@pytest.fixture(scope="module")
def with_trees(upscaled, tmp_path_factory):
    """The models of `upscaled` with a tree in each of their banks, and two to refuse."""
    folder, tree = tmp_path_factory.mktemp("trees"), random_tree(3, 2, min_similarity=0.1)
    tree.save(folder / "tree")
    for model, names in (("one", NAMES[:1]), ("two", NAMES)):
        shutil.copytree(upscaled / model, folder / model)
        for name in names:
            bank = bank_of(upscaled / model, name)
            bank.save(folder / model / "memory_bank" / name, tree=tree.fingerprint, tree_folder=folder / "tree")
    for broken in ("damaged", "no weights"):
        shutil.copytree(folder / "one", folder / broken)
    (folder / "damaged" / "memory_bank" / "hier-ffn" / "tree.safetensors").write_bytes(b"")
    (folder / "no weights" / "model.safetensors").unlink()
    (folder / "base").symlink_to(upscaled / "base")
    options = {"sizes": [0, 3], "branching": 3}
    upscale(base=upscaled / "base", method="hier-ffn", output=folder / "sparse", options=options, verify=False)
    return folder


# Words of `midus edit delete`, and nodes whose centroids are deleted, with all below, and kept.
_CENTROIDS = {
    "a topic and all below": ("one", ["--node", "1:0", "--subtree"], [(1, 0)], []),
    "a topic below": ("one", ["--node", "2:1"], [(2, 1)], []),
    "a topic that no text taught": ("one", ["--node", "1:1", "--node", "2:8"], [(1, 1), (2, 8)], []),
    "a topic with blocks below": ("one", ["--node", "1:0", "--node", "2:7"], [(2, 7)], [(1, 0)]),
    "all ways to a block": ("one", ["--node", "2:6", "--node", "2:7", "--node", "2:8"], [], [(2, 6), (2, 7), (2, 8)]),
    "the generic memory": ("one", ["--node", "2:generic"], [], []),
    "one of two banks": ("two", ["--node", "2:7", "--memory", NAMES[1]], [], [(2, 7)]),
    "two banks": ("two", ["--node", "2:7"], [(2, 7)], []),
}


@pytest.mark.parametrize("case", _CENTROIDS)
def test_tree_loses_centroids_of_topics_without_blocks(with_trees, tmp_path, run, chapters, case):
    model, words, gone, kept = _CENTROIDS[case]
    out = tmp_path / "out"
    done = chapters("delete", with_trees / model, *words, "--output", out)
    names = [", ".join(f"{level}:{node}" for level, node in nodes) for nodes in (gone, kept)]
    assert [line for line in done.out.splitlines()[1:] if "centroids" in line] == [
        *[f"deleted the centroids of {names[0]} and all below: no text is assigned to them"] * bool(gone),
        *[f"kept the centroids of {names[1]}, which lead texts to other blocks"] * bool(kept),
    ]
    before, after = (ClusterTree.load(folder) for folder in (with_trees / model, out))
    below = {(2, 3 * node + digit) for level, node in gone if level == 1 for digit in range(3)} | {*gone}
    embeddings = torch.randn(300, 5, generator=torch.Generator().manual_seed(1))
    old, new = before.paths(embeddings), after.paths(embeddings)
    contents = [path.read_bytes() for path in out.rglob("*") if path.is_file()]
    for level, node in [*((1, node) for node in range(3)), *((2, node) for node in range(9))]:
        centroid = before.centroids[level - 1][node]
        assert (old[:, level - 1] == node).any(), "texts were assigned to every node"
        if (level, node) in below:
            assert not any(centroid.numpy().tobytes() in content for content in contents)
            assert not (new[:, level - 1] == node).any()
        else:
            assert torch.equal(after.centroids[level - 1][node], centroid)
    others = [below.isdisjoint(enumerate(path, 1)) for path in old.tolist()]
    assert torch.equal(old[others], new[others])
    for name in NAMES[:1] if model == "one" else NAMES:
        bank = bank_of(out, name)
        assert bank.tree == after.fingerprint == ClusterTree.load(bank.folder).fingerprint
        assert bank.description["grown_from"] == ([before.fingerprint] if gone else [])
    check_tree(load(out).banks, before.fingerprint, "the text", "")  # paths of other topics are what they were
    again = run("delete", out, *words, "--output", tmp_path / "again")
    assert again["centroids"] == {"deleted": [], "kept": [f"{level}:{node}" for level, node in kept]}
    assert ClusterTree.load(tmp_path / "again").fingerprint == after.fingerprint


BLOCKS = "other weights: its last run trained only blocks"
WEIGHTS = "kept: other weights, which the run trained"
GENERIC_KEPT = "kept: the generic memory, 2:generic; to delete: --node 1:generic --subtree"
UNKNOWN = "other weights: not known"
ALL = ["--node", "1:2", "--node", "1:generic", "--subtree"]
# What `two` was trained with, as its run records it; words of `midus edit delete`; and what the lines that follow say.
_KEEPS = {
    "all of a topic": ({"trainable": "new"}, ALL, BLOCKS),
    "the generic memory": ({}, ["--node", "1:2", "--subtree"], GENERIC_KEPT, BLOCKS),
    "below": (None, ["--node", "1:2", "--node", "2:generic"], "kept: blocks below it, 2:7; to delete: --subtree", UNKNOWN),
    "above": ({"trainable": "all"}, ["--node", "2:7", "--node", "2:generic"], "blocks above it, 1:2; to delete: pass them", WEIGHTS),
    "adapters": ({"adapters": {"r": 2}}, ALL, WEIGHTS),
    "other banks": ({}, ["--node", "2:1", "--node", "1:0", "--node", "2:generic", "--memory", NAMES[1]],
                    "own blocks in other banks, 1:0, 2:1; to delete: leave out --memory", GENERIC_KEPT, BLOCKS),
    "no topic": ({}, ["--node", "2:generic"], BLOCKS),
}  # fmt: skip
# Changes of the record of `two` (None: it has none), what its run trained, and whether the run trained other weights than blocks.
_WEIGHTS = {
    "blocks": ({}, {}, False), "new": ({}, {"trainable": "new"}, False), "values alone": ({}, {"trainable": ["value"]}, True),
    "an inserted layer": ({"new_layers": [1]}, {"trainable": "new"}, True),
    "nothing that fetches": ({"new_memories": []}, {"trainable": "new"}, True),
    "a method that trains all": ({"trainable": "all"}, {}, True),
    "new parts of that method": ({"trainable": "all"}, {"trainable": "new"}, False),
    "no record": (None, {"trainable": "new"}, None), "no record, all": (None, {"trainable": "all"}, True),
}  # fmt: skip


@pytest.mark.parametrize("case", _WEIGHTS)
def test_deletion_reads_trained_weights_from_the_config(upscaled, tmp_path, case):
    changes, run, expected = _WEIGHTS[case]
    model = shutil.copytree(upscaled / "two", tmp_path / "model")
    (model / "upscale.json").unlink()
    edit_config(model, upscale=... if changes is None else {**config_of(model)["upscale"], **changes})
    (model / RUN_CONFIG).write_text(yaml.safe_dump(run))
    result = delete(EditRequest(model=model, output=tmp_path / "out"), ["1:2"])
    assert result["also_taught"]["weights"] is expected


def test_memory_with_bank_and_weights_trains_both(upscaled, tmp_path, monkeypatch):
    monkeypatch.setattr(HierFFNOptions, "tensors", lambda self, sizes: {"scale": DeclaredTensor((1,), "gate", ZEROS)})
    options = {"sizes": [4, 2], "branching": 3}
    upscale(base=upscaled / "base", method="hier-ffn", output=tmp_path / "out", options=options, verify=False)
    (tmp_path / "out" / RUN_CONFIG).write_text("trainable: new\n")
    assert banks._trained_weights(tmp_path / "out") is True


@pytest.mark.parametrize("case", _KEEPS)
def test_deletion_lists_related_training_and_copies(upscaled, tmp_path, chapters, monkeypatch, case):
    record, words, *expected = _KEEPS[case]
    model, home = shutil.copytree(upscaled / "two", tmp_path / "model"), tmp_path / "home"
    copies = [str(model)]
    if record is not None:
        (model / RUN_CONFIG).write_text(yaml.safe_dump({"corpus": ["a.txt", "b.txt"], **record}))
        (model / "checkpoint-2").mkdir()
        copies += [f"{model}/checkpoint-2", "a.txt", "b.txt"]
    (home / "datasets").mkdir(parents=True)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    *lines, last = chapters("delete", model, *words, "--output", tmp_path / "out").out.splitlines()[1:]
    assert all(part in line for line, part in zip(lines, expected, strict=True)), lines
    assert last == f"delete copies yourself: {', '.join([*copies, str(home / 'datasets')])}, logs and backups"


def test_subtree_deletes_a_node_and_all_below(with_trees, tmp_path, run):
    def deleted(*nodes: str) -> dict:
        words = [word for node in nodes for word in ("--node", node)]
        return run("delete", with_trees / "one", *words, "--subtree", "--output", tmp_path / nodes[-1])

    assert deleted("1:0")["banks"] == {"hier-ffn": ["1:0", "2:1"]}
    assert deleted("1:generic")["banks"] == {"hier-ffn": ["2:generic"]}
    assert deleted("1:0", "1:1", "1:2")["centroids"] == {"deleted": ["1:0", "1:1", "1:2"], "kept": []}
    assert not list((tmp_path / "1:2").rglob("tree.*"))
    assert bank_of(tmp_path / "1:2").written(1) == []


def test_document_is_forgotten_with_its_topic(with_trees, tmp_path, run):
    """As docs/banks.md says: the generic memory has learned from every topic, and is deleted too."""
    old, without, again = with_trees / "one", tmp_path / "without", tmp_path / "again"
    run("delete", old, *ALL, "--output", without)
    tiny_tokenizer().save_pretrained(without)
    row = json.dumps({"text": " ".join(f"w{word}" for word in range(10, 24)), "memory_ids": [2, 7]})
    (tmp_path / "rest.jsonl").write_text(f"{row}\n" * 8)
    keys = {"path_column": "memory_ids", "max_steps": 3, "tree": str(with_trees / "tree"), "generic_share": 0.0}
    run_training(tiny_config(without, tmp_path / "rest.jsonl", again, **keys))
    before, after = blocks_in(old), blocks_in(again)
    assert after.keys() == before.keys() - {(2, -1)}
    assert 7 not in bank_of(again).deleted(2)
    assert {key for key in after if not torch.equal(after[key], before[key])} == {(1, 2), (2, 7)}
    saved, tree = (ClusterTree.load(folder) for folder in (again, with_trees / "tree"))
    assert saved.fingerprint == bank_of(again).tree == tree.fingerprint, "texts find the topic again"
    models, tokens = [load(folder) for folder in (old, without, again)], prompt(5)
    with torch.no_grad():
        given = (torch.tensor([ids] * len(tokens)) for ids in ([0, 1], [2, 7]))
        of_others, of_topic = ([model(tokens, memory_ids=ids).logits for model in models] for ids in given)
    assert torch.equal(of_others[0], of_others[1])
    assert torch.equal(of_others[0], of_others[2])
    assert not torch.equal(of_topic[2], of_topic[1])


def test_deleted_block_is_in_no_file(trained, tmp_path, run):
    learned, file = blocks_in(trained)[2, 4], "memory_bank/hier-ffn/level-2.safetensors"
    states = {f"checkpoint-2/{BLOCK_STATES}/0/level-2.safetensors", f"checkpoint-2/{file}"}
    assert files_with(trained, learned) == {file, *states}, "the search finds it"
    run("delete", trained, "--node", "2:4", "--output", tmp_path / "out")
    assert files_with(tmp_path / "out", learned) == set()
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    run("delete", trained / "checkpoint-2", "--node", "2:4", "--output", tmp_path / "other")
    names = {path.name for path in (tmp_path / "other").iterdir()}
    assert files_with(tmp_path / "other", learned) == set()
    assert "model.safetensors" in names
    assert names.isdisjoint({BLOCK_STATES, "trainer_state.json"})


REFUSED = [
    ("one", [], "expected either blocks (--node, perhaps with --subtree) or names of entries (--name)."),
    ("one", ["--node", "x"], "node is 'x'; expected LEVEL:NODE, such as 2:52, or LEVEL:generic."),
    ("one", ["--node", "3:0"], "node '3:0' is of level 3; expected 1 to 2."),
    ("one", ["--node", "1:3"], "node '1:3' does not exist; expected 0 to 2, or generic."),
    ("one", ["--node", "1:0", "--memory", "moc"], "no memory 'moc' that fetches blocks; expected a checkpoint"),
    ("sparse", ["--node", "1:0"], "level 1 has no blocks; expected one of 2."),
    ("damaged", ["--node", "2:7"], "was altered or is not whole: "),
    ("no weights", ["--node", "1:0", "--subtree"], "holds no weights; expected model.safetensors"),
    ("base", ["--node", "1:0"], "has no memory that fetches blocks"),
]


@pytest.mark.parametrize(("model", "words", "message"), REFUSED, ids=str)
def test_wrong_deletion_is_refused(with_trees, refusal, model, words, message):
    line = refusal("delete", with_trees / model, *words)
    assert line.startswith("midus edit delete: ")
    assert message in line

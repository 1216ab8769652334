"""Trees that grow: new nodes in addition to old ones, which keep their numbers, and the blocks of banks, which keep their bytes."""

import json

import numpy as np
import pytest
import torch
from banks.small_bank import layout_of, made, record_of
from models.memory_models import IDS, hierarchical_model
from tiny import json_rows, prompt
from topics.tiny_bert import WIDTH
from topics.trees import random_tree

from midus_hf.cli.clusters import main
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.fetching import check_tree
from midus_hf.memories.hierarchical.training import TrainedBank
from midus_hf.topics.building import TreeOptions, build_tree, calibrate, grow_tree, held_out_rows
from midus_hf.topics.document_paths import TopicNames
from midus_hf.topics.tree import ClusterTree, TreeOrigin

OPTIONS = TreeOptions(branching=4, levels=2, steps=4, samples=64)


def rows(direction: int, count: int = 200, width: int = 12) -> np.ndarray:
    generator = np.random.default_rng(direction)
    return (np.eye(width)[direction] + 0.1 * generator.standard_normal((count, width))).astype(np.float32)


@pytest.fixture(scope="module")
def built():
    return build_tree(np.concatenate([rows(0), rows(1)]), OPTIONS)


@pytest.fixture(scope="module")
def grown(built):
    return grow_tree(built.tree, np.concatenate([rows(0, 60), rows(5)]), OPTIONS)


def test_tree_grows_beside_its_old_nodes(built, grown, tmp_path):
    tree, old = grown.tree, built.tree
    assert tree.roots == 8
    assert tree.grown_from == (old.fingerprint,)
    assert tree.fingerprint != old.fingerprint
    for before, after in zip(old.centroids, tree.centroids, strict=True):
        assert len(after) == 2 * len(before)
        assert torch.equal(after[: len(before)].nan_to_num(), before.nan_to_num())
    known, new = torch.from_numpy(rows(1, 50)), torch.from_numpy(rows(5, 50))
    assert torch.equal(tree.paths(known), old.paths(known))
    paths = tree.paths(new)
    assert (paths[:, 0] >= 4).all()
    assert (paths[:, 1] // 4 == paths[:, 0]).all()
    assert (old.similarity(new) < old.min_similarity).all()
    assert (grown.leaves[60:] >= 16).all()
    assert (grown.leaves[:60] < 16).sum() >= 50
    assert int(tree.sizes[0].sum()) == int(old.sizes[0].sum()) + 260
    tree.save(tmp_path)
    again = ClusterTree.load(tmp_path)
    assert (again.fingerprint, again.roots, again.grown_from) == (tree.fingerprint, 8, tree.grown_from)
    twice = grow_tree(again, rows(8), OPTIONS).tree
    assert (twice.roots, twice.grown_from) == (12, (old.fingerprint, tree.fingerprint))
    assert (twice.paths(torch.from_numpy(rows(8, 20)))[:, 0] >= 8).all()
    assert torch.equal(twice.paths(new), paths)
    message = "windows are near a topic of the tree; expected texts of topics that it lacks"
    with pytest.raises(ValueError, match=message):
        grow_tree(old, old.centroids[0].numpy(), OPTIONS)


def test_grown_bank_keeps_its_blocks_and_starts_new_ones(tmp_path):
    folder = made(tmp_path / "bank")
    with_blocks = MemoryBank(folder, layout_of())
    for key in ((1, 1), (3, 5), (3, -1)):
        with_blocks.write(*key, record_of(with_blocks.layout, *key))
    plain, bank = MemoryBank(folder, layout_of()), MemoryBank(folder, layout_of())
    old_ids, new_ids = torch.tensor([[1, 5, 21], [-1, -1, -1]]), torch.tensor([[5, 23, 92]])
    with pytest.raises(ValueError, match="has 5 for level 1 in row 0; expected 0 to 3"):
        plain.fetch(new_ids)
    bank.grow(6, "new", ["old"])
    for level in (1, 3):
        assert torch.equal(bank.fetch(old_ids).records[level], plain.fetch(old_ids).records[level])
        assert all(torch.equal(bank.block(level, index), plain.block(level, index)) for index in range(-1, 4**level))
    assert bank.fetch(new_ids).records[1].any()
    trained = TrainedBank(bank)
    trained.block(1, 5).sum().backward()
    trained.step(1e-1, (0.9, 0.95), 1e-8, 0.0)
    learned = trained.block(1, 5).detach().clone()
    expected = {key: bank.block(*key).clone() for key in ((1, 1), (3, 5), (3, -1), (1, 0), (1, 4), (3, 63))}
    for output in (tmp_path / "copy", folder):  # the second is its own
        trained.save(output)
        saved = MemoryBank(output, layout_of())
        assert saved.layout.blocks.roots == 6
        assert saved.tree == "new"
        assert saved.description["grown_from"] == ["old"]
        assert torch.equal(saved.block(1, 5), learned)
        assert saved.written(1) == [1, 5]
        assert saved.written(3) == [-1, 5]
        assert all(torch.equal(saved.block(*key), block) for key, block in expected.items())


def test_grown_model_computes_the_same_by_old_paths(tmp_path):
    model = hierarchical_model("llama", "hier-ffn", tmp_path)
    layout = model.banks.layouts["hier-ffn"]
    branching, new = layout.blocks.branching, [layout.blocks.branching]
    while len(new) < layout.num_levels:
        new.append(new[-1] * branching)
    with torch.no_grad():
        tokens = prompt(7)
        before, bare = model(tokens, memory_ids=IDS).logits, model(tokens).logits
        model.banks.bank("hier-ffn").description["tree"] = "old"
        with pytest.raises(ValueError, match="expected one tree"):
            check_tree(model.banks, "other", "the corpus", "Remedy.")
        check_tree(model.banks, "new", "the corpus", "Remedy.", roots=branching + 1, grown_from=["old"])
        assert torch.equal(model(tokens, memory_ids=IDS).logits, before)
        assert torch.equal(model(tokens, memory_ids=torch.tensor([new] * len(tokens))).logits, bare)


def test_least_similarity_lets_every_length_in(built):
    texts = [f"t{number} " * words for words in (8, 20, 300) for number in range(40)]
    generator, counts = torch.Generator().manual_seed(0), []

    def embed(arguments):
        """The shorter a text, the further from its topic."""
        counts.append((len(arguments[0].split()), len(arguments)))
        noise = torch.stack([torch.randn(12, generator=generator) / len(text.split()) ** 0.5 for text in arguments])
        return torch.nn.functional.normalize(torch.eye(12)[0] + 0.5 * noise, dim=-1)

    tree = ClusterTree(4, built.tree.centroids)
    calibrate(tree, texts, embed, 0)
    assert counts == [(6, 120), (15, 80), (60, 40), (240, 40)]
    assert -1 <= tree.min_similarity < built.tree.min_similarity
    held_out = held_out_rows(4000, 0)
    assert held_out.sum() == 200
    assert held_out_rows(39, 0) is None
    assert held_out_rows(10**6, 0).sum() == 512


def test_command_grows_a_tree_and_assign_names_files(bert, tmp_path, capsys):
    for name, first in (("old", 0), ("new", 30)):
        (tmp_path / name / "deep").mkdir(parents=True)
        for number in range(24):
            words = " ".join(f"w{first + (5 * number + index) % 30}" for index in range(12))
            (tmp_path / name / "deep" / f"{number:02d}.txt").write_text(words)
    models = f"--embedding-model {bert} --tokenizer {bert} --window-tokens 6 --branching 3 --levels 2".split()
    assert main(["build", "--corpus", str(tmp_path / "old"), "--output", str(tmp_path / "tree"), *models]) == 0
    record = json.loads((tmp_path / "tree" / "tree.json").read_text())
    (tmp_path / "tree" / "tree.json").write_text(json.dumps({**record, "min_similarity": 1.0}))  # nothing is near
    words = ["grow", tmp_path / "tree", "--corpus", tmp_path / "new", "--output", tmp_path / "grown"]
    assert main([*map(str, words)]) == 0
    printed = capsys.readouterr().out
    assert "new nodes in addition to 12, fingerprint" in printed
    assert "grown from" in printed
    old, grown = ClusterTree.load(tmp_path / "tree"), ClusterTree.load(tmp_path / "grown")
    assert grown.grown_from == (old.fingerprint,)
    assert torch.equal(grown.centroids[1][:9].nan_to_num(), old.centroids[1].nan_to_num())
    words = ["assign", "--tree", tmp_path / "grown", "--corpus", tmp_path / "new", "--output", tmp_path / "rows.jsonl"]
    assert main([*map(str, words)]) == 0
    assert [row["file"] for row in json_rows(tmp_path / "rows.jsonl")] == [
        f"deep/{number:02d}.txt" for number in range(24)
    ]
    assert main(["report", "--tree", str(tmp_path / "grown")]) == 0
    assert f"windows are those of {tmp_path / 'new'} alone, by which the tree has grown" in capsys.readouterr().err


def test_grown_tree_of_named_topics_says_names_are_lost(bert, tmp_path, capsys):
    origin = TreeOrigin(embedding_model=bert, tokenizer=bert, window_tokens=6)
    random_tree(branching=3201, levels=1, width=WIDTH, origin=origin, min_similarity=1.0).save(tmp_path / "named")
    (tmp_path / "named" / "windows").mkdir()
    TopicNames(("topic",), {f"topic {number}": {} for number in range(3201)}).save(tmp_path / "named" / "windows")
    (tmp_path / "new").mkdir()
    for number in range(4):
        (tmp_path / "new" / f"{number}.txt").write_text(f"w{number} w{number + 5}")
    words = ["grow", tmp_path / "named", "--corpus", tmp_path / "new", "--output", tmp_path / "grown"]
    assert main([*map(str, words)]) == 0
    out, err = capsys.readouterr()
    assert "2 new nodes in addition to 3,201" in out
    assert "the grown tree has no names of topics" in err

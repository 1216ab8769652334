"""A saved tree is read as it was, and a file that is not as it was is refused by its name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from topics.trees import counted_tree, random_tree

from midus_hf.topics.tree import ClusterTree, TreeOrigin


@pytest.fixture
def folder(tmp_path):
    counted_tree().save(tmp_path / "tree")
    return tmp_path / "tree"


def test_a_tree_is_read_as_it_was_and_its_record_says_what_it_is(folder):
    tree, again = counted_tree(), ClusterTree.load(folder)
    assert (again.branching, again.levels, again.width) == (3, 2, 5)
    assert again.origin == tree.origin and again.fingerprint == tree.fingerprint
    assert all(torch.equal(*pair) for pair in zip(tree.centroids, again.centroids, strict=True))
    assert all(torch.equal(*pair) for pair in zip(tree.sizes, again.sizes, strict=True))
    assert sorted(path.name for path in folder.iterdir()) == ["tree.json", "tree.safetensors"]
    record = json.loads((folder / "tree.json").read_text())
    assert record == {
        **{"format_version": 2, "branching": 3, "levels": 2, "width": 5, "fingerprint": tree.fingerprint},
        **{"embedding_model": "model", "embedding_fingerprint": "ab12", "embedding_max_tokens": 256},
        **{"tokenizer": "tokenizer", "window_tokens": 2048, "seed": 7, "min_similarity": None},
        **{"roots": 3, "grown_from": [], "sizes": [[3, 12, 21], list(range(9))]},
    }
    del record["min_similarity"]  # as versions before wrote it
    (folder / "tree.json").write_text(json.dumps(record))
    assert ClusterTree.load(folder).min_similarity is None


def test_a_tree_keeps_its_empty_nodes_and_least_similarity_and_names_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "jane"))
    origin = TreeOrigin(embedding_model=str(tmp_path / "jane" / "bert"), tokenizer="org/name")
    for known in (origin, TreeOrigin()):
        tree = random_tree(empty=((1, 0), (3, 20)), min_similarity=0.25, origin=known)
        tree.save(tmp_path)
        again = ClusterTree.load(tmp_path)
        assert again.origin == known and again.sizes is None and again.fingerprint == tree.fingerprint
        assert again.centroids[0][0].isnan().all() and again.centroids[2][20].isnan().all()
        assert again.min_similarity == 0.25 and random_tree(empty=((1, 0), (3, 20))).fingerprint == tree.fingerprint
        record = json.loads((tmp_path / "tree.json").read_text())
        assert record["embedding_model"] == ("~/bert" if known is origin else None)


@pytest.mark.parametrize("value", [1.5, "0.2", True], ids=repr)
def test_a_least_similarity_that_is_no_cosine_is_refused(value, folder):
    message = rf"min_similarity is {value!r}; expected a cosine from -1, which every text reaches, to 1, or null"
    with pytest.raises(ValueError, match=message):
        random_tree(min_similarity=value)
    record = json.loads((folder / "tree.json").read_text())
    (folder / "tree.json").write_text(json.dumps({**record, "min_similarity": value}))
    with pytest.raises(ValueError, match=message):
        ClusterTree.load(folder)


ALTERED = r"tree' was altered or is not whole: "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format_version": 1}, f"{ALTERED}its format_version is 1; expected 2\\. Copy"),
        ({"branching": "wide"}, ALTERED),
        ({"sizes": [[3, 12]]}, f"{ALTERED}sizes do not fit centroids"),
        ({"sizes": [[3, 12, 21], [[1], [2, 3]]]}, ALTERED),
        ({"branching": 1e999}, ALTERED),
        ({"fingerprint": "0"}, r"tree' was altered .* the fingerprint of its centroids is not the one in tree.json"),
        ({"branching": 4}, f"{ALTERED}centroids of level 1"),
        ("{", f"{ALTERED}.*Copy it again, or build the tree again"),
        ("[" * 100_000, f"{ALTERED}it is nested too deeply"),
        ("[]", ALTERED),
        ('{"format_version": 2, "branching": 3}', ALTERED),
    ],
)
def test_an_altered_record_is_refused(folder, content, message):
    """Changed in some of its keys, or as a whole."""
    file = folder / "tree.json"
    file.write_text(content if isinstance(content, str) else json.dumps({**json.loads(file.read_text()), **content}))
    with pytest.raises(ValueError, match=message):
        ClusterTree.load(folder)


def test_centroids_that_are_not_those_that_were_saved_are_refused(folder):
    path = folder / "tree.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-4], whole[:20], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"tree' was altered or is not whole: .*Copy it again, or build"):
            ClusterTree.load(folder)
    path.write_bytes(whole)
    tensors = load_file(path)
    tensors["centroids.2"][0, 0] += 1e-6
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"fingerprint of its centroids is not the one"):
        ClusterTree.load(folder)
    path.unlink()
    with pytest.raises(ValueError, match=r"tree' was altered or is not whole: .*tree.safetensors"):
        ClusterTree.load(folder)
    with pytest.raises(
        ValueError, match=r"tree is '.*absent', whose tree.json cannot be read .* midus cluster build or"
    ):
        ClusterTree.load(folder / "absent")

"""Embeddings are the means of hidden states, one text at a time; a retriever gives the paths of those, and takes no others."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree
from transformers import AutoModel, AutoTokenizer

from midus_hf.topics.memory_retriever import MemoryRetriever, TextEmbedder
from midus_hf.topics.tree import ClusterTree, TreeOrigin, lasting_name

TEXTS = ["w1 w2 w3", "w7", " ".join(f"w{index}" for index in range(50)), "w4 w4", "", "nothing known"]


@pytest.fixture
def fresh(tmp_path):
    return save_tiny_bert(tmp_path / "model")


def embed_by_hand(folder, text: str, max_tokens: int) -> torch.Tensor:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    if tokens.shape[1] > max_tokens:
        tokens = torch.cat([tokens[:, : max_tokens - 1], tokens[:, -1:]], dim=1)
    with torch.no_grad():
        mean = model(input_ids=tokens).last_hidden_state[0].mean(0)
    return mean / mean.norm()


@pytest.mark.parametrize(("batch_size", "max_tokens", "told"), [(1, 24, [1] * 6), (4, 8, [4, 2]), (64, None, [6])])
def test_text_embeds_the_same_in_any_batch(bert, batch_size, max_tokens, told):
    embedder, done = TextEmbedder(bert, batch_size=batch_size, max_tokens=max_tokens), []
    rows = embedder.embed(TEXTS, done.append)
    assert done == told
    assert embedder.embed([]).shape == (0, WIDTH)
    read = max_tokens or 24
    assert (rows.shape, rows.dtype, embedder.max_tokens, embedder.width) == ((6, WIDTH), torch.float32, read, WIDTH)
    for row, text in zip(rows, TEXTS, strict=True):
        torch.testing.assert_close(row, embed_by_hand(bert, text, read), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(6))


def test_fingerprint_is_of_weights_and_vocabulary(fresh, tmp_path):
    first = TextEmbedder(str(fresh)).fingerprint
    (tmp_path / "moved").mkdir()
    moved = fresh.rename(tmp_path / "moved" / "model")
    assert TextEmbedder(str(moved), batch_size=1).fingerprint == first
    tensors = load_file(moved / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "pooler" not in name}, moved / "model.safetensors")
    assert TextEmbedder(str(moved)).fingerprint == first, "the pooler is not used, and may be absent"
    assert TextEmbedder(str(save_tiny_bert(tmp_path / "other", seed=1))).fingerprint != first


def test_without_pooling_files_the_mean_is_taken(fresh):
    rows = TextEmbedder(str(fresh)).embed(TEXTS[:2])
    for name in ("1_Pooling/config.json", "sentence_bert_config.json", "modules.json"):
        (fresh / name).unlink()
    embedder = TextEmbedder(str(fresh))
    assert embedder.max_tokens == 64
    assert torch.equal(embedder.embed(TEXTS[:2]), rows)


POOLING = "1_Pooling/config.json"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (POOLING, {"pooling_mode_cls_token": True}, "name cls_token; expected .* the mean of tokens"),
        (POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "name max_tokens; expected"),
        (POOLING, {"pooling_mode": "lasttoken"}, "name lasttoken; expected"),
        ("modules.json", [{"type": "models.Dense"}], "name Dense; expected Transformer, Pooling, Normalize"),
        ("config.json", {"model_type": "nothing"}, "which cannot be loaded: "),
        ("model.safetensors", None, r"lacks 1 of its tensors, such as encoder\.layer\.0\.output\.dense\.weight"),
    ],
)
def test_unsuitable_models_are_refused(fresh, file, content, message):
    if content is None:
        tensors = load_file(fresh / file)
        del tensors["encoder.layer.0.output.dense.weight"]
        save_file(tensors, fresh / file)
    else:
        (fresh / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        TextEmbedder(str(fresh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "absent/model"}, "embedding model is 'absent/model', which cannot be loaded: "),
        ({"device": "abacus"}, "device is 'abacus', which cannot be used here"),
        ({"max_tokens": 2}, "max_tokens is 2; expected a number from 3 to 64"),
        ({"max_tokens": 65}, "max_tokens is 65; expected a number from 3 to 64"),
        ({"batch_size": 0}, r"batch_size is 0; expected at least 1"),
    ],
)
def test_unsuitable_options_are_refused(bert, options, message):
    with pytest.raises(ValueError, match=message):
        TextEmbedder(**{"model": bert, **options})


MANY = [f"w{index} w{index + 1} w{index // 2}" for index in range(30)]


def test_far_texts_take_the_generic_path(embedder):
    rows = embedder.embed(MANY)
    centroids = [rows[:3], rows[3:12]]
    cosines = torch.nn.functional.normalize(rows, dim=-1) @ torch.nn.functional.normalize(rows[:3], dim=-1).T
    nearest = cosines.max(dim=-1).values
    limit = nearest.sort().values[10].item() + 1e-4
    free, limited = ClusterTree(3, centroids), ClusterTree(3, centroids, min_similarity=limit)
    torch.testing.assert_close(free.similarity(rows), nearest)
    paths, is_far = MemoryRetriever(limited, embedder).paths(MANY), nearest < limit
    assert (paths[is_far] == -1).all()
    assert is_far.sum() == 11
    assert torch.equal(paths[~is_far], free.paths(rows)[~is_far])
    for tree in (ClusterTree(3, centroids, min_similarity=-1), free):
        assert torch.equal(MemoryRetriever(tree, embedder).paths(MANY), free.paths(rows))


def test_saved_tree_finds_its_model_from_another_folder(tmp_path, monkeypatch):
    folder = save_tiny_bert(tmp_path / "near" / "model")
    monkeypatch.chdir(folder.parent)
    name, usual = lasting_name("model"), TextEmbedder("model", max_tokens=12)
    random_tree(width=WIDTH, origin=TreeOrigin(name, usual.fingerprint, embedding_max_tokens=12)).save(
        tmp_path / "tree"
    )
    monkeypatch.chdir(tmp_path)
    again = MemoryRetriever.load("tree")
    assert (again.embedder.name, again.embedder.max_tokens) == (str(folder), 12)
    paths = again.paths([*MANY, "", "  \n"])
    assert torch.equal(paths[:-2], random_tree(width=WIDTH).paths(usual.embed(MANY)))
    assert (paths[:-2] >= 0).all()
    assert (paths[-2:] == -1).all(), "a blank text is about nothing"


def test_moved_model_is_named_anew_and_another_refused(tmp_path):
    folder = save_tiny_bert(tmp_path / "gone")
    tree = random_tree(width=WIDTH, origin=TreeOrigin(str(folder), TextEmbedder(str(folder)).fingerprint))
    tree.save(tmp_path / "tree")
    file = tmp_path / "tree" / "tree.json"

    def rename(model):
        file.write_text(json.dumps({**json.loads(file.read_text()), "embedding_model": model}))

    moved = folder.rename(tmp_path / "moved")
    message = rf"embedding model '{folder}', which is not there; .* as embedding_model in {file}\."
    for name, refusal in (
        (str(folder), message),
        (None, "does not say which model embeds its texts; .* as embedding_model"),
    ):
        rename(name)
        with pytest.raises(ValueError, match=refusal):
            MemoryRetriever.load(tmp_path / "tree")
    rename(str(moved))
    loaded = MemoryRetriever.load(tmp_path / "tree")
    assert (loaded.embedder.name, loaded.tree.fingerprint) == (str(moved), tree.fingerprint)
    rename(str(save_tiny_bert(tmp_path / "other", seed=1)))
    with pytest.raises(ValueError, match=r"has the fingerprint .*; expected .*, with which the tree was built"):
        MemoryRetriever.load(tmp_path / "tree")

"""Embeddings are the means of hidden states, one text at a time, whatever is embedded along."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from topics.tiny_bert import WIDTH, save_tiny_bert
from transformers import AutoModel, AutoTokenizer

from midus_hf.topics.embedding import TextEmbedder

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
def test_each_row_is_that_of_its_text_alone_and_progress_is_told_of_every_text(bert, batch_size, max_tokens, told):
    embedder, done = TextEmbedder(bert, batch_size=batch_size, max_tokens=max_tokens), []
    rows = embedder.embed(TEXTS, done.append)
    assert done == told and embedder.embed([]).shape == (0, WIDTH)
    read = max_tokens or 24
    assert (rows.shape, rows.dtype, embedder.max_tokens, embedder.width) == ((6, WIDTH), torch.float32, read, WIDTH)
    for row, text in zip(rows, TEXTS, strict=True):
        torch.testing.assert_close(row, embed_by_hand(bert, text, read), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(6))


def test_the_fingerprint_is_that_of_weights_and_vocabulary(fresh, tmp_path):
    first = TextEmbedder(str(fresh)).fingerprint
    (tmp_path / "moved").mkdir()
    moved = fresh.rename(tmp_path / "moved" / "model")
    assert TextEmbedder(str(moved), batch_size=1).fingerprint == first
    tensors = load_file(moved / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "pooler" not in name}, moved / "model.safetensors")
    assert TextEmbedder(str(moved)).fingerprint == first, "the pooler is not used, and may be absent"
    assert TextEmbedder(str(save_tiny_bert(tmp_path / "other", seed=1))).fingerprint != first


def test_without_the_files_of_sentence_transformers_the_mean_is_taken_of_all_positions(fresh):
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
        (POOLING, {"pooling_mode_cls_token": True}, r"whose files name cls_token; expected .* with the mean of tokens\. Choose"),
        (POOLING, {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "whose files name max_tokens; expected"),
        (POOLING, {"pooling_mode": "lasttoken"}, "whose files name lasttoken; expected"),
        ("modules.json", [{"type": "models.Dense"}], "name Dense; expected Transformer, Pooling, Normalize alone"),
        ("config.json", {"model_type": "nothing"}, r"which cannot be loaded: "),
    ],
)  # fmt: skip
def test_a_model_of_another_kind_is_refused(fresh, file, content, message):
    (fresh / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        TextEmbedder(str(fresh))


def test_a_model_that_is_not_whole_is_refused(fresh):
    tensors = load_file(fresh / "model.safetensors")
    del tensors["encoder.layer.0.output.dense.weight"]
    save_file(tensors, fresh / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 of its tensors, such as encoder\.layer\.0\.output\.dense\.weight"):
        TextEmbedder(str(fresh))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "absent/model"}, "embedding model is 'absent/model', which cannot be loaded: "),
        ({"device": "abacus"}, "device is 'abacus', which cannot be used here"),
        ({"device": "cuda:99"}, "device is 'cuda:99', which cannot be used here"),
        ({"max_tokens": 2}, "max_tokens is 2; expected a number from 3 to 64, the model's"),
        ({"max_tokens": 65}, "max_tokens is 65; expected a number from 3 to 64, the model's"),
        ({"batch_size": 0}, r"batch_size is 0; expected at least 1 text\."),
    ],
)
def test_options_that_do_not_fit_are_refused(bert, options, message):
    with pytest.raises(ValueError, match=message):
        TextEmbedder(**{"model": bert, **options})

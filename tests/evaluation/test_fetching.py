"""Models whose texts fetch blocks are measured by the path of each document, and of each question."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from evaluation.byte_models import byte_model, byte_tokenizer, perplexity, save_byte_model
from evaluation.questions import write_questions
from look.upscaled_folders import loaded, saved_with_bank
from topics.tiny_bert import WIDTH
from topics.trees import random_tree

from midus_hf.cli.evaluate import main
from midus_hf.evaluation.fetching import fetches_blocks, fetching
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.tree import TreeOrigin

pytest.importorskip("lm_eval")

from midus_hf.evaluation.harness import FetchingLM, Tasks, question_of

DOCUMENTS = ["The sky is blue, and the sea is deep.", "Lions eat.", "x", "Two and two are four; so they say. " * 3]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny `model` whose bank has blocks that act, and a `tree` of 3 by 9 for it."""
    folder = tmp_path_factory.mktemp("fetching")
    return saved_with_bank(save_byte_model("llama", folder / "base"), folder)


@pytest.fixture(scope="module")
def model(saved):
    return loaded(saved.model)


def find_paths(texts):
    leaves = torch.tensor([sum(map(ord, text)) % 9 for text in texts])
    return torch.stack([leaves // 3, leaves], dim=1)


def loss_of(model, document: str, window: int, memory_ids=None) -> tuple[float, int]:
    """Negative log-likelihood of a document by itself, window by window, in nats; and its tokens."""
    ids, total = torch.tensor(byte_tokenizer()(document, add_special_tokens=False).input_ids), 0.0
    for first in range(1, len(ids), window):
        stretch = ids[first - 1 : first + window]
        arguments = {} if memory_ids is None else {"memory_ids": memory_ids}
        with torch.no_grad():
            logits = model(stretch[None, :-1], use_cache=False, **arguments).logits[0].double()
        total -= logits.log_softmax(-1).gather(1, stretch[1:, None]).sum().item()
    return total, max(len(ids) - 1, 0)


@pytest.mark.parametrize("window", [8, 16])
def test_perplexity_is_of_documents_with_their_own_blocks(model, window):
    how = {"sequence_length": window, "apart": True}
    result = perplexity(model, byte_tokenizer(), DOCUMENTS, find_paths=find_paths, batch_size=3, **how)
    parts = [loss_of(model, document, window, find_paths([document])) for document in DOCUMENTS]
    assert result.tokens == sum(count for _, count in parts)
    assert result.perplexity == pytest.approx(math.exp(sum(loss for loss, _ in parts) / result.tokens), rel=1e-5)
    without = perplexity(model, byte_tokenizer(), DOCUMENTS, **how)
    parts = [loss_of(model, document, window) for document in DOCUMENTS]
    assert without.perplexity == pytest.approx(math.exp(sum(loss for loss, _ in parts) / result.tokens), rel=1e-5)
    assert abs(without.perplexity - result.perplexity) > 1e-3 * without.perplexity


def test_every_call_within_the_context_fetches_the_path(model):
    tokens = torch.arange(1, 9)[None].expand(3, -1)
    with torch.no_grad():
        expected = model(tokens, memory_ids=torch.tensor([[1, 4]] * 3)).logits
        with fetching(model, (1, 4)):
            assert torch.equal(model(tokens).logits, expected)
            assert torch.equal(model(input_ids=tokens).logits, expected)
        assert not torch.equal(model(tokens).logits, expected)
    assert fetches_blocks(model) and not fetches_blocks(byte_model("llama"))


def test_paths_are_of_questions_without_worked_examples(model, tmp_path):
    tasks, requests = Tasks(["openbookqa", "piqa"], data=write_questions(tmp_path / "questions")), []

    def spy(texts):
        requests.extend(texts)
        return find_paths(texts)

    result = tasks.run(model, byte_tokenizer(), find_paths=spy, num_fewshot=1)
    assert result["openbookqa"]["num_fewshot"] == 1
    assert requests and all("Answer: " not in text and len(text) < 60 for text in requests)
    assert "Predators eat" in requests


def test_likelihoods_are_those_of_the_blocks_of_the_context(model):
    language_model = FetchingLM(model, find_paths, tokenizer=byte_tokenizer(), batch_size=2)
    asked = [("sky is", " blue"), ("lions", " eat"), ("sky is", " up"), ("j", "a")]
    requests = [SimpleNamespace(args=words, task_name="task", doc={}) for words in asked]
    actual = language_model.loglikelihood(requests, disable_tqdm=True)
    for request, (value, _) in zip(requests, actual, strict=True):
        context, continuation = (byte_tokenizer()(text, add_special_tokens=False).input_ids for text in request.args)
        tokens = torch.tensor([context + continuation])
        with torch.no_grad():
            logits = model(tokens[:, :-1], memory_ids=find_paths([request.args[0]])).logits[0].double()
        targets = tokens[0, len(context) :, None]
        expected = logits.log_softmax(-1)[len(context) - 1 :].gather(1, targets).sum().item()
        assert value == pytest.approx(expected, rel=1e-4)


def test_question_is_what_contexts_have_in_common():
    contexts = [f"The trophy does not fit since the {name}" for name in ("trophy", "case")]
    told = {"doc_to_text": 1, "doc_to_choice": contexts, "doc_to_target": "is too large."}
    task = SimpleNamespace(**{name: lambda _, words=words: words for name, words in told.items()})
    assert question_of(task, {}) == "The trophy does not fit since the is too large."


def write_rows(path, *rows) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--text", str(path), "--sequence-length", "16", "--json"]


def test_command_measures_by_a_tree(saved, model, tmp_path, capsys):
    texts = [f"w{i} w{i + 1} w{2 * i} " * 4 for i in range(6)]
    words = [str(saved.model), *write_rows(tmp_path / "texts.jsonl", *({"text": text} for text in texts))]
    main([*words, "--retriever", str(saved.tree)])
    told = capsys.readouterr()
    measured = json.loads(told.out)["models"][0]["perplexity"]["perplexity"]
    assert "no block" not in told.err
    main(words)
    line = f"{saved.model}: no block of its bank was read, since the topics of the texts are not known"
    assert line in capsys.readouterr().err
    paths, arguments = MemoryRetriever.load(saved.tree).paths, {"sequence_length": 16, "apart": True}
    expected = perplexity(model, byte_tokenizer(), texts, find_paths=paths, **arguments).perplexity
    assert measured == pytest.approx(expected, rel=1e-6)
    assert perplexity(model, byte_tokenizer(), texts, **arguments).perplexity != pytest.approx(expected, rel=1e-3)


def test_command_measures_by_the_paths_of_rows(saved, model, tmp_path, capsys):
    paths = find_paths(DOCUMENTS).tolist()
    rows = [{"text": text, "memory_ids": path} for text, path in zip(DOCUMENTS, paths, strict=True)]
    rows.insert(2, {"text": " ", "memory_ids": None})  # no document, so nobody asks for its path
    plain, words = save_byte_model("llama", tmp_path / "plain"), write_rows(tmp_path / "texts.jsonl", *rows)
    main([str(saved.model), str(plain), *words, "--path-column", "memory_ids"])
    fetched, alike = (report["perplexity"]["perplexity"] for report in json.loads(capsys.readouterr().out)["models"])
    arguments = {"sequence_length": 16, "apart": True}
    expected = perplexity(model, byte_tokenizer(), DOCUMENTS, find_paths=find_paths, **arguments)
    assert fetched == pytest.approx(expected.perplexity, rel=1e-6)
    without = perplexity(model, byte_tokenizer(), DOCUMENTS, **arguments)
    assert abs(without.perplexity - fetched) > 1e-3 * fetched
    expected = perplexity(loaded(plain), byte_tokenizer(), DOCUMENTS, **arguments)
    assert alike == pytest.approx(expected.perplexity, rel=1e-6)


@pytest.mark.parametrize(("branching", "levels"), [(2, 2), (3, 3)], ids=["fewer-children", "more-levels"])
def test_tree_of_another_shape_is_refused(branching, levels, saved, tmp_path, capsys):
    """By fewer children every node has a block, of other topics."""
    origin = TreeOrigin(embedding_model=str(saved.bert))
    random_tree(branching, levels, width=WIDTH, origin=origin).save(tmp_path / "tree")
    words = write_rows(tmp_path / "texts.jsonl", {"text": "w1 w2 w3"})
    assert main([str(saved.model), *words, "--retriever", str(tmp_path / "tree")]) == 2
    said = capsys.readouterr().err
    assert f"has {levels} levels of {branching}, and memory 'hier-ffn' fetches blocks by a tree of 2 levels of" in said
    assert "expected one tree. Give the one that the bank was trained with, or build one." in said


def test_paths_in_another_tree_are_refused_before_measuring(saved, tmp_path, capsys, monkeypatch):
    measured: list[object] = []
    monkeypatch.setattr("midus_hf.evaluation.text_rows.row_losses", lambda *_, **__: measured.append(1))
    rows = [*({"text": "a word " * 50, "memory_ids": [0, 0]} for _ in range(20)), {"text": "b", "memory_ids": [2, 9]}]
    words = write_rows(tmp_path / "texts.jsonl", *rows)
    assert main([str(saved.model), *words, "--path-column", "memory_ids"]) == 2
    message = "column 'memory_ids' of the text has 9 for level 2 in row 20; expected 0 to 8, or a row of -1"
    assert message in capsys.readouterr().err and not measured

"""The real material: what is fetched is what it is said to be."""

import json
from pathlib import Path

import pytest
import torch
from tiny import json_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from material.addresses import addresses
from material.benchmarks import BENCHMARKS, benchmarks
from material.chats import chats
from material.elements import elements
from material.factbook import factbook
from material.minilm import minilm
from material.registry import check_sha256
from material.smollm2 import GGUF_SHA256, smollm2_135m, smollm2_gguf
from material.stages import mixed, stages
from midus_hf.evaluation.harness import load_local_task, local_task_names
from midus_hf.topics.memory_retriever import TextEmbedder

pytestmark = pytest.mark.material
# Of each benchmark its rows, and their choices.
ROWS = {"piqa": (1500, 2), "openbookqa": (500, 4), "commonsenseqa": (1217, 5), "boolq": (3270, 2)}
ROWS |= {"logiqa": (1000, 4), "mmlu": (2850, 4)}


def test_quantised_model_is_the_published_one():
    check_sha256(smollm2_gguf(), GGUF_SHA256)


def test_converted_model_is_a_float32_llama_that_speaks():
    folder = smollm2_135m()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert (model.config.model_type, model.num_parameters()) == ("llama", 134_515_008)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.chat_template
    assert [path.suffix for path in folder.iterdir() if path.stat().st_size > 50_000_000] == [".safetensors"]
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, -1]) == " Paris"


@pytest.mark.parametrize(
    ("parts", "counts", "least", "most"),
    [(addresses, (210, 23), 10_000_000, 11_000_000), (factbook, (226, 25), 7_000_000, 8_000_000)],
)
def test_every_tenth_text_is_held_out(parts, counts, least, most):
    folders = (parts().train, parts().held_out)
    train, held_out = ({path.name: path.read_text("utf-8") for path in folder.iterdir()} for folder in folders)
    assert (len(train), len(held_out)) == counts
    texts = train | held_out
    assert sorted(texts)[9::10] == sorted(held_out)
    assert len(set(texts.values())) == sum(counts)
    assert least < sum(map(len, texts.values())) < most
    if parts is factbook:
        for text in texts.values():
            country = text.partition(" / ")[0]
            assert all(line.startswith(f"{country} / ") for line in text.splitlines())


def test_every_tenth_chat_is_held_out():
    train, held_out = (json_rows(path) for path in (chats().train, chats().held_out))
    assert (len(train), len(held_out)) == (22091, 2454)
    roles = {tuple(message["role"] for message in row["messages"]) for row in train + held_out}
    assert roles == {("user", "assistant")}


def test_local_tasks_have_questions():
    others, names = {"atomic_numbers": elements, "facts": lambda: factbook().questions}, local_task_names()
    assert sorted([*BENCHMARKS, *others]) == names
    for name in names:
        data = benchmarks() if name in BENCHMARKS else others[name]()
        assert Path(load_local_task(name, data)["dataset_kwargs"]["data_files"]["test"]).is_file()


@pytest.mark.parametrize("name", ROWS)
def test_benchmark_rows_are_complete(name):
    rows, (count, choices) = json_rows(benchmarks() / f"{name}.jsonl"), ROWS[name]
    assert len(rows) == count
    assert {len(row["choices"]) for row in rows} == {choices}
    assert {row["gold"] for row in rows} == set(range(choices))
    assert all(row["question"] and all(choice.strip() == choice != "" for choice in row["choices"]) for row in rows)
    dropped = json.loads((benchmarks() / "dropped.json").read_text())
    assert dropped[name] == (4 if name == "commonsenseqa" else 0)


def test_similar_sentences_are_near():
    embedder = TextEmbedder(str(minilm()))
    assert (embedder.width, embedder.max_tokens) == (384, 256)
    rows = embedder.embed(["He is eating a meal.", "A man has dinner.", "The stock exchange crashed in 1929."])
    similar, other = rows[0] @ rows[1], rows[0] @ rows[2]
    assert similar > 0.5
    assert other < 0.2


def test_stages_share_no_text():
    folder = stages()
    assert {path.name for path in folder.iterdir()} == {"addresses", "factbook", "glosses", "elements"}
    for stage in folder.iterdir():
        names = ("corpus", "validation", "text")
        parts = {part: [row["text"] for row in json_rows(stage / f"{part}.jsonl")] for part in names}
        assert len({text for texts in parts.values() for text in texts}) == sum(map(len, parts.values())), stage.name
        assert 18_000 < sum(map(len, parts["corpus"])) < 230_000, stage.name
        assert all(8_000 < sum(map(len, parts[part])) < 26_000 for part in ("validation", "text"))


def test_mixed_corpus_has_no_held_out_text():
    corpus = [row["text"] for row in json_rows(mixed() / "corpus.jsonl")]
    parts = [f"{name}/{part}.jsonl" for name in ("addresses", "glosses") for part in ("text", "validation")]
    texts = [row["text"] for part in parts for row in json_rows(stages() / part)]
    validation = {row["text"] for row in json_rows(mixed() / "validation.jsonl")}
    assert len(set(corpus)) > 7_190
    assert not set(corpus) & set(texts)
    assert validation < set(texts)
    assert not any(text in addresses for text in texts if len(text) > 900 for addresses in corpus)
    long = [len(text) > 1_000 for text in corpus]
    assert sum(long) == 210
    assert 70 < sum(long[: len(long) // 2]) < 140

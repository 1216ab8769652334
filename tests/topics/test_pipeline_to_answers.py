"""The whole way of hierarchical memories through datatrove: documents, a tree, their paths, a trained bank, and answers by it."""

import json
from pathlib import Path

import pytest
import torch
from tiny import save_tiny_model
from topics.tiny_bert import save_tiny_bert
from training.tiny_run import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM

from midus_hf.topics.building import TreeOptions
from midus_hf.topics.memory_retriever import MemoryRetriever
from midus_hf.topics.run import build
from midus_hf.topics.tree import ClusterTree
from midus_hf.training.run import train
from upscalers.edits.banks import delete
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.runs.upscale import upscale

pytest.importorskip("datatrove")

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter

from midus_hf.topics.datatrove_steps import AssignPaths

OPTIONS = TreeOptions(branching=2, levels=2, steps=3, samples=20)
TOPICS = ([f"w{word}" for word in range(10, 18)], [f"w{word}" for word in range(40, 48)])


@pytest.fixture
def documents(tmp_path):
    """Two files of documents, each about one of two topics; one of them is blank."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a", "b"):
        texts = [" ".join((TOPICS[number % 2] * 3)[number : number + 14]) for number in range(12)]
        rows = [{"text": text, "id": f"{name}{number}"} for number, text in enumerate([*texts, "  "])]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture
def taught(documents, tmp_path):
    """Return the folders of the tree, of the documents with their paths, and of the model that learned them."""
    bert = str(save_tiny_bert(tmp_path / "bert"))
    tree, assigned = str(tmp_path / "tree"), str(tmp_path / "assigned")
    build(documents, embedding_model=bert, tokenizer=bert, output=Path(tree), options=OPTIONS)
    pipeline = [
        JsonlReader(documents),
        AssignPaths(tree),
        JsonlWriter(assigned, compression=None, expand_metadata=True),
    ]
    LocalPipelineExecutor(pipeline, tasks=2, workers=1, logging_dir=str(tmp_path / "logs")).run()

    base = save_tiny_model("llama", tmp_path / "base")
    options = {"sizes": [4, 2], "branching": 2}
    upscale(base=base, method="hier-ffn", output=tmp_path / "model", options=options, verify=False)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    config = tiny_config(
        tmp_path / "model",
        assigned,
        tmp_path / "out",
        path_column="memory_ids",
        max_steps=3,
        tree=tree,
    )
    train(config)
    return tree, tmp_path / "assigned", tmp_path / "out"


def test_a_document_is_forgotten_with_its_topic_which_learns_the_others_again(taught, tmp_path):
    tree, assigned, output = taught
    rows = [json.loads(line) for file in sorted(assigned.iterdir()) for line in file.read_text().splitlines()]
    forgotten, *others = [row for row in rows if row["text"].strip()]
    topic = forgotten["memory_ids"][0]
    nodes = [f"1:{topic}", "1:generic"]  # some sequences of every topic train the generic memory
    delete(EditRequest(output, tmp_path / "without"), nodes, subtree=True)
    rest = tmp_path / "rest.jsonl"
    rest.write_text("".join(json.dumps(row) + "\n" for row in others if row["memory_ids"][0] == topic))
    keys = {"path_column": "memory_ids", "max_steps": 3, "tree": tree, "generic_share": 0.0}
    train(tiny_config(tmp_path / "without", rest, tmp_path / "again", **keys))
    # The tree of the run brings the topic's centroid back; without it, no text finds the topic.
    texts = [row["text"] for row in others]
    topics = [set(MemoryRetriever.load(tmp_path / name).paths(texts)[:, 0].tolist()) for name in ("without", "again")]
    assert topic not in topics[0] and topic in topics[1]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").banks.bank("hier-ffn")
    assert again.tree == ClusterTree.load(tmp_path / "again").fingerprint == ClusterTree.load(tree).fingerprint

    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("out", "without", "again")]
    elsewhere = next(row for row in others if row["memory_ids"][0] != topic)
    of_topic, of_others = [
        [
            model(
                **tiny_tokenizer()([row["text"]], return_tensors="pt"), memory_ids=torch.tensor([row["memory_ids"]])
            ).logits
            for model in models
        ]
        for row in (forgotten, elsewhere)
    ]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert torch.equal(of_topic[1], base(**tiny_tokenizer()([forgotten["text"]], return_tensors="pt")).logits)
    assert not torch.equal(of_topic[2], of_topic[1])
    assert torch.equal(of_others[0], of_others[1]) and torch.equal(of_others[0], of_others[2])

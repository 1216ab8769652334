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


def test_documents_become_a_tree_paths_a_trained_bank_and_answers(documents, tmp_path):
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

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    bank, fingerprint = model.banks.of("hier-ffn"), ClusterTree.load(tree).fingerprint
    assert bank.tree == fingerprint and bank.written(1)
    retriever = MemoryRetriever.load(tmp_path / "out")  # the tree that lies beside the model
    assert retriever.tree.fingerprint == fingerprint
    prompts = [" ".join((topic * 3)[number : number + 14]) for number, topic in enumerate(TOPICS)]
    paths = retriever.paths(prompts)
    tokens = tiny_tokenizer()(prompts, return_tensors="pt")
    assert model.generate(**tokens, memory_ids=paths, max_new_tokens=2).shape == (2, tokens.input_ids.shape[1] + 2)
    assert paths[0].tolist() != paths[1].tolist()
    assert torch.equal(paths[:, 0], paths[:, 1] // 2)

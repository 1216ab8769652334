"""A bank knows the layers, the base and the tree that it was trained with; whatever brings others is refused by name."""

import json
import re
import shutil

import pytest
import torch
from topics.tiny_bert import WIDTH, save_tiny_bert
from topics.trees import random_tree
from training.outcomes import bank_of
from training.tiny_run import PreparedRun, block_config, refused
from transformers import AutoModelForCausalLM

from midus_hf.cli.evaluate import main as midus_eval
from midus_hf.evaluation.fetching import check_tree_of
from midus_hf.topics.tree import ClusterTree, TreeOrigin
from midus_hf.training.run import run_training
from upscalers.edits.banks import delete
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

# Two trees of the shape that the models of these tests fetch blocks by.
TREE, OTHER = (random_tree(3, 2, width=WIDTH, seed=seed) for seed in (0, 1))


def named(assigned, path, tree):
    rows = [json.loads(line) for line in assigned.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "memory_tree": tree.fingerprint}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def made(fetching, assigned, tmp_path_factory):
    """Both trees, a smaller one, a corpus assigned by each, and a model trained with the first; nobody may change them."""
    folder = tmp_path_factory.mktemp("trees")
    for name, tree in (("tree", TREE), ("other", OTHER)):
        tree.save(folder / name)
        named(assigned, folder / f"{name}.jsonl", tree)
    random_tree(2, 2, width=WIDTH).save(folder / "small")
    keys = {"tree": str(folder / "tree"), "save_steps": 3, "max_steps": 3}
    run_training(block_config(fetching, folder / "tree.jsonl", folder / "model", **keys))
    return folder


def fingerprints(folder) -> tuple[str | None, str | None]:
    bank = folder / "memory_bank" / "hier-ffn"
    beside = ClusterTree.load(bank).fingerprint if (bank / "tree.json").exists() else None
    return json.loads((bank / "bank.json").read_text())["tree"], beside


def test_tree_of_a_run_is_saved_and_moves_with_the_bank(made, fetching, tmp_path):
    assert fingerprints(fetching) == (None, None), "nothing trained this bank"
    both = (TREE.fingerprint, TREE.fingerprint)
    assert fingerprints(made / "model") == both
    AutoModelForCausalLM.from_pretrained(made / "model").save_pretrained(tmp_path / "saved")
    delete(EditRequest(made / "model", tmp_path / "deleted"), ["2:4"])
    upscale(base=made / "model", method="llama-pro", output=tmp_path / "deeper", num_new_layers=2, verify=False)
    strip(tmp_path / "deeper", tmp_path / "stripped")
    for name in ("saved", "deeper", "stripped"):
        assert fingerprints(tmp_path / name) == both, name
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).banks.bank("hier-ffn").tree == TREE.fingerprint
    before, after = bank_of(made / "model"), bank_of(tmp_path / "deeper")
    assert before.layout.layers != after.layout.layers and before.layout.base is not None
    assert after.description["layout"]["layers"] == list(after.layout.layers)
    assert after.description["layout"]["base"] == after.layout.base
    assert all(torch.equal(before.block(2, index), after.block(2, index)) for index in before.written(2))
    own, beside = fingerprints(tmp_path / "deleted")  # of a tree without the deleted topic
    assert own == beside != TREE.fingerprint
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "deleted").banks.bank("hier-ffn").tree == own


def test_tree_may_be_named_by_its_model(blocks_for, made, tmp_path):
    config = blocks_for(model=made / "model", corpus=made / "tree.jsonl", tree=str(made / "model"), max_steps=1)
    assert ("tree", str(made / "model")) in config.sources(), "overwriting must not take it away"
    run_training(config)
    assert fingerprints(tmp_path / "out") == (TREE.fingerprint, TREE.fingerprint)
    assert all((made / "tree" / name).stat().st_nlink == 1 for name in ("tree.json", "tree.safetensors"))


OF_ANOTHER_TREE = (
    rf"fingerprint {OTHER.fingerprint[:16]}.*, and the model's bank was trained with {TREE.fingerprint[:16]}"
)


@pytest.mark.parametrize(
    ("model", "corpus", "keys", "message"),
    [
        *(("model", "other.jsonl", keys, OF_ANOTHER_TREE) for keys in ({}, {"trainable": "all"}, {"tree": "other"})),
        (None, "tree.jsonl", {"tree": "other"}, rf"corpus belongs to the tree .* {TREE.fingerprint[:16]}.*, and tree .*other"),
        (None, "tree.jsonl", {"tree": "small"}, "expected one tree"),
        (None, None, {"tree": "small"}, "has 2 levels of 2, and memory 'hier-ffn' fetches blocks by a tree of 2 levels of 3"),
    ],
)  # fmt: skip
def test_texts_and_trees_of_another_tree_are_refused(
    model, corpus, keys, message, blocks_for, made, assigned, fetching, tmp_path
):
    keys = {**keys, "tree": str(made / keys["tree"])} if "tree" in keys else keys
    paths = {"model": made / model if model else fetching, "corpus": made / corpus if corpus else assigned}
    with refused(message):
        PreparedRun(blocks_for(**paths, **keys))
    assert not (tmp_path / "out").exists()


def test_changed_tree_or_bank_is_not_resumed_over(blocks_for, assigned, made, fetching, tmp_path):
    TREE.save(tmp_path / "tree")
    shutil.copytree(fetching, tmp_path / "model")
    keys = {"model": tmp_path / "model", "tree": str(tmp_path / "tree"), "save_steps": 1}
    run_training(blocks_for(max_steps=1, **keys))
    keys |= {"resume_from_checkpoint": True, "max_steps": 1}
    shutil.rmtree(tmp_path / "tree")
    OTHER.save(tmp_path / "tree")
    with refused(r"tree is '.*tree', whose nodes are not those .*\(SHA-256 .*\); put them back"):
        PreparedRun(blocks_for(**keys))
    shutil.rmtree(tmp_path / "tree")
    TREE.save(tmp_path / "tree")
    bank = tmp_path / "model" / "memory_bank" / "hier-ffn" / "bank.json"
    bank.write_text(json.dumps({**json.loads(bank.read_text()), "seed": 77}))
    with refused(r"model_name_or_path is '.*model', whose files beside the weights \(fetched\) are not those"):
        PreparedRun(blocks_for(**keys))


def test_measuring_and_asking_refuse_another_tree(made, tmp_path, capsys):
    origin = TreeOrigin(embedding_model=str(save_tiny_bert(tmp_path / "bert")))
    ClusterTree(OTHER.branching, OTHER.centroids, origin).save(tmp_path / "retriever")
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    with refused(f"the retriever is of .* {OF_ANOTHER_TREE}"):
        check_tree_of(model, OTHER)
    text = ["--text", str(made / "other.jsonl"), "--sequence-length", "16"]
    for paths in (["--retriever", str(tmp_path / "retriever")], ["--path-column", "memory_ids"]):
        assert midus_eval([str(made / "model"), *text, *paths]) == 2
        assert re.search(OF_ANOTHER_TREE, capsys.readouterr().err)

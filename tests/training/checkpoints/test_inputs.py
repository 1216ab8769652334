"""Digests of what a run reads tell other content, and nothing else; a run is not resumed over other inputs."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from training.tiny_run import PreparedRun, document, framing_tokenizer, refused, tiny_config

from midus_hf.training.inputs import model_hashes, rows_digest
from midus_hf.training.run import run_training

ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), max_size=4)), max_size=9
)


def dataset(rows):
    columns = {"input_ids": [row[0] for row in rows], "labels": [row[1] for row in rows]}
    features = datasets.Features({name: datasets.LargeList(datasets.Value("int32")) for name in columns})
    return datasets.Dataset.from_dict(columns, features=features)


@given(ROWS, ROWS, st.integers(0, 9))
def test_rows_digest_depends_only_on_content(rows, others, cut):
    digest = rows_digest(dataset(rows))
    assert (digest == rows_digest(dataset(others))) is (rows == others)
    in_parts = datasets.concatenate_datasets([dataset(rows[:cut]), dataset(rows[cut:])])
    assert rows_digest(in_parts) == digest
    doubled = [row for row in rows for _ in range(2)]
    chosen = dataset(doubled).select(range(0, len(doubled), 2))  # rows of a table with others between them
    assert rows_digest(chosen) == digest


def test_rows_of_text_have_digests_too():
    texts = datasets.Dataset.from_dict({"text": ["a", "b"], "tags": [["x"], []]})
    assert rows_digest(texts) == rows_digest(texts.select([0, 1])) != rows_digest(texts.select([1, 0]))


def test_a_model_has_the_digests_of_its_weights_and_settings():
    model, same = tiny_model("llama"), tiny_model("llama")
    saved, new = SimpleNamespace(model_name_or_path="model"), SimpleNamespace(model_name_or_path=None)
    same.load_state_dict(model.state_dict())
    digests = model_hashes(model, saved)["model_name_or_path"]
    assert model_hashes(same, saved) == {"model_name_or_path": digests} and {*digests} == {"weights", "settings"}
    same.config.rope_parameters = {**same.config.rope_parameters, "rope_theta": 5.0}
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    of_weights, of_settings = (model_hashes(each, saved)["model_name_or_path"] for each in (model, same))
    assert of_weights["weights"] != digests["weights"] and of_weights["settings"] == digests["settings"]
    assert of_settings["weights"] == digests["weights"] and of_settings["settings"] != digests["settings"]
    assert model_hashes(same, new) == {"config_name": {"settings": of_settings["settings"]}}


@pytest.fixture
def own_inputs(upscaled, corpus, tmp_path):
    shutil.copytree(upscaled("llama"), tmp_path / "model")
    shutil.copytree(corpus, tmp_path / "texts")
    (tmp_path / "held_out.txt").write_text(document(40, 99))
    keys = {"max_steps": 2, "save_steps": 1, "eval_steps": 1, "eval_text": str(tmp_path / "held_out.txt")}
    return lambda **changes: tiny_config(
        tmp_path / "model", tmp_path / "texts", tmp_path / "out", **{**keys, "save_total_limit": None, **changes}
    )


def other_weights(folder: Path) -> None:
    tensors = load_file(folder / "model" / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1  # a frozen one
    save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})


def other_settings(folder: Path) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))


def other_tokenizer(folder: Path) -> None:
    framing_tokenizer("<bos> $A").save_pretrained(folder / "model")


CHANGES = {
    "weights": (other_weights, "model_name_or_path is '.*model', whose weights are not those"),
    "settings": (other_settings, "model_name_or_path is '.*model', whose settings are not those"),
    "tokenizer": (other_tokenizer, "corpus is '.*texts', whose sequences of tokens are not those"),
    "texts": (lambda folder: (folder / "texts" / "003.txt").write_text(document(60, 77)), "corpus is '.*texts', whose sequences"),
    "held-out-text": (lambda folder: (folder / "held_out.txt").write_text(document(40, 77)), "eval_text is '.*held_out.txt', whose"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changed_inputs_are_not_resumed_over(name, own_inputs, tmp_path):
    change, message = CHANGES[name]
    run_training(own_inputs(load_best_model_at_end=True))
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    change(tmp_path)
    with refused(rf"{message}.* \(SHA-256 [0-9a-f]{{16}}, expected [0-9a-f]{{16}}\); put them back"):
        PreparedRun(own_inputs(load_best_model_at_end=True, resume_from_checkpoint=True))


def test_touched_or_unread_inputs_resume(own_inputs, tmp_path):
    whole = run_training(own_inputs())
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    for path in [*tmp_path.glob("texts/*"), *tmp_path.glob("model/*")]:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    (tmp_path / "texts" / "notes.doc").touch()
    (tmp_path / "model" / "README.md").write_text("---\n{}\n---\nanother card\n")
    (tmp_path / "held_out.txt").write_text(document(40, 77))
    again = run_training(own_inputs(resume_from_checkpoint=True))
    assert (again.steps, again.loss) == (whole.steps, whole.loss)

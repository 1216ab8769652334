"""Digests of what a run reads tell other content, and nothing else."""

import datasets
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_model

from midus_hf.training.inputs import model_hashes, rows_digest

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


class Saved:
    model_name_or_path = "model"


class New:
    model_name_or_path = None


def test_a_model_has_the_digests_of_its_weights_and_settings():
    model, same = tiny_model("llama"), tiny_model("llama")
    same.load_state_dict(model.state_dict())
    digests = model_hashes(model, Saved())["model_name_or_path"]
    assert model_hashes(same, Saved()) == {"model_name_or_path": digests} and digests.keys() == {
        "weights",
        "settings",
    }
    same.config.rope_parameters = {**same.config.rope_parameters, "rope_theta": 5.0}
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    of_weights, of_settings = (model_hashes(each, Saved())["model_name_or_path"] for each in (model, same))
    assert of_weights["weights"] != digests["weights"] and of_weights["settings"] == digests["settings"]
    assert of_settings["weights"] == digests["weights"] and of_settings["settings"] != digests["settings"]
    assert model_hashes(same, New()) == {"config_name": {"settings": of_settings["settings"]}}

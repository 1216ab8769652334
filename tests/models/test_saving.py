"""Models whose memories act are saved whole: loading gives the same bits, and so does saving where a model was loaded from."""

import shutil

import pytest
import torch
from models.cases import CASES, chosen
from tiny import logits, prompt
from transformers import AutoModel, AutoModelForCausalLM

from midus_hf.files.checkpoint_files import BANKS_FOLDER


@pytest.mark.parametrize("case", chosen())
def test_saved_model_is_loaded_bit_for_bit(native_family, case, tmp_path):
    model, arguments = CASES[case].model(native_family, tmp_path / "first", torch.float32), CASES[case].given()
    with torch.no_grad():
        model.train()(prompt(6), **arguments)  # some memories keep statistics of training
    expected, buffers = logits(model.eval(), **arguments), dict(model.named_buffers())
    model.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "first", ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    loaded.save_pretrained(tmp_path / "saved")
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for each in (loaded, again):
        assert torch.equal(logits(each, **arguments), expected)
    restored = dict(again.named_buffers())
    assert all(torch.equal(restored[name], value) for name, value in buffers.items() if not name.endswith("inv_freq"))


@pytest.mark.parametrize("case", ["chunk", "all fetched"])
def test_stack_is_saved_and_loaded_with_its_memories(case, tmp_path):
    model, arguments = CASES[case].model("llama", tmp_path / "first", torch.float32), CASES[case].given()
    model.save_pretrained(tmp_path / "saved")
    stack = AutoModel.from_pretrained(tmp_path / "saved")
    stack.save_pretrained(tmp_path / "stack")
    for each in (stack, AutoModel.from_pretrained(tmp_path / "stack")):
        with torch.no_grad():
            states = [one(prompt(), **arguments).last_hidden_state for one in (each, model.model)]
        assert torch.equal(*states)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert logits(half, **arguments).dtype == torch.bfloat16


def test_bank_is_saved_by_the_main_process_and_missed_if_absent(tmp_path):
    model, arguments = CASES["hier-kv"].model("llama", tmp_path / "first", torch.float32), CASES["hier-kv"].given()
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not (tmp_path / "other" / BANKS_FOLDER).exists()
    model.save_pretrained(tmp_path / "repository" / "inner")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "repository", subfolder="inner")
    assert torch.equal(logits(loaded, **arguments), logits(model, **arguments))
    shutil.rmtree(tmp_path / "repository" / "inner" / BANKS_FOLDER)
    with pytest.raises(ValueError, match=r"there is no memory bank in .*hier-kv"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "repository", subfolder="inner")

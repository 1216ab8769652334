"""An upscaled model is upscaled again: identity, memory entries and earlier memories survive."""

import pytest
import torch
from models.optimizer_steps import train_steps
from tiny import prompt

from midus_hf.training.optim.freezing import set_trainable
from tests.upscalers.checkpoints import (
    MEMORY_OPTIONS,
    SMALL,
    config_of,
    load,
    logits,
    read_tensors,
    same_bits,
    same_tensors,
    with_memory,
)
from tests.upscalers.methods import trained
from upscalers.request.errors import RequestError
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale


@pytest.mark.parametrize("verify", [True, False])
def test_an_upscaled_model_is_upscaled_again(family, shared_base, tmp_path, verify):
    with_memory(shared_base(family), tmp_path / "once", placement="1,4", verify=False)
    with_memory(tmp_path / "once", tmp_path / "twice", placement="0,2,8", options={"n": 4, "k": 1}, verify=verify)
    config = config_of(tmp_path / "twice")
    assert config["num_hidden_layers"] == 9
    assert config["memory"] == [
        {"type": "headwise", "site": "inserted", **MEMORY_OPTIONS, "layers": [3, 6]},
        {"type": "headwise", "site": "inserted", **MEMORY_OPTIONS, "n": 4, "k": 1, "layers": [0, 2, 8]},
    ]
    assert config["upscale"]["new_layers"] == [0, 2, 8]
    assert config["upscale"]["base_config"] == config_of(tmp_path / "once")
    assert torch.equal(logits(shared_base(family)), logits(tmp_path / "twice"))


@pytest.mark.parametrize("placement", ["distributed", "top-heavy", "bottom-heavy", "llama-pro", "0,1,2,9,10,11"])
def test_trained_memories_keep_their_place_and_their_effect(family, shared_base, tmp_path, placement):
    with_memory(shared_base(family), tmp_path / "once", placement="1,4", verify=False)
    once = trained(tmp_path / "once", tmp_path / "trained")
    assert not torch.allclose(logits(shared_base(family)), logits(once))
    report = with_memory(once, tmp_path / "twice", placement=placement)
    assert report.identity.max_abs_diff == 0.0
    model, base = load(tmp_path / "twice"), load(once)
    tokens = prompt()
    with torch.no_grad():
        assert torch.equal(base(tokens).logits, model(tokens).logits)
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(base.generate(tokens, **settings), model.generate(tokens, **settings))


def test_a_block_whose_neighbour_is_a_block_takes_the_attention_of_that_block(family, shared_base, tmp_path):
    with_memory(shared_base(family), tmp_path / "once", placement="0,5", verify=False)
    once = trained(tmp_path / "once", tmp_path / "trained")
    with_memory(once, tmp_path / "twice", placement="0,7", verify=False)
    old, new = read_tensors(once), read_tensors(tmp_path / "twice")
    for index, donor in ((0, 0), (7, 5)):
        names = {
            name.removeprefix(f"model.layers.{index}.") for name in new if name.startswith(f"model.layers.{index}.")
        }
        assert not any("o_proj" in name or "mlp" in name for name in names)
        for name in names:
            if ".memory." not in f".{name}":
                assert same_bits(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
    assert not new["model.layers.0.memory.value_bank"].any()
    assert new["model.layers.1.memory.value_bank"].any()


@pytest.mark.parametrize("method", ["midus-pkm", "midus-linear"])
def test_training_the_second_memories_leaves_the_first_to_be_stripped_to(shared_base, tmp_path, method):
    """With the batch norm of these methods too, whose statistics would move without a gradient."""
    upscale(
        base=shared_base("llama"),
        method=method,
        output=tmp_path / "once",
        options=SMALL[method],
        placement="1,4",
        verify=False,
    )
    once = trained(tmp_path / "once", tmp_path / "trained")
    with_memory(once, tmp_path / "twice", placement="0,2")
    model = load(tmp_path / "twice").train()
    report = set_trainable(model, "auto")
    train_steps(model, 2)
    model.save_pretrained(tmp_path / "twice-trained")
    assert report.layers == [0, 2]
    strip(tmp_path / "twice-trained", tmp_path / "stripped")
    assert same_tensors(tmp_path / "stripped", once)


@pytest.mark.parametrize("method", ["midus-pkm", "midus-linear"])
def test_where_the_neighbour_has_no_output_projection_the_attention_comes_from_further_off(
    family, shared_base, tmp_path, method
):
    with_memory(
        shared_base(family), tmp_path / "once", placement="0,3,6", verify=False
    )  # beside 1, between 2 and 4, beside 5
    output = tmp_path / "twice"
    upscale(base=tmp_path / "once", method=method, output=output, options=SMALL[method], placement="0,4,9")
    plan = config_of(output)["upscale"]["plan"]
    assert [plan[index]["sources"] for index in (0, 4, 9)] == [[1], [4], [5]]
    old, new = read_tensors(tmp_path / "once"), read_tensors(output)
    for index, donor in ((0, 1), (4, 4), (9, 5)):
        name = "self_attn.o_proj.weight"
        assert same_bits(new[f"model.layers.{index}.{name}"], old[f"model.layers.{donor}.{name}"])
    assert torch.equal(logits(shared_base(family)), logits(output))


def test_a_base_without_any_output_projection_is_refused(base, tmp_path):
    with_memory(base, tmp_path / "once", placement="0")
    upscale(
        base=tmp_path / "once", method="slices", output=tmp_path / "bare", options={"slices": [{"layers": [0, 1]}]}
    )
    with pytest.raises(
        RequestError, match=r"new layer 0 needs an attention with an output projection.*Choose midus-hml"
    ):
        upscale(base=tmp_path / "bare", method="midus-pkm", placement="0", dry_run=True)

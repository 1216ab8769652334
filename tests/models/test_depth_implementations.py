"""Heads that read the depth beside attention of every implementation: one that tells by what it divides is taken, else refused."""

import pytest
import torch
from models.depth_models import depth_model
from models.hosting import logits
from tiny import prompt
from transformers import AutoModel, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def told(module, query, key, value, mask, *, scaling, **_):
    """Causal attention, and the logarithm of its sum, as `flex_attention` gives it on a GPU."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
    ahead = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(ahead, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), scores.logsumexp(-1)


def untold(*given, **named):
    return told(*given, **named)[0], None


def with_attention(model, name, function, monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, function)
    # That of flex_attention is compiled, which takes fifteen seconds.
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = name
    return model


REFUSED = ["flash_attention_2", "flash_attention_3", "paged|sdpa", "own"]


def refusal(name, place=""):
    remedy = "expected attn_implementation 'sdpa' or 'eager', or 'flex_attention' on a GPU."
    if name.startswith("paged"):
        remedy = "expected `generate`, or continuous batching with attn_implementation 'sdpa' and transformers 5.23."
    return f"attention '{name}'{place} does not tell by what its softmax divides, which a memory that reads the depth needs; {remedy}"


@pytest.mark.parametrize("name", [*REFUSED, "flex_attention"])
def test_attention_that_does_not_tell_is_refused_where_it_would_run(name, monkeypatch):
    # The first layer, which reads nothing of the depth, runs it.
    model = with_attention(depth_model("llama", dtype=torch.float32), name, untold, monkeypatch)
    with pytest.raises(ValueError) as raised:
        logits(model, prompt())
    assert str(raised.value) == refusal(name, " on cpu" if name == "flex_attention" else "")


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_not_made_with_attention_that_never_tells_nor_set_to_it(family, name, tmp_path):
    model = depth_model(family, dtype=torch.float32)
    before = model.config._attn_implementation
    for one in (model, model.model):
        with pytest.raises(ValueError) as raised:
            one.set_attn_implementation(name)
        assert str(raised.value) == refusal(name) and one.config._attn_implementation == before
    if name == "flash_attention_2":
        model.save_pretrained(tmp_path)
        for kind in (AutoModelForCausalLM, AutoModel):
            with pytest.raises(ValueError) as raised:
                kind.from_pretrained(tmp_path, attn_implementation=name)
            assert str(raised.value) == refusal(name)


def test_vllm_makes_no_such_model(monkeypatch):
    """Its Transformers backend sets attention of this name in the config, and makes the model by it."""
    config = depth_model("llama").config
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "vllm", untold)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError) as raised:
        AutoModel.from_config(config)
    assert str(raised.value) == (
        "attention 'vllm' does not tell by what its softmax divides, which a memory that reads the depth needs; expected a server "
        "that runs Transformers' own attention, such as `transformers serve`, or a method without it."
    )
    config.memory = []
    AutoModel.from_config(config)


def test_what_flex_attention_tells_is_taken(monkeypatch):
    found = []
    for name in ("sdpa", "flex_attention"):
        model = depth_model("llama")
        if name == "flex_attention":
            with_attention(model, name, told, monkeypatch)
        output = model(prompt(), labels=prompt(), use_cache=False)
        output.loss.backward()
        found.append([output.logits.detach(), *(parameter.grad for parameter in model.parameters())])
    for sdpa, flex in zip(*found, strict=True):
        torch.testing.assert_close(flex, sdpa, rtol=1e-5, atol=1e-7)

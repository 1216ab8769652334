"""A memory that reads the ids of tokens gets them, however the model is run."""

import pytest
import torch
from sites import toy_methods  # noqa: F401
from sites.cases import give_values
from tiny import prompt, save_tiny_model
from transformers import AutoModelForCausalLM

from upscalers.runs.upscale import upscale

PADDED = torch.ones_like(prompt())
PADDED[0, :5] = 0


@pytest.fixture(scope="module")
def upscaled(tmp_path_factory):
    """A checkpoint whose result was compared with its base."""
    folder = tmp_path_factory.mktemp("ids")
    save_tiny_model("llama", folder / "base")
    upscale(base=folder / "base", method="toy-ids", output=folder / "model")
    return folder / "model"


@pytest.fixture
def model(upscaled):
    return give_values(AutoModelForCausalLM.from_pretrained(upscaled)).eval()


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_generation_with_a_cache_and_left_padding_reads_the_ids_of_every_pass(model, way):
    way = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **way}
    ids = prompt().masked_fill(PADDED == 0, 0)
    if "num_beams" not in way:
        alone = model.generate(prompt()[:1, 5:], use_cache=False, max_new_tokens=5, do_sample=False, pad_token_id=0)
        padded = model.generate(ids, attention_mask=PADDED, **way)
        assert torch.equal(padded[:1, 5:], alone)
    cached = model.generate(ids, attention_mask=PADDED, **way)
    way.pop("cache_implementation", None)
    assert torch.equal(cached, model.generate(ids, attention_mask=PADDED, use_cache=False, **way))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_training_reads_the_same_ids(model, reentrant):
    def gradients():
        model.zero_grad()
        model(prompt(), labels=prompt()).loss.backward()
        return [parameter.grad.clone() for name, parameter in model.named_parameters() if "row_bank" in name]

    model.train()
    plain = gradients()
    assert all(gradient.any() for gradient in plain)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(map(torch.equal, gradients(), plain))


def test_embeddings_need_the_ids_beside_them(model):
    embeddings = model.get_input_embeddings()(prompt())
    with torch.no_grad():
        expected = model(prompt()).logits
        assert torch.equal(model(inputs_embeds=embeddings, token_ids=prompt()).logits, expected)
        with pytest.raises(
            ValueError, match="inputs_embeds is passed alone, and a memory of this model reads input_ids"
        ):
            model(inputs_embeds=embeddings)

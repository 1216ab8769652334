"""A keyword argument that a memory asks for reaches it, however the model is run."""

import pytest
import torch
from sites.cases import MOST, SOME, each
from tiny import prompt

from tests.upscalers.checkpoints import load, logits

# One a row of the prompt.
SCALES = torch.tensor([0.5, -2.0])

GREEDY = {"max_new_tokens": 6, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}


def padded_prompt() -> dict[str, torch.Tensor]:
    """Two rows, the first with padding in front."""
    mask = torch.ones_like(prompt())
    mask[0, :5] = 0
    return {"input_ids": prompt().masked_fill(mask == 0, 0), "attention_mask": mask}


@each(MOST)
def test_each_row_of_a_batch_has_its_own_scale(case, family, toy_model):
    model = toy_model(case, family)
    inputs = padded_prompt()
    # What generation makes of the mask: a memory may read queries, which know their position.
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        together = model(**inputs, toy_scale=SCALES).logits
        plain = model(**inputs).logits
        for row, padding in ((0, 5), (1, 0)):
            alone = model(prompt()[row : row + 1, padding:], toy_scale=SCALES[row : row + 1]).logits[0]
            torch.testing.assert_close(together[row, padding:], alone, rtol=1e-4, atol=1e-5)
            assert (alone - plain[row, padding:]).abs().max() > 1e-3
        assert torch.equal(model(**inputs, toy_scale=torch.ones(2)).logits, plain)


@each(SOME)
def test_a_scale_of_zero_gives_the_base_again(case, family, toy_model, shared_base):
    model = toy_model(case, family)
    with torch.no_grad():
        output = model(prompt(), toy_scale=torch.zeros(2)).logits
        assert not torch.equal(model(prompt()).logits, output)
    assert torch.equal(output, logits(shared_base(family)))
    tokens = model.generate(**padded_prompt(), **GREEDY, toy_scale=torch.zeros(2))
    assert torch.equal(tokens, load(shared_base(family)).generate(**padded_prompt(), **GREEDY))


@each(MOST, is_beams=[False, True])
def test_generation_scales_each_row_and_all_of_its_beams(case, family, is_beams, toy_model):
    model, way = toy_model(case, family), BEAMS if is_beams else GREEDY
    together = model.generate(**padded_prompt(), **way, toy_scale=SCALES)
    for row, returned in enumerate(together.chunk(2)):
        # A row of the batch alone, padding included, so that nothing but the batch differs.
        inputs = {name: value[row : row + 1] for name, value in padded_prompt().items()}
        alone = model.generate(**inputs, **way, toy_scale=SCALES[row : row + 1])
        assert torch.equal(returned, alone)
    scored = {**padded_prompt(), **way, "output_scores": True, "return_dict_in_generate": True}
    scores = [model.generate(**scored, **scale).scores[-1] for scale in ({"toy_scale": SCALES}, {})]
    assert not torch.equal(*scores)


@each(SOME)
def test_the_loss_is_that_of_the_scaled_logits(case, family, toy_model):
    model = toy_model(case, family)
    with torch.no_grad():
        output = model(prompt(), labels=prompt(), toy_scale=SCALES)
    flat = output.logits[:, :-1].flatten(0, 1), prompt()[:, 1:].flatten()
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(*flat))


@each(SOME)
def test_the_stack_alone_takes_it_as_well(case, family, toy_model):
    model = toy_model(case, family)
    with torch.no_grad():
        stream = model.model(prompt(), toy_scale=SCALES).last_hidden_state
        assert not torch.equal(stream, model.model(prompt()).last_hidden_state)


@each(SOME)
def test_an_unknown_keyword_is_refused_by_generation(case, family, toy_model):
    with pytest.raises(ValueError, match=r"model_kwargs.* are not used by the model: \['toy_scal'\]"):
        toy_model(case, family).generate(prompt(), **GREEDY, toy_scal=SCALES, toy_scale=SCALES)


def test_a_keyword_that_no_memory_asks_for_is_refused_by_generation(shared_base):
    with pytest.raises(ValueError, match=r"model_kwargs.* are not used by the model: \['toy_scale'\]"):
        load(shared_base()).generate(prompt(), **GREEDY, toy_scale=SCALES)

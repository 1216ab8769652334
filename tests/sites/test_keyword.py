"""A keyword argument that a memory asks for reaches it, however the model is run."""

import pytest
import torch
from sites.cases import CASES, each
from tiny import prompt

from tests.upscalers.checkpoints import load, logits

# One a row of the prompt.
SCALES = torch.tensor([0.5, -2.0])

GREEDY = {"max_new_tokens": 6, "do_sample": False}
BEAMS = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}

MASK = torch.ones_like(prompt())
MASK[0, :5] = 0
PADDED = {"input_ids": prompt().masked_fill(MASK == 0, 0), "attention_mask": MASK}


@each()
def test_a_scale_of_zero_gives_the_base_again(case, family, toy_model, shared_base):
    model, zeros = toy_model(case, family), torch.zeros(2)
    with torch.no_grad():
        output = model(prompt(), toy_scale=zeros).logits
        assert not torch.equal(model(prompt()).logits, output)
    assert torch.equal(output, logits(shared_base(family)))
    tokens = model.generate(**PADDED, **GREEDY, toy_scale=zeros)
    assert torch.equal(tokens, load(shared_base(family)).generate(**PADDED, **GREEDY))


@each()
def test_generation_scales_each_row_and_all_of_its_beams(case, family, toy_model):
    model = toy_model(case, family)
    together = model.generate(**PADDED, **BEAMS, toy_scale=SCALES)
    for row, returned in enumerate(together.sequences.chunk(2)):
        # A row of the batch alone, padding included, so that nothing but the batch differs.
        inputs = {name: value[row : row + 1] for name, value in PADDED.items()}
        assert torch.equal(returned, model.generate(**inputs, **BEAMS, toy_scale=SCALES[row : row + 1]).sequences)
    assert not torch.equal(together.scores[-1], model.generate(**PADDED, **BEAMS).scores[-1])


def test_an_unknown_keyword_is_refused_by_generation(toy_model):
    with pytest.raises(ValueError, match=r"model_kwargs.* are not used by the model: \['toy_scal'\]"):
        toy_model(CASES["skip"], "llama").generate(prompt(), **GREEDY, toy_scal=SCALES, toy_scale=SCALES)

"""What a token gets depends on no later token, except where chapters are chosen by the whole sequence.

Models are float64: a change elsewhere may make sums run in another order, which moves a logit by rounding alone, where another
chapter moves it by 0.1. Gemma 2 takes its softmax in float32, hence the tolerance.
"""

import warnings

import pytest
import torch
from models.chapter_models import chapter_model
from tiny import prompt
from transformers import PreTrainedModel

CAUSAL = ("chunk", "prompt", "token")
TOKENS, PROMPT = 14, 5
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def prompt_mask(batch: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return (torch.arange(tokens) < PROMPT).expand(batch, tokens)


def logits(model: PreTrainedModel, tokens: torch.Tensor, **inputs) -> torch.Tensor:
    if "prompt_mask" in model.model.memory_input_names:
        inputs = {"prompt_mask": prompt_mask(*tokens.shape), **inputs}
    with torch.no_grad():
        return model(tokens, use_cache=False, **inputs).logits


def changed_from(tokens: torch.Tensor, position: int) -> torch.Tensor:
    return torch.cat([tokens[:, :position], (tokens[:, position:] + 17) % 100 + 3], dim=1)


@pytest.mark.parametrize("routing", CAUSAL)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_later_token_changes_no_earlier_logit(family, routing):
    model, tokens = chapter_model(family, routing=routing), prompt(TOKENS)
    before = logits(model, tokens)
    for position in (PROMPT, 6, 9, TOKENS - 1) if routing == "prompt" else (1, 3, 5, 6, TOKENS - 1):
        after = logits(model, changed_from(tokens, position))
        torch.testing.assert_close(after[:, :position], before[:, :position], **CLOSE)
        assert (after[:, position:] - before[:, position:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_whole_sequence_looks_ahead(family):
    model, tokens = chapter_model(family, routing="sequence"), prompt(TOKENS)
    changed = logits(model, changed_from(tokens, 9))
    assert (changed - logits(model, tokens))[:, :9].abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_token_of_the_prompt_sees_all_of_the_prompt(family):
    """What is conditioned on is known before anything is predicted; without a mask, all tokens are the prompt."""
    model, tokens = chapter_model(family, routing="prompt"), prompt(TOKENS)
    before = logits(model, tokens)
    assert (logits(model, changed_from(tokens, 2)) - before)[:, :2].abs().max() > 1e-3
    with torch.no_grad():
        unsaid = model(tokens, use_cache=False).logits
    torch.testing.assert_close(unsaid, logits(model, tokens, prompt_mask=torch.ones_like(tokens)), **CLOSE)
    assert (unsaid - before).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_whole_sequence_is_one_document_of_those_packed_in_a_row(family):
    """Positions that begin again, without a mask, as collators for packed rows give them."""
    model, tokens = chapter_model(family, routing="sequence"), prompt(TOKENS, batch=1)
    packed = logits(model, tokens, position_ids=torch.tensor([[*range(4), *range(9), *range(1)]]))
    for first, last in ((0, 4), (4, 13), (13, 14)):
        torch.testing.assert_close(packed[:, first:last], logits(model, tokens[:, first:last]), **CLOSE)


def test_documents_packed_in_a_row_have_no_prompt_of_their_own():
    model = chapter_model(routing="prompt")
    with pytest.raises(ValueError, match="a row holds several documents; expected one prompt per row"):
        logits(model, prompt(6, batch=1), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("routing", [*CAUSAL, "sequence"])
def test_a_padded_row_is_as_if_alone(native_family, routing, side):
    model = chapter_model(native_family, routing=routing)
    rows = [prompt(length, batch=1, seed=length) for length in (TOKENS, 9, 7)]
    mask = torch.zeros(3, TOKENS, dtype=torch.long)
    padded = torch.zeros(3, TOKENS, dtype=torch.long)
    for number, row in enumerate(rows):
        length = row.shape[1]
        position = slice(TOKENS - length, TOKENS) if side == "left" else slice(0, length)
        padded[number, position], mask[number, position] = row[0], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    arguments = {"prompt_mask": mask} if routing == "prompt" else {}
    together = logits(model, padded, attention_mask=mask, position_ids=positions, **arguments)
    for number, row in enumerate(rows):
        alone = logits(model, row, **({"prompt_mask": torch.ones_like(row)} if routing == "prompt" else {}))
        torch.testing.assert_close(together[number][mask[number] == 1], alone[0], **CLOSE)


def test_a_pass_that_is_not_told_what_its_prompt_is_says_what_it_takes_for_it():
    model, tokens = chapter_model(routing="prompt"), prompt(TOKENS)
    with pytest.warns(
        UserWarning, match="nothing says which tokens are the prompt: all of this pass are taken for it"
    ):
        model(tokens, use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(tokens, use_cache=False, prompt_mask=prompt_mask())
        model.generate(tokens, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_masks_of_pairs_of_tokens_tell_padding_and_documents(routing):
    """As a collator makes them that packs documents, and as transformers makes them for a padded batch."""
    model, tokens = chapter_model(routing=routing), prompt(8)[:1]
    apart = torch.cat([logits(model, tokens[:, :3]), logits(model, tokens[:, 3:])], dim=1)
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).tril().bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    together = logits(model, tokens, attention_mask=blocks, position_ids=positions)
    torch.testing.assert_close(together, apart)

    padded = torch.cat([torch.zeros_like(tokens[:, :2]), tokens], dim=1)
    seen = torch.ones(10, 10).tril().bool()
    seen[:, :2] = False
    of_padding = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    positions = torch.arange(10)[None] - 2
    shifted = logits(model, padded, attention_mask=of_padding, position_ids=positions.clamp(min=0))
    torch.testing.assert_close(shifted[:, 2:], logits(model, tokens))

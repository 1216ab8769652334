"""What a token gets depends on nothing outside its document, and on later tokens only where the whole sequence chooses chapters.

Models are float64: a change elsewhere may make sums run in another order, which moves a logit by rounding alone, where another
chapter moves it by 0.1. Gemma 2 takes its softmax in float32, hence the tolerance.
"""

import pytest
import torch
from models.chapter_models import chapter_model
from tiny import prompt
from transformers import PreTrainedModel

TOKENS = 14
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def logits(model: PreTrainedModel, tokens: torch.Tensor, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False, **inputs).logits


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_whole_sequence_looks_ahead(family):
    model, tokens = chapter_model(family, routing="sequence"), prompt(TOKENS)
    changed = torch.cat([tokens[:, :9], (tokens[:, 9:] + 17) % 100 + 3], dim=1)
    assert (logits(model, changed) - logits(model, tokens))[:, :9].abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_whole_sequence_is_one_document_of_those_packed_in_a_row(family):
    """Positions that begin again, without a mask, as collators for packed rows give them."""
    model, tokens = chapter_model(family, routing="sequence"), prompt(TOKENS, batch=1)
    packed = logits(model, tokens, position_ids=torch.tensor([[*range(4), *range(9), *range(1)]]))
    for first, last in ((0, 4), (4, 13), (13, 14)):
        torch.testing.assert_close(packed[:, first:last], logits(model, tokens[:, first:last]), **CLOSE)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("routing", ["chunk", "token", "sequence"])
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
    together = logits(model, padded, attention_mask=mask, position_ids=positions)
    for number, row in enumerate(rows):
        torch.testing.assert_close(together[number][mask[number] == 1], logits(model, row)[0], **CLOSE)


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

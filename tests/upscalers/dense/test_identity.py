"""Methods that promise identity compute what the base computes, bit for bit; the others promise nothing."""

import itertools

import pytest
import torch
from pairs import by_default

from tests.upscalers.checkpoints import logits, read_tensors, save_base
from tests.upscalers.dense.layers import layer
from tests.upscalers.dense.requests import OUTPUT_NORMS, PROMISING, REQUESTS, upscaled

BIASES = [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]


@pytest.mark.parametrize(
    ("method", "biases", "tied"),
    by_default(
        [(method, BIASES[number % 3], bool(number % 2)) for number, method in enumerate(PROMISING)]
        + [("llama-pro", biases, False) for biases in BIASES],
        itertools.product(PROMISING, BIASES, [True, False]),
    ),
    ids=str,
)
def test_biases_behind_zero_projections_are_zero_as_well(tmp_path, method, biases, tied):
    base = save_base(tmp_path / "base", tie_word_embeddings=tied, **biases)
    upscaled(base, tmp_path / "out", method, options={"identity": "auto"})
    assert torch.equal(logits(base), logits(tmp_path / "out"))


@pytest.mark.parametrize(("method", "family"), list(zip(PROMISING, 2 * OUTPUT_NORMS, strict=False)))
def test_a_norm_behind_each_projection_makes_the_identity_where_a_family_has_them(
    method, family, shared_base, tmp_path
):
    options = {**REQUESTS[method].get("options", {}), "identity": "zero_out_norm"}
    report = upscaled(shared_base(family), tmp_path / "out", method, options=options)
    assert (report.promises_identity, report.identity.checked, report.identity.max_abs_diff) == (True, "blocks", 0.0)
    assert torch.equal(logits(shared_base(family)), logits(tmp_path / "out"))
    tensors = read_tensors(tmp_path / "out")
    for index in report.new_layer_indices:
        made = layer(tensors, index)
        assert made["mlp.down_proj.weight"].any() and made["self_attn.o_proj.weight"].any()

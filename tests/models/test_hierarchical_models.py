"""Models whose memories fetch blocks: what they compute on every family, and ids and blocks that are refused."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from models.hierarchical_models import (
    FOUR_TOKENS,
    IDS,
    KINDS,
    OTHER_IDS,
    add_reference,
    entry_of,
    hierarchical_model,
)
from models.hosting import host_of, logits
from tiny import prompt, tiny_model
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from midus_hf.banks.level_file import BankError
from midus_hf.models.rotation import unrotated


@pytest.mark.parametrize("kind", [*KINDS, KINDS], ids=lambda kind: kind if isinstance(kind, str) else "all")
def test_they_compute_what_hooks_on_the_base_do(native_family, kind, tmp_path):
    """Each row its own blocks, which the rows of another batch do not see; nothing without ids."""
    model, native = hierarchical_model(native_family, kind, tmp_path), tiny_model(native_family, torch.float64)
    plain = logits(native, prompt())
    assert torch.equal(logits(model, prompt()), plain)
    for ids in (IDS, OTHER_IDS, IDS):
        handles = add_reference(native, model, ids)
        expected = logits(native, prompt())
        for handle in handles:
            handle.remove()
        assert all((expected[row] - plain[row]).abs().max() > 1e-3 for row in range(2))
        torch.testing.assert_close(logits(model, prompt(), memory_ids=ids), expected)
    assert torch.equal(logits(model, prompt()), plain)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}


def test_queries_are_unrotated_also_where_the_rotation_makes_them_longer(native_family, tmp_path):
    rope = {"full_attention": YARN, "sliding_attention": YARN} if native_family == "gemma3" else YARN
    base = {"rope_parameters": rope}
    native = tiny_model(native_family, torch.float64, **base)
    model = hierarchical_model(native_family, "hier-kv", tmp_path, base=base)
    plain = logits(native, prompt())
    assert not torch.allclose(plain, logits(tiny_model(native_family, torch.float64), prompt()))
    add_reference(native, model, IDS)
    expected = logits(native, prompt())
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(logits(model, prompt(), memory_ids=IDS), expected)


def test_a_rotation_by_complex_numbers_is_refused():
    attention = SimpleNamespace(rotates=True, family_class=Llama4TextAttention)
    message = "Llama4TextAttention rotates queries and keys by complex numbers; expected cosines and sines."
    with pytest.raises(ValueError, match=message):
        unrotated(attention, torch.randn(2, 4, 6, 8), torch.polar(torch.ones(1, 6, 4), torch.randn(1, 6, 4)))


def test_scores_are_capped_where_those_of_the_sequence_are(tmp_path):
    base = {"attn_logit_softcapping": 0.2}
    native = tiny_model("gemma2", torch.float64, **base)
    model = hierarchical_model("gemma2", "hier-kv", tmp_path, base=base)
    add_reference(native, model, IDS)
    expected = logits(native, prompt())
    torch.testing.assert_close(logits(model, prompt(), memory_ids=IDS), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_ids_read_the_generic_memory_where_options_say_so(native_family, kind, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path, without_ids="generic")
    generic = logits(model, prompt(), memory_ids=torch.full((2, 3), -1))
    assert torch.equal(logits(model, prompt()), generic)
    assert not torch.allclose(generic, logits(tiny_model(native_family, torch.float64), prompt()))
    assert not torch.allclose(generic, logits(model, prompt(), memory_ids=OTHER_IDS))
    stack = model.model(inputs_embeds=model.get_input_embeddings()(prompt()), use_cache=False).last_hidden_state
    assert torch.equal(model.lm_head(stack).shape == generic.shape and stack, model.model(prompt()).last_hidden_state)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_fetched_ahead_are_those_of_the_ids(family, kind, tmp_path):
    model = hierarchical_model(family, kind, tmp_path, torch.float32)
    blocks = model.fetch_memory(IDS)
    expected = logits(model, prompt(), memory_ids=IDS)
    assert not torch.equal(logits(model, prompt(), memory_ids=OTHER_IDS), expected)
    assert torch.equal(logits(model, prompt(), memory_blocks=blocks), expected)
    generated = model.generate(prompt(9), memory_ids=IDS, **FOUR_TOKENS)
    assert torch.equal(model.generate(prompt(9), memory_blocks=blocks, **FOUR_TOKENS), generated)


NOT_OPEN = (
    "memory 'hier-kv' fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded from its folder. "
    "Call open_banks(folder) on a model that was made otherwise."
)
BOTH = "memory_ids and memory_blocks are given; expected one of them."
EXPECTED = "expected integers [batch, 3], for each row a node of each level of the tree."


# tests/banks/test_bank_refusals.py has every message.
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[:1], "memory_ids has 1 rows; expected 2, one for each text of the batch."),
        (IDS.float(), f"memory_ids is (2, 3), torch.float32; {EXPECTED}"),
    ],
    ids=["rows", "floats"],
)
def test_ids_that_do_not_fit_are_refused(ids, message, tmp_path):
    model = hierarchical_model("llama", "hier-kv", tmp_path)
    for call in (model, model.model):
        with pytest.raises(ValueError) as raised:
            call(prompt(), memory_ids=ids)
        assert str(raised.value) == message


def test_ids_and_blocks_together_are_refused(tmp_path):
    model = hierarchical_model("llama", "hier-kv", tmp_path)
    with pytest.raises(ValueError, match=BOTH):
        model(prompt(), memory_ids=IDS, memory_blocks=model.fetch_memory(IDS))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_another_number_of_rows_are_refused(kind, tmp_path):
    model = hierarchical_model("llama", kind, tmp_path)
    for ids, rows in ((IDS[:1], 2), (IDS, 1), (torch.cat([IDS, OTHER_IDS]), 2)):
        with pytest.raises(ValueError) as raised:
            model(prompt(batch=rows), memory_blocks=model.fetch_memory(ids))
        assert str(raised.value) == (
            f"memory_blocks were fetched for {len(ids)} rows; expected {rows}, one for each text of the batch."
        )


def test_without_an_open_bank_ids_are_refused_and_texts_without_ids_are_not():
    model = host_of(tiny_model("llama"), entry_of("hier-kv"))
    assert torch.equal(logits(model, prompt()), logits(tiny_model("llama"), prompt()))
    with pytest.raises(BankError) as raised:
        model(prompt(), memory_ids=IDS)
    assert str(raised.value) == NOT_OPEN
    generic = host_of(tiny_model("llama"), entry_of("hier-kv", without_ids="generic"))
    with pytest.raises(BankError) as raised:
        generic(prompt())
    assert str(raised.value) == NOT_OPEN


def test_a_trainer_keeps_ids_since_the_signature_names_them(family):
    """It drops the columns of a dataset that `forward` does not name."""
    assert "memory_ids" in inspect.signature(type(host_of(tiny_model(family), entry_of("hier-kv"))).forward).parameters


def test_a_model_without_banks_does_not_know_ids():
    with pytest.raises(ValueError, match="memory_ids"):
        tiny_model("llama").generate(prompt(6), memory_ids=IDS, **FOUR_TOKENS)

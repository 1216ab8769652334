"""Models whose memories fetch blocks: what they compute, learn and refuse."""

import pytest
import torch
from models.cases import GREEDY
from models.gradients import gradients_of_blocks, loss_and_gradients
from models.hosting import host_of
from models.memory_models import FETCHING, IDS, OTHER_IDS, fetching_entry, hierarchical_model, stated_base
from tiny import logits, prompt, tiny_model
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from midus_hf.memories.hierarchical.training import train_blocks
from midus_hf.memories.hosting.heads import AttentionHost, unrotated
from midus_hf.memories.hosting.service import BankService, folder_of_checkpoint


def compare(family, kind, folder, **base):
    """Each row reads its own blocks, which the rows of another batch do not see; nothing without ids."""
    model, native = hierarchical_model(family, kind, folder, base=base), tiny_model(family, torch.float64, **base)
    plain = logits(native)
    assert torch.equal(logits(model), plain)
    for ids in (IDS, OTHER_IDS, IDS):
        expected = logits(stated_base(native, model, ids))
        assert all((expected[row] - plain[row]).abs().max() > 1e-3 for row in range(2))
        torch.testing.assert_close(logits(model, memory_ids=ids), expected)
    assert torch.equal(logits(model), plain)
    return model


@pytest.mark.parametrize("kind", [*FETCHING, FETCHING], ids=lambda kind: kind if isinstance(kind, str) else "all")
def test_logits_and_block_gradients_match_the_stated_base(native_family, kind, tmp_path):
    """Of each block that was fetched, and of no other."""
    model, native, tokens = compare(native_family, kind, tmp_path), tiny_model(native_family, torch.float64), prompt(7)
    train_blocks(model.banks)
    _, actual = loss_and_gradients(model, tokens, memory_ids=IDS)
    native = stated_base(native, model, IDS)
    native(tokens, labels=tokens, use_cache=False).loss.backward()
    expected = {name: value.grad for name, value in native.named_parameters()} | gradients_of_blocks(model)
    names = sorted(model.banks.layouts)
    fetched = [(name, *key) for name in names for key in ((1, -1), (1, 1), (3, -1), (3, 13))]
    assert sorted(key for key in actual if isinstance(key, tuple)) == fetched
    assert actual.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=1e-7)


def test_queries_are_unrotated_with_longer_rotations(native_family, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
    rope = {"full_attention": yarn, "sliding_attention": yarn} if native_family == "gemma3" else yarn
    compare(native_family, "hier-kv", tmp_path, rope_parameters=rope)
    if native_family == "gemma2":  # whose scores are capped, as those of the sequence
        compare(native_family, "hier-kv", tmp_path / "capped", attn_logit_softcapping=0.2)


def test_rotation_by_complex_numbers_is_refused():
    with torch.device("meta"):
        attention = Llama4TextAttention(Llama4TextConfig(), 0)
    attention.config = AttentionHost(attention, rotates=True)
    with pytest.raises(ValueError, match=r"Llama4TextAttention rotates .* by complex numbers; expected cosines"):
        unrotated(attention, torch.randn(2, 4, 6, 8), torch.polar(torch.ones(1, 6, 4), torch.randn(1, 6, 4)))


@pytest.mark.parametrize("kind", FETCHING)
def test_texts_without_ids_can_read_the_generic_memory(native_family, kind, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path, without_ids="generic")
    generic = logits(model, memory_ids=torch.full((2, 3), -1))
    assert torch.equal(logits(model), generic)
    assert not torch.allclose(generic, logits(tiny_model(native_family, torch.float64)))
    assert not torch.allclose(generic, logits(model, memory_ids=OTHER_IDS))
    embeddings = model.get_input_embeddings()(prompt())
    assert torch.equal(model(inputs_embeds=embeddings, use_cache=False).logits, generic)


@pytest.mark.parametrize("kind", FETCHING)
def test_blocks_fetched_ahead_are_those_of_the_ids(kind, native_family, shared_model):
    model = shared_model(kind, native_family)
    blocks, expected = model.fetch_memory(IDS), logits(model, memory_ids=IDS)
    assert not torch.equal(logits(model, memory_ids=OTHER_IDS), expected)
    assert torch.equal(logits(model, memory_blocks=blocks), expected)
    generated = model.generate(prompt(9), memory_ids=IDS, **GREEDY)
    assert torch.equal(model.generate(prompt(9), memory_blocks=blocks, **GREEDY), generated)


def fetched(ids):
    return lambda model: {"memory_blocks": model.fetch_memory(ids)}


# What is given to so many texts of a batch; tests/banks/test_bank_refusals.py has the refusals of ids.
REFUSED = [
    (2, lambda _: {"memory_ids": IDS[:1]}, "memory_ids has 1 rows; expected 2, one for each text"),
    (2, lambda model: {"memory_ids": IDS, **fetched(IDS)(model)}, "memory_ids and memory_blocks are given; expected"),
    (2, fetched(IDS[:1]), "memory_blocks were fetched for 1 rows; expected 2, one for each text"),
    (1, fetched(IDS), "memory_blocks were fetched for 2 rows; expected 1, one"),
    (2, fetched(torch.cat([IDS, OTHER_IDS])), "memory_blocks were fetched for 4 rows; expected 2, one"),
]


@pytest.mark.parametrize(("rows", "given", "message"), REFUSED)
def test_inputs_that_do_not_fit_the_texts_are_refused(rows, given, message, shared_model):
    model = shared_model("hier-kv")
    for call in (model, model.model):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(prompt(batch=rows), **given(model))


def test_ids_without_an_open_bank_are_refused():
    ways, base = ("none", "generic"), tiny_model("llama")
    model, generic = (host_of(base, fetching_entry("hier-kv", without_ids=way)) for way in ways)
    assert torch.equal(logits(model), logits(base))
    for each, given in ((model, {"memory_ids": IDS}), (generic, {})):
        with pytest.raises(ValueError, match=r"^memory 'hier-kv' fetches .* none is open; .* Call banks\.open\(fold"):
            logits(each, **given)


@pytest.mark.parametrize("subfolder", [None, "inner"])
def test_bank_files_of_a_hub_model_are_downloaded(subfolder, tmp_path, monkeypatch):
    request, download = {}, "midus_hf.memories.hosting.service.snapshot_download"
    monkeypatch.setattr(download, lambda name, **given: request.update(given, name=name) or str(tmp_path))
    options = {"revision": "v1", "subfolder": subfolder, "dtype": "auto", "token": None}
    given = {key: value for key, value in options.items() if value}
    folder = folder_of_checkpoint("somebody/model", given, BankService.files)
    prefix = f"{subfolder}/" if subfolder else ""
    assert request == {"name": "somebody/model", "revision": "v1", "allow_patterns": [f"{prefix}memory_bank/**"]}
    assert folder == (tmp_path / subfolder if subfolder else tmp_path)

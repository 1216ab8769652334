"""Models whose memories fetch blocks: what they compute, save and learn, and ids and blocks that are refused."""

import shutil

import pytest
import torch
from models.gradients import gradients_of_blocks, loss_and_gradients
from models.hierarchical_models import (
    FOUR_TOKENS,
    IDS,
    KINDS,
    OTHER_IDS,
    entry_of,
    hierarchical_model,
    stated_base,
)
from models.hosting import host_of, logits
from tiny import prompt, tiny_model
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from midus_hf.memories.hierarchical.training import train_blocks
from midus_hf.memories.hosting.heads import AttentionHost, unrotated
from midus_hf.memories.hosting.service import BankService, folder_of_checkpoint


def compare(family, kind, folder, **base):
    """Each row reads its own blocks, which the rows of another batch do not see; nothing without ids."""
    model, native = hierarchical_model(family, kind, folder, base=base), tiny_model(family, torch.float64, **base)
    plain = logits(native, prompt())
    assert torch.equal(logits(model, prompt()), plain)
    for ids in (IDS, OTHER_IDS, IDS):
        expected = logits(stated_base(native, model, ids), prompt())
        assert all((expected[row] - plain[row]).abs().max() > 1e-3 for row in range(2))
        torch.testing.assert_close(logits(model, prompt(), memory_ids=ids), expected)
    assert torch.equal(logits(model, prompt()), plain)
    return model


def test_queries_are_unrotated_also_where_the_rotation_makes_them_longer(native_family, tmp_path):
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16}
    rope = {"full_attention": yarn, "sliding_attention": yarn} if native_family == "gemma3" else yarn
    compare(native_family, "hier-kv", tmp_path, rope_parameters=rope)


def test_scores_are_capped_where_those_of_the_sequence_are(tmp_path):
    compare("gemma2", "hier-kv", tmp_path, attn_logit_softcapping=0.2)


def test_a_rotation_by_complex_numbers_is_refused():
    with torch.device("meta"):
        attention = Llama4TextAttention(Llama4TextConfig(), 0)
    attention.config = AttentionHost(attention, rotates=True)
    message = "Llama4TextAttention rotates queries and keys by complex numbers; expected cosines and sines."
    with pytest.raises(ValueError, match=message):
        unrotated(attention, torch.randn(2, 4, 6, 8), torch.polar(torch.ones(1, 6, 4), torch.randn(1, 6, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_without_ids_read_the_generic_memory_where_options_say_so(native_family, kind, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path, without_ids="generic")
    generic = logits(model, prompt(), memory_ids=torch.full((2, 3), -1))
    assert torch.equal(logits(model, prompt()), generic)
    assert not torch.allclose(generic, logits(tiny_model(native_family, torch.float64), prompt()))
    assert not torch.allclose(generic, logits(model, prompt(), memory_ids=OTHER_IDS))
    embeddings = model.get_input_embeddings()(prompt())
    assert torch.equal(model(inputs_embeds=embeddings, use_cache=False).logits, generic)


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
    "Call banks.open(folder) of a model that was made otherwise."
)
BOTH = "memory_ids and memory_blocks are given; expected one of them."


# tests/banks/test_bank_refusals.py has every message of ids. What is given is made by the model where it is blocks.
@pytest.mark.parametrize(
    ("given", "rows", "message"),
    [
        (lambda _: {"memory_ids": IDS[:1]}, 2, "memory_ids has 1 rows; expected 2, one for each text of the batch."),
        (lambda model: {"memory_ids": IDS, "memory_blocks": model.fetch_memory(IDS)}, 2, BOTH),
        *(
            (
                lambda model, ids=ids: {"memory_blocks": model.fetch_memory(ids)},
                rows,
                f"memory_blocks were fetched for {len(ids)} rows; expected {rows}, one for each text of the batch.",
            )
            for ids, rows in ((IDS[:1], 2), (IDS, 1), (torch.cat([IDS, OTHER_IDS]), 2))
        ),
    ],
    ids=["rows", "both", "blocks of one", "blocks of two", "blocks of four"],
)
def test_what_does_not_fit_the_texts_is_refused(given, rows, message, tmp_path):
    model = hierarchical_model("llama", "hier-kv", tmp_path)
    for call in (model, model.model):
        with pytest.raises(ValueError) as raised:
            call(prompt(batch=rows), **given(model))
        assert str(raised.value) == message


def test_without_an_open_bank_ids_are_refused_and_texts_without_ids_are_not():
    model, generic = (
        host_of(tiny_model("llama"), entry_of("hier-kv", without_ids=how)) for how in ("none", "generic")
    )
    assert torch.equal(logits(model, prompt()), logits(tiny_model("llama"), prompt()))
    for call in (lambda: model(prompt(), memory_ids=IDS), lambda: generic(prompt())):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == NOT_OPEN


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_with_its_bank_and_loaded(native_family, kind, tmp_path):
    model = hierarchical_model(native_family, kind, tmp_path / "first", torch.float32)
    expected = logits(model, prompt(), memory_ids=IDS)
    model.save_pretrained(tmp_path / "saved")
    shutil.rmtree(tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded, prompt(), memory_ids=IDS), expected)
    loaded.save_pretrained(tmp_path / "saved")  # where it was loaded from
    again, info = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(logits(again.eval(), prompt(), memory_ids=IDS), expected)
    stack = AutoModel.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        hidden = stack(prompt(), memory_ids=IDS).last_hidden_state
        assert torch.equal(hidden, model.model(prompt(), memory_ids=IDS).last_hidden_state)
    stack.save_pretrained(tmp_path / "stack")
    assert (tmp_path / "stack" / "memory_bank" / kind / "bank.json").is_file()
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert logits(half, prompt(), memory_ids=IDS).dtype == torch.bfloat16


def test_a_bank_is_saved_by_the_main_process_in_the_subfolder_of_its_model_where_it_is_missed(tmp_path):
    model = hierarchical_model("llama", "hier-kv", tmp_path / "first", torch.float32)
    model.save_pretrained(tmp_path / "by another", is_main_process=False)
    assert not (tmp_path / "by another" / "memory_bank").exists()
    model.save_pretrained(tmp_path / "repository" / "inner")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "repository", subfolder="inner").eval()
    assert torch.equal(logits(loaded, prompt(), memory_ids=IDS), logits(model, prompt(), memory_ids=IDS))
    shutil.rmtree(tmp_path / "repository" / "inner" / "memory_bank")
    with pytest.raises(ValueError, match=r"there is no memory bank in .*hier-kv"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "repository", subfolder="inner")


@pytest.mark.parametrize("subfolder", [None, "inner"])
def test_of_a_model_on_the_hub_the_files_of_its_banks_are_downloaded(subfolder, tmp_path, monkeypatch):
    request = {}
    monkeypatch.setattr(
        "midus_hf.memories.hosting.service.snapshot_download",
        lambda name, **arguments: request.update(arguments, name=name) or str(tmp_path),
    )
    options = {"revision": "v1", "subfolder": subfolder, "dtype": "auto", "token": None}
    given = {key: value for key, value in options.items() if value}
    folder = folder_of_checkpoint("somebody/model", given, BankService.files)
    prefix = f"{subfolder}/" if subfolder else ""
    assert request == {"name": "somebody/model", "revision": "v1", "allow_patterns": [f"{prefix}memory_bank/**"]}
    assert folder == (tmp_path / subfolder if subfolder else tmp_path)


def test_with_ids_it_compiles_around_the_fetching(tmp_path):
    torch._dynamo.reset()
    sizes = {"base": {"num_hidden_layers": 2}, "layers": [1]}
    model, tokens = hierarchical_model("llama", "hier-ffn", tmp_path, torch.float32, **sizes), prompt(6)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, tokens, memory_ids=IDS), logits(model, tokens, memory_ids=IDS))


@pytest.mark.parametrize("kind", [*KINDS, KINDS], ids=lambda kind: kind if isinstance(kind, str) else "all")
def test_logits_and_gradients_of_blocks_are_those_of_hooks_on_the_base(native_family, kind, tmp_path):
    """Of each block that was fetched, and of no other."""
    model, native, tokens = compare(native_family, kind, tmp_path), tiny_model(native_family, torch.float64), prompt(7)
    train_blocks(model.banks)
    _, actual = loss_and_gradients(model, tokens, memory_ids=IDS)
    native = stated_base(native, model, IDS)
    native(tokens, labels=tokens, use_cache=False).loss.backward()
    expected = {name: value.grad for name, value in native.named_parameters()} | gradients_of_blocks(model)
    names = sorted(model.banks.layouts)
    fetched = [(name, *key) for name in names for key in ((1, -1), (1, 1), (3, -1), (3, 13))]
    assert sorted(key for key in actual if isinstance(key, tuple)) == fetched and actual.keys() == expected.keys()
    for key, gradient in expected.items():
        assert gradient.any()
        torch.testing.assert_close(actual[key], gradient, rtol=1e-4, atol=1e-7)

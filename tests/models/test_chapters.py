"""Layers that share a bank of chapters, and generation with chapters chosen by more than a token, beyond what every memory does.

Models are float64, so that passes that compute in another order still choose the same chapters and tokens.
"""

import warnings

import pytest
import torch
from models.gradients import enable_checkpointing
from models.hosting import by_full_passes
from models.memory_models import chapter_model, chapter_pair, chapters_of
from tiny import logits, prompt
from transformers import DynamicCache

from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.hosting.state import MemoryState

BANK = "model.memory_tables.chapters.0.bank"


def gradients(sparse: bool = False, checkpointing: bool = False, **options) -> dict[str, torch.Tensor]:
    """Gradients of the memories of four layers, after two passes of few tokens."""
    model = chapter_model(layers=(0, 1, 2, 3), memory_tokens=192, chapters=96, **options).train()
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    for memory in chapters_of(model):
        memory.sparse_gradient = sparse
    for seed in (1, 2):
        tokens = prompt(9, seed=seed)
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("options", [{}, {"routing": "sequence"}, {"share": "every:2"}, {"share": "none"}], ids=str)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_sparse_bank_gradients_equal_dense_ones(options, checkpointing):
    expected = gradients(**options)
    rows = gradients(sparse=True, checkpointing=checkpointing, **options)
    assert expected.keys() == rows.keys()
    for name, gradient in expected.items():
        assert rows[name].is_sparse == name.endswith(".bank")
        torch.testing.assert_close(rows[name].to_dense() if rows[name].is_sparse else rows[name], gradient)
    read, table = next((rows[name], gradient) for name, gradient in expected.items() if name.endswith(".bank"))
    assert 0 < read.coalesce().indices().shape[1] < len(table) / 2


def test_decode_cache_follows_a_replaced_bank():
    model = chapter_model()
    changed = model.get_parameter(BANK).detach() + 1
    with torch.no_grad(), decode_cache(model):
        before = logits(model, prompt(7))
        shifted = torch.func.functional_call(model, {BANK: changed}, (prompt(7),)).logits
    assert not torch.allclose(shifted, before, atol=1e-4)
    model.model.memory_tables["chapters"]["0"].bank = torch.nn.Parameter(changed)
    torch.testing.assert_close(logits(model, prompt(7)), shifted)
    with decode_cache(model):
        torch.testing.assert_close(logits(model, prompt(7)), shifted)


@pytest.mark.parametrize("routing", ["chunk", "sequence"])
def test_pair_masks_show_padding_and_documents(routing):
    """As a collator makes them that packs documents, and as transformers makes them for a padded batch."""
    model, tokens = chapter_model(routing=routing), prompt(8)[:1]
    apart = torch.cat([logits(model, tokens[:, :3]), logits(model, tokens[:, 3:])], dim=1)
    blocks = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).tril().bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(logits(model, tokens, attention_mask=blocks, position_ids=positions), apart)

    padded = torch.cat([torch.zeros_like(tokens[:, :2]), tokens], dim=1)
    seen = torch.ones(10, 10).tril().bool()
    seen[:, :2] = False
    of_padding = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    positions = (torch.arange(10)[None] - 2).clamp(min=0)
    shifted = logits(model, padded, attention_mask=of_padding, position_ids=positions)
    torch.testing.assert_close(shifted[:, 2:], logits(model, tokens))


CAUSAL = ("chunk", "token")
PROMPT, NEW = 7, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
AHEAD = "a memory of this model chooses by the whole sequence, later tokens included"
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


@pytest.mark.parametrize("cache", CACHES)
def test_whole_sequence_routing_generates_by_full_passes(native_family, cache):
    model, tokens = chapter_model(native_family, routing="sequence"), prompt(PROMPT)
    with pytest.warns(UserWarning, match=AHEAD):
        generated = model.generate(tokens, **GREEDY, **CACHES[cache], return_dict_in_generate=True)
    assert torch.equal(generated.sequences, by_full_passes(model, tokens, NEW)) and generated.get(CACHE) is None
    if native_family == "gemma2":  # whose eager attention gives NaN for rows that are padding alone, in float64
        return
    rows = [prompt(length, batch=1, seed=length) for length in (PROMPT, 1)]
    padded = torch.cat([torch.nn.functional.pad(row, (PROMPT - row.shape[1], 0)) for row in rows])
    with pytest.warns(UserWarning, match=AHEAD):
        together = model.generate(padded, attention_mask=(padded != 0).long(), **GREEDY, **CACHES[cache])
    for row, tokens in zip(rows, together, strict=True):
        assert torch.equal(tokens[PROMPT - row.shape[1] :], by_full_passes(model, row, NEW)[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("routing", CAUSAL)
def test_embeddings_may_stand_for_the_prompt(routing, cache):
    model = chapter_model(routing=routing)
    embedded = model.get_input_embeddings()(prompt(PROMPT))
    expected = by_full_passes(model, prompt(PROMPT), NEW)[:, PROMPT:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY, **CACHES[cache]), expected)


@pytest.mark.parametrize("routing", CAUSAL)
def test_conversation_continues_from_its_cache_also_in_parts(family, routing):
    """At first an empty cache without a config."""
    model = chapter_model(family, routing=routing)
    first = model.generate(prompt(PROMPT), **GREEDY, **{CACHE: DynamicCache()}, return_dict_in_generate=True)
    further = torch.cat([first.sequences, prompt(4, seed=6)], dim=1)
    # Else zeros among the tokens are taken for padding.
    settings = {**GREEDY, "attention_mask": torch.ones_like(further)}
    expected = by_full_passes(model, further, NEW)
    assert torch.equal(model.generate(further, **settings, **{CACHE: first[CACHE]}), expected)
    assert torch.equal(model.generate(further, **settings, prefill_chunk_size=3), expected)


def test_state_is_as_large_as_a_token_and_absent_in_training():
    model = chapter_model(routing="chunk")
    cache = model(prompt(PROMPT), use_cache=True)[CACHE]
    states = [layer for layer in cache.layers if isinstance(layer, MemoryState)]
    assert [(state.name, state.layer) for state in states] == [("chapters", 1), ("chapters", 3)]
    assert all(tensor.shape in ((2,), (2, 32)) for state in states for tensor in state.kept.values())
    assert cache.get_seq_length() == PROMPT
    in_training = model.train()(prompt(PROMPT), labels=prompt(PROMPT))[CACHE]
    assert not any(isinstance(layer, MemoryState) for layer in getattr(in_training, "layers", []))


def filled_by(model):
    return {CACHE: model(prompt(PROMPT), use_cache=True)[CACHE]}


REFUSED = {
    "of another model": (
        "chunk",
        lambda base, model: model(prompt(1), **filled_by(base)),
        "cache holds tokens, but not what",
    ),
    "without layers": (
        "chunk",
        lambda _, model: model(prompt(1), **{CACHE: ((),)}),
        "a tuple, which cannot hold memory states",
    ),
    "looking ahead": (
        "sequence",
        lambda _, model: model.generate(prompt(PROMPT), **{CACHE: DynamicCache(config=model.config)}),
        "a cache is passed, .* expected none",
    ),
    "of embeddings": (
        "sequence",
        lambda _, model: model.generate(inputs_embeds=model.get_input_embeddings()(prompt(PROMPT)), **GREEDY),
        "inputs_embeds is given, .* expected input_ids",
    ),
    "continued": (
        "sequence",
        lambda _, model: model(prompt(1), **filled_by(model)),
        "routing is 'sequence', .* holds a part",
    ),
}


@pytest.mark.parametrize("cache", REFUSED)
def test_cache_that_lacks_what_a_pass_needs_is_refused(cache):
    routing, call, message = REFUSED[cache]
    base, model = chapter_pair(routing=routing)
    with pytest.raises(ValueError, match=message):
        call(base, model)
    if routing == "chunk":
        model(prompt(1), **{CACHE: DynamicCache(config=model.config)})

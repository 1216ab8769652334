"""Layers that share a bank of chapters, and chapters chosen by more than a token, in float64."""

import pytest
import torch
from models.gradients import enable_checkpointing
from models.hosting import by_full_passes
from models.memory_models import chapter_model, chapters_of
from tiny import logits, prompt, tiny_model
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
    expected, rows = gradients(**options), gradients(sparse=True, checkpointing=checkpointing, **options)
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
    padded, seen = torch.cat([torch.zeros_like(tokens[:, :2]), tokens], dim=1), torch.ones(10, 10).tril().bool()
    seen[:, :2] = False
    of_padding = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~seen, torch.finfo(torch.float64).min)
    positions = (torch.arange(10)[None] - 2).clamp(min=0)
    shifted = logits(model, padded, attention_mask=of_padding, position_ids=positions)
    torch.testing.assert_close(shifted[:, 2:], logits(model, tokens))


PROMPT, NEW = 7, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_whole_sequence_routing_generates_by_full_passes(cache):
    model, rows = chapter_model(routing="sequence"), [prompt(length, 1, length) for length in (PROMPT, 1)]
    padded = torch.cat([torch.nn.functional.pad(row, (PROMPT - row.shape[1], 0)) for row in rows])
    with pytest.warns(UserWarning, match="chooses by the whole sequence, later tokens included"):
        settings = {"attention_mask": (padded != 0).long(), "return_dict_in_generate": True, **GREEDY, **cache}
        generated = model.generate(padded, **settings)
    assert generated.get(CACHE) is None
    for row, tokens in zip(rows, generated.sequences, strict=True):
        assert torch.equal(tokens[PROMPT - row.shape[1] :], by_full_passes(model, row, NEW)[0])


def test_state_is_as_large_as_a_token_and_absent_in_training():
    model = chapter_model(routing="chunk")
    cache = model(prompt(PROMPT), use_cache=True)[CACHE]
    states = [layer for layer in cache.layers if isinstance(layer, MemoryState)]
    assert [(state.name, state.layer) for state in states] == [("chapters", 1), ("chapters", 3)]
    assert all(tensor.shape in ((2,), (2, 32)) for state in states for tensor in state.kept.values())
    assert cache.get_seq_length() == PROMPT
    in_training = model.train()(prompt(PROMPT), labels=prompt(PROMPT))[CACHE]
    assert not any(isinstance(layer, MemoryState) for layer in getattr(in_training, "layers", []))


def filled(model):
    return model(prompt(PROMPT), use_cache=True)[CACHE]


REFUSED = {
    "another model's": ("chunk", lambda base, _: filled(base), "cache holds tokens, but not what"),
    "without layers": ("chunk", lambda *_: ((),), "a tuple, which cannot hold memory states"),
    "continued": ("sequence", lambda _, model: filled(model), "routing is 'sequence', .* holds a part"),
}


@pytest.mark.parametrize(("routing", "cache", "message"), REFUSED.values(), ids=REFUSED)
def test_cache_that_lacks_what_a_pass_needs_is_refused(routing, cache, message):
    base, model = tiny_model("llama", torch.float64), chapter_model(routing=routing)
    with pytest.raises(ValueError, match=message):
        model(prompt(1), **{CACHE: cache(base, model)})
    if routing == "chunk":
        model(prompt(1), **{CACHE: DynamicCache(config=model.config)})


def test_whole_sequence_routing_refuses_caches_and_embeddings():
    model = chapter_model(routing="sequence")
    with pytest.raises(ValueError, match=r"a cache is passed, .* expected none"):
        model.generate(prompt(PROMPT), **{CACHE: DynamicCache(config=model.config)})
    with pytest.raises(ValueError, match=r"inputs_embeds is given, .* expected input_ids"):
        model.generate(inputs_embeds=model.get_input_embeddings()(prompt(PROMPT)), **GREEDY)

"""Generation is what full passes give, token by token, for every routing and every cache.

Models are float64, so that passes that compute in another order still choose the same chapters and tokens.
"""

import contextlib
import warnings

import pytest
import torch
from models.chapter_models import chapter_model, chapter_pair
from tiny import prompt
from transformers import DynamicCache, PreTrainedModel, StaticCache

from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.hosting.state import MemoryState

CAUSAL = ("chunk", "token")
PROMPT, NEW = 7, 6
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def by_full_passes(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Greedy tokens, each by a pass over all tokens before it."""
    for _ in range(NEW):
        with torch.no_grad():
            last = model(tokens, use_cache=False).logits[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], dim=1)
    return tokens


def looking_ahead(routing: str):
    """The warning that generation with a memory that looks ahead gives."""
    if routing == "sequence":
        return pytest.warns(
            UserWarning, match="a memory of this model chooses by the whole sequence, later tokens included"
        )
    return contextlib.nullcontext()


CACHES = {"dynamic": {}, "static": {"cache_implementation": "static"}, "none": {"use_cache": False}}


@pytest.mark.parametrize("cache", CACHES)
def test_looking_ahead_generates_what_full_passes_do_and_says_that_it_looks(native_family, cache):
    model = chapter_model(native_family, routing="sequence")
    with looking_ahead("sequence"):
        tokens = model.generate(prompt(PROMPT), **GREEDY, **CACHES[cache])
    assert torch.equal(tokens, by_full_passes(model, prompt(PROMPT)))
    if native_family == "gemma2":  # whose eager attention gives NaN for rows that are padding alone, in float64
        return
    rows = [prompt(length, batch=1, seed=length) for length in (PROMPT, 1)]
    padded = torch.cat([torch.nn.functional.pad(row, (PROMPT - row.shape[1], 0)) for row in rows])
    with looking_ahead("sequence"):
        together = model.generate(padded, attention_mask=(padded != 0).long(), **GREEDY, **CACHES[cache])
    for row, tokens in zip(rows, together, strict=True):
        assert torch.equal(tokens[PROMPT - row.shape[1] :], by_full_passes(model, row)[0])


@pytest.mark.parametrize("routing", CAUSAL)
def test_only_looking_ahead_is_warned_of(routing):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chapter_model(routing=routing).generate(prompt(PROMPT), max_new_tokens=1, do_sample=False)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("routing", CAUSAL)
def test_embeddings_may_stand_for_the_prompt(routing, cache):
    model = chapter_model(routing=routing)
    embedded = model.get_input_embeddings()(prompt(PROMPT))
    expected = by_full_passes(model, prompt(PROMPT))[:, PROMPT:]
    assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY, **CACHES[cache]), expected)


@pytest.mark.parametrize("routing", CAUSAL)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_conversation_goes_on_from_its_cache(family, routing):
    model = chapter_model(family, routing=routing)
    first = model.generate(prompt(PROMPT), **GREEDY, return_dict_in_generate=True)
    further = torch.cat([first.sequences, prompt(4, seed=6)], dim=1)
    second = model.generate(further, **GREEDY, **{CACHE: first[CACHE]})
    assert torch.equal(second, by_full_passes(model, further))


@pytest.mark.parametrize("routing", CAUSAL)
def test_a_prompt_in_parts_gives_the_tokens_of_a_whole_one(routing):
    model = chapter_model(routing=routing)
    expected = model.generate(prompt(PROMPT), **GREEDY)
    for size in (PROMPT, 3):
        assert torch.equal(model.generate(prompt(PROMPT), **GREEDY, prefill_chunk_size=size), expected)


def test_no_state_is_kept_where_tokens_choose_for_themselves():
    base, model = chapter_pair(routing="token")
    cache = base(prompt(PROMPT), use_cache=True)[CACHE]
    assert model(prompt(1), **{CACHE: cache})[CACHE].get_seq_length() == PROMPT + 1
    assert not any(isinstance(layer, MemoryState) for layer in cache.layers)


def test_looking_ahead_keeps_no_cache():
    model = chapter_model(routing="sequence")
    with looking_ahead("sequence"):
        generated = model.generate(prompt(PROMPT), **GREEDY, return_dict_in_generate=True)
    assert generated.get(CACHE) is None


def test_what_is_kept_is_as_large_as_a_token():
    model = chapter_model(routing="chunk")
    cache = model(prompt(PROMPT), use_cache=True)[CACHE]
    states = [layer for layer in cache.layers if isinstance(layer, MemoryState)]
    assert [(state.name, state.layer) for state in states] == [("chapters", 1), ("chapters", 3)]
    assert all(tensor.shape in ((2,), (2, 32)) for state in states for tensor in state.kept.values())
    assert cache.get_seq_length() == PROMPT


def test_a_pass_that_trains_keeps_nothing():
    model = chapter_model(routing="chunk").train()
    assert not any(isinstance(layer, MemoryState) for layer in getattr(model(prompt(PROMPT))[CACHE], "layers", []))


def test_a_static_cache_is_one_for_every_length():
    """Compiled steps read it where it lies: another sequence writes over what is kept."""
    model = chapter_model(routing="chunk")
    cache = StaticCache(model.config, max_cache_len=20)
    first = model(prompt(PROMPT), **{CACHE: cache})[CACHE]
    (state, _) = [layer for layer in first.layers if isinstance(layer, MemoryState)]
    pointers = {name: tensor.data_ptr() for name, tensor in state.kept.items()}
    model(prompt(3), **{CACHE: cache})
    cache.reset()
    assert not state.kept
    model(prompt(5), **{CACHE: cache})
    assert {name: tensor.data_ptr() for name, tensor in state.kept.items()} == pointers


def test_an_empty_cache_without_a_config_will_do(native_family):
    model = chapter_model(native_family, routing="chunk")
    generated = model.generate(prompt(PROMPT), **{CACHE: DynamicCache()}, **GREEDY)
    assert torch.equal(generated, model.generate(prompt(PROMPT), **GREEDY))


def filled_by(model):
    return {CACHE: model(prompt(PROMPT), use_cache=True)[CACHE]}


REFUSED = {
    "of another model": (
        "chunk",
        lambda base, model: model(prompt(1), **filled_by(base)),
        "the cache holds tokens, but not what the memories of this model keep of them",
    ),
    "without layers": (
        "chunk",
        lambda base, model: model(prompt(1), **{CACHE: ((),)}),
        "the cache is a tuple, which has no place for what memories keep",
    ),
    "looking ahead": (
        "sequence",
        lambda base, model: model.generate(prompt(PROMPT), **{CACHE: DynamicCache(config=model.config)}),
        "a cache is passed, but a memory of this model looks at the whole sequence",
    ),
    "of embeddings, looking ahead": (
        "sequence",
        lambda base, model: model.generate(inputs_embeds=model.get_input_embeddings()(prompt(PROMPT)), **GREEDY),
        "inputs_embeds is given, but a memory of this model looks at the whole sequence",
    ),
    "continued, looking ahead": (
        "sequence",
        lambda base, model: model(prompt(1), **filled_by(model)),
        "routing is 'sequence', which looks at the whole sequence, and a cache holds a part",
    ),
}


@pytest.mark.parametrize("cache", REFUSED)
def test_a_cache_that_does_not_hold_what_a_pass_needs_is_refused(cache):
    routing, call, message = REFUSED[cache]
    base, model = chapter_pair(routing=routing)
    with pytest.raises(ValueError, match=message):
        call(base, model)
    if routing == "chunk":
        model(prompt(1), **{CACHE: DynamicCache(config=model.config)})

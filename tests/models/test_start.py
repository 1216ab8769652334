"""A model whose memories do not act yet computes what its base does, bit for bit, and learns from the first step on."""

import copy
import itertools

import pytest
import torch
from models.cases import CASES, GREEDY, INSERTED, chosen_in_turn
from models.gradients import loss_and_gradients
from models.hosting import host_of
from tiny import WINDOW, logits, prompt, tiny_model
from transformers import DynamicCache, StaticCache

from midus_hf.config.declared_tensors import ZEROS
from midus_hf.memories.decode_cache import decode_cache
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.memories.module import MemoryModule

BASES = [name for name, case in CASES.items() if case.is_base_at_first]
WAYS = list(itertools.product([torch.float32, torch.bfloat16], ["eager", "sdpa"]))


@pytest.fixture
def pair(native_family, tmp_path):
    """Make a base and the model of a case that does not act yet."""

    def made(case, dtype=torch.float32, attention=None):
        both = tiny_model(native_family, dtype), CASES[case].model(native_family, tmp_path, dtype, acting=False)
        for each in both if attention else ():
            # The scores of Gemma-2 are capped, which sdpa cannot.
            each.set_attn_implementation("eager" if native_family == "gemma2" else attention)
        return both

    return made


@pytest.mark.parametrize(("case", "way"), chosen_in_turn(WAYS, BASES), ids=str)
def test_its_logits_are_those_of_the_base(pair, case, way):
    base, model = pair(case, *way)
    tokens, arguments = prompt(), CASES[case].given()
    mask = (torch.arange(tokens.shape[1]) >= torch.tensor([[5], [0]])).long()
    expected = logits(base, tokens)
    assert torch.equal(logits(model, tokens), expected) and torch.equal(logits(model, tokens, **arguments), expected)
    padded = logits(base, tokens, attention_mask=mask)
    assert torch.equal(logits(model, tokens, attention_mask=mask, **arguments)[mask == 1], padded[mask == 1])
    with torch.no_grad():
        labels = CASES[case].of_training(tokens)["labels"]
        of_base, actual = (each(tokens, labels=labels, logits_to_keep=0) for each in (base, model))
        embeddings = model.get_input_embeddings()(tokens)
        assert torch.equal(actual.loss, of_base.loss)
        assert torch.equal(model(tokens, logits_to_keep=3).logits, base(tokens, logits_to_keep=3).logits)
        ids = {"token_ids": tokens} if CASES[case].reads_ids else {}
        assert torch.equal(model(inputs_embeds=embeddings, **ids).logits, base(inputs_embeds=embeddings).logits)


@pytest.mark.parametrize(("case", "mode"), chosen_in_turn([torch.no_grad, torch.inference_mode], BASES))
def test_it_generates_what_the_base_does_with_any_cache(pair, case, mode):
    """By steps whose memories are called directly, with what they keep and without."""
    base, model = pair(case)
    row, longest, arguments = prompt(3, batch=1), WINDOW + 4, CASES[case].given()
    padded = torch.cat([prompt(longest, batch=1, seed=1), torch.nn.functional.pad(row, (longest - 3, 0))])
    settings = {"attention_mask": (padded != 0).long(), "return_dict_in_generate": True, "output_logits": True}
    for cache in ("dynamic", "static"):
        settings["cache_implementation"] = cache
        with mode():
            expected = base.generate(padded, **settings, **GREEDY)
            actual = model.generate(padded, **settings, **GREEDY, **arguments)
            for step, of_base in zip(actual.logits, expected.logits, strict=True):
                assert torch.equal(step, of_base)
    parts = prompt(8).split((6, 1, 1), dim=1)
    for made in (
        lambda each: StaticCache(each.config, max_cache_len=8),
        lambda each: DynamicCache(config=each.config),
    ):
        with mode(), decode_cache(model):
            caches = made(base), made(model)
            for part in parts:
                of_base = base(part, **{CACHE: caches[0]}).logits
                assert torch.equal(model(part, **{CACHE: caches[1]}, **arguments).logits, of_base)


def test_new_model_has_the_declared_initial_values(native_family):
    """Build depth attention, whose first layer holds linear layers alone."""
    native = tiny_model(native_family)
    model = host_of(native, {"type": "moda", "layers": [0, 1, 2]})
    fresh = type(model)(model.config)
    for memory in (module for module in fresh.modules() if isinstance(module, MemoryModule)):
        for name, tensor in memory.declared.items():
            assert (tensor.initial == ZEROS) == (not memory.declared_tensor(name).any())


@pytest.mark.parametrize("case", [name for name in BASES if name.startswith("depth")])
def test_depth_learns_through_values_and_gates_first(pair, case):
    _, model = pair(case)
    new = {name: value for name, value in model.train().named_parameters() if ".memories." in name}
    gates = {name for name in new if name.endswith("depth_gate")}
    is_added = not any(word in case for word in ("reused", "attention"))
    values = {name for name in new if "_value" in name} if is_added else set()
    started = {name: copy.deepcopy(value.detach()) for name, value in new.items()}
    optimizer = torch.optim.SGD(new.values(), lr=1.0)
    first = loss_and_gradients(model, prompt())[1]
    learn = {name for name in new if first[name].any()}
    assert values <= learn <= values | gates and learn
    optimizer.step()
    with torch.no_grad():
        for name in gates:  # as optimisers do that step by the sign: every head begins somewhere
            new[name].copy_((new[name] + 0.1 * (new[name] == 0)).abs())
    second = loss_and_gradients(model, prompt())[1]
    assert all(second[name].any() for name in new)
    optimizer.step()
    assert not [name for name, value in new.items() if torch.equal(value, started[name])]


@pytest.mark.parametrize("case", INSERTED)
def test_inserted_memory_learns_first_by_its_values(pair, case):
    base, model = pair(case)
    (entry,) = model.config.memories().entries
    learn = {name for name, gradient in loss_and_gradients(model.train(), prompt())[1].items() if gradient.any()}
    values = {f"model.layers.{layer}.memory.value_bank" for layer in entry.layers}
    assert {name for name in learn if name.startswith(tuple(f"model.layers.{at}." for at in entry.layers))} == values
    torch.optim.SGD([model.get_parameter(name) for name in values], lr=1.0).step()
    assert not torch.equal(logits(model.eval(), prompt()), logits(base, prompt()))

"""What is counted is what each memory retrieves, once a token, and recording it changes nothing."""

import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from look.memory_models import ENTRIES, enable_checkpointing, has_hooks, memories, memory_model
from pairs import by_default
from tiny import prompt
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from midus_hf.config.memory_types import MEMORY_TYPES
from midus_hf.look.usage import (
    MemoryUsage,
    Usage,
    counted_types,
    record_usage,
    summarise,
    types_with_slots,
)
from midus_hf.look.usage_report import usage_curves
from midus_hf.look.watched_models import MemoryPlace
from midus_hf.memory.registry import MEMORY_MODULES


def read_inputs(model, tokens) -> dict[int, torch.Tensor]:
    """What each memory reads in one forward pass, `[B, T, W]` by layer."""
    inputs, handles = {}, []
    for layer, memory in memories(model).items():
        hook = memory.register_forward_pre_hook(lambda _, given, layer=layer: inputs.update({layer: given[0]}))
        handles.append(hook)
    with torch.no_grad():
        model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return inputs


def counted_by_hand(memory, attention_output) -> torch.Tensor:
    """Counts `[H, N]`: score every slot of every head for each token in float64, and take the k largest."""
    query = memory.queries(attention_output, track_statistics=False).double()
    counts = torch.zeros(memory.num_heads, memory.num_slots, dtype=torch.int64)
    for token in query.flatten(0, -3):  # [H, width]
        for head, asked in enumerate(token):
            if hasattr(memory, "slot_keys"):
                scores = memory.slot_keys[head].double() @ asked
            else:
                row, column = asked.chunk(2)
                rows = memory.row_keys[head].double() @ row
                columns = memory.column_keys[head].double() @ column
                scores = torch.stack([i + j for i in rows for j in columns])
            for slot in scores.argsort(descending=True)[: memory.k].tolist():
                counts[head, slot] += 1
    return counts


@pytest.mark.parametrize("entry", ENTRIES)
def test_counts_are_those_of_every_slot_scored_and_sorted(family, entry):
    model = memory_model(family, entry)
    batches = [prompt(length=6, seed=seed) for seed in (1, 2)]
    with record_usage(model) as usage, torch.no_grad():
        for tokens in batches:
            model(tokens, use_cache=False)
    expected = {}
    for tokens in batches:
        for layer, attention_output in read_inputs(model, tokens).items():
            counts = counted_by_hand(memories(model)[layer], attention_output)
            place = MemoryPlace(layer)
            expected[place] = expected.get(place, 0) + counts
    assert usage.counts.keys() == expected.keys()
    for place, counts in usage.counts.items():
        assert counts.dtype == torch.int64
        assert torch.equal(counts, expected[place])


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("entry", ["headwise", "product-key"])
def test_what_checkpointing_computes_again_is_not_counted_again(family, entry, use_reentrant):
    counts = []
    for checkpointing in (False, True):
        model = memory_model(family, entry).train()
        if checkpointing:
            enable_checkpointing(model, use_reentrant)
        with record_usage(model) as usage:
            model(prompt(), labels=prompt(), use_cache=False).loss.backward()
        counts.append(usage.counts)
    assert all(torch.equal(counts[0][layer], counts[1][layer]) for layer in counts[0])
    assert all(of_layer.sum() == prompt().numel() * 4 * 3 for of_layer in counts[0].values())


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("bf16", [False, True])
def test_recording_changes_no_gradient_and_leaves_nothing_behind(entry, bf16):
    results = []
    for recorded in (False, True):
        model = memory_model("llama", entry).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if recorded:
                before = set(vars(memories(model)[1]))
                with record_usage(model):
                    assert has_hooks(model)
                    loss = model(prompt(), labels=prompt(), use_cache=False).loss
                assert not has_hooks(model) and set(vars(memories(model)[1])) == before
            else:
                loss = model(prompt(), labels=prompt(), use_cache=False).loss
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append((loss, gradients, model.state_dict()))
    (loss, gradients, state), (recorded_loss, recorded_gradients, recorded_state) = results
    assert torch.equal(loss, recorded_loss)
    assert all(torch.equal(gradient, recorded_gradients[name]) for name, gradient in gradients.items())
    assert all(torch.equal(tensor, recorded_state[name]) for name, tensor in state.items())


def compiled(model, what: str):
    """The model to call, and the model to record, with a part of it compiled."""
    if what == "module":
        wrapped = torch.compile(model, backend="aot_eager")
        return wrapped, wrapped
    if what == "function":
        return torch.compile(lambda tokens: model(tokens), backend="aot_eager"), model
    if what == "in place":
        model.compile(backend="aot_eager")
    elif what == "forward":
        model.forward = torch.compile(model.forward, backend="aot_eager")
    elif what == "layers":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
    else:
        plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=what == "accelerate, by region")
        model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare_model(model)
    return model, model


COMPILED = ("module", "function", "in place", "forward", "layers", "accelerate", "accelerate, by region")


@pytest.mark.parametrize("what", by_default(["module", "accelerate, by region"], COMPILED))
def test_a_compiled_model_is_counted_like_any_other(what):
    tokens = prompt(length=6)
    with torch.no_grad():
        model = memory_model("llama")
        with record_usage(model) as plain:
            plain_logits = model(tokens).logits
        call, recorded = compiled(model, what)
        call(tokens)  # so that it has been compiled before there is a hook
        with record_usage(recorded) as usage:
            logits = call(tokens).logits
        again = call(tokens).logits
    assert all(torch.equal(counts, plain.counts[layer]) and counts.any() for layer, counts in usage.counts.items())
    assert torch.equal(logits, plain_logits)
    torch.testing.assert_close(again, plain_logits)
    assert not has_hooks(model)


def test_counts_can_start_again_and_be_paused():
    model = memory_model("llama")
    with record_usage(model) as usage, torch.no_grad():
        model(prompt(length=9))
        usage.reset()
        with usage.paused():
            model(prompt(length=9))
        assert all(not counts.any() for counts in usage.counts.values())
        model(prompt(length=2, batch=1))
    assert all(counts.sum() == 2 * 4 * 3 for counts in usage.counts.values())


def test_two_recordings_at_a_time_do_not_disturb_each_other():
    model = memory_model("llama")
    with record_usage(model) as outer, torch.no_grad():
        with record_usage(model) as inner:
            model(prompt(length=4, batch=1))
        model(prompt(length=4, batch=1))
    for layer, counts in outer.counts.items():
        assert torch.equal(counts, 2 * inner.counts[layer])


def test_a_wrapped_memory_is_known_by_its_layer_and_its_name():
    model = memory_model("llama")
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    with record_usage(model) as usage, torch.no_grad():
        model(prompt(), use_cache=False)
    assert list(map(str, usage.counts)) == ["1", "3"] and all(counts.any() for counts in usage.counts.values())
    assert str(MemoryPlace(3, "other")) == "3 other"


def test_even_usage_is_one_and_a_single_slot_is_one_of_all():
    even = torch.full((2, 10), 7)
    single = torch.zeros(2, 10, dtype=torch.int64)
    single[:, 3] = 9
    none = torch.zeros(2, 10, dtype=torch.int64)
    first, second, third = MemoryPlace(1), MemoryPlace(3), MemoryPlace(3, "other")
    memories = summarise({first: even, second: single, third: none})
    assert memories[first] == MemoryUsage(used=1.0, perplexity=pytest.approx(1.0), largest=pytest.approx(0.1))
    assert memories[second] == MemoryUsage(used=pytest.approx(0.1), perplexity=pytest.approx(0.1), largest=1.0)
    assert memories[third] == MemoryUsage(0.0, 0.0, 0.0)


def test_curves_are_sorted_multiples_of_the_mean():
    counts = torch.tensor([[0, 8, 4, 0], [2, 2, 0, 0]])
    assert usage_curves({5: counts})[5].tolist() == [(8 / 3 + 2) / 2, (4 / 3 + 2) / 2, 0, 0]


def test_heads_are_averaged_and_the_largest_share_is_of_any_head():
    counts = torch.tensor([[5, 3, 2, 0], [1, 1, 0, 0]])
    entropies = [-sum(p * math.log(p) for p in shares) for shares in ((0.5, 0.3, 0.2), (0.5, 0.5))]
    perplexity = sum(math.exp(entropy) / 4 for entropy in entropies) / 2
    usage = Usage({MemoryPlace(2): counts}).summary()[MemoryPlace(2)]
    assert usage == MemoryUsage(used=5 / 8, perplexity=pytest.approx(perplexity), largest=0.5)


def test_what_is_read_between_training_steps_may_be_left_out():
    model = memory_model("llama")
    counted = []
    for training_only in (False, True):
        with record_usage(model, training_only=training_only) as usage, torch.no_grad():
            model.eval()(prompt())
            model.train()(prompt())
            counted.append({layer: counts.sum().item() for layer, counts in usage.counts.items()})
    assert counted[0] == {layer: 2 * count for layer, count in counted[1].items()}


SLOT_TYPES = {"headwise", "linear", "product-key", "ultramem"}


def test_chapters_and_fetched_blocks_are_counted_beside_slots():
    ours = {name for name, options in MEMORY_TYPES.items() if options.__module__.startswith("midus_hf.config.")}
    assert ours & set(types_with_slots()) == SLOT_TYPES
    assert ours & set(counted_types()) == ours - {"depth-attention"}


def test_a_type_of_another_package_is_listed_where_it_belongs(monkeypatch):
    monkeypatch.setitem(MEMORY_MODULES, "another", MEMORY_MODULES["linear"])
    monkeypatch.setitem(MEMORY_MODULES, "mute", MEMORY_MODULES["depth-attention"])
    for types in (counted_types(), types_with_slots()):
        assert "another" in types and "mute" not in types
        assert types == sorted(types)

"""Readings that a context keeps: read once, right after every change of what they depend on."""

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
import torch
from models.pack_models import chat_tokenizer, pack_model
from tiny import NATIVE_FAMILIES, logits

from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.packs import kept_readings
from midus_hf.memories.packs.glossary import Entry
from midus_hf.memories.packs.kept_readings import keep_readings
from midus_hf.memories.packs.reading import PackReader

TOKENIZER = chat_tokenizer()
ENTRIES = [Entry(("q",), "(3) W, of a text"), Entry(("gold", "Au"), "Shiny, and longer than a window.")]


def ids(text):
    return torch.tensor([TOKENIZER(text)["input_ids"]])


WITH_WORDS, NAME_FIRST, OF_BOTH = (
    ids("(Q) Is it gold\n(A)"),
    ids("(Q) gold\nIs it\n(A)"),
    ids("(Q) Is q\nof gold\n(A)"),
)
ASKED = (WITH_WORDS, NAME_FIRST, OF_BOTH)


def made(family="llama", dtype=torch.float32):
    return pack_model(family, dtype, ENTRIES, tokenizer=TOKENIZER)


def computed(model):
    return torch.cat([logits(model, each) for each in ASKED], 1)


def read_anew(model):
    with keep_readings(model):
        return computed(model)


@contextlib.contextmanager
def counted():
    """Count the passes over texts, and over words after them."""
    counts, record = {"texts": 0, "words": 0}, kept_readings.record_pass

    def recording(run, tokens, positions, cache):
        counts["words" if cache.get_seq_length() else "texts"] += 1
        return record(run, tokens, positions, cache)

    with patch.object(kept_readings, "record_pass", recording), patch.object(PackReader, "read", None):
        yield counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_kept_readings_give_the_logits_of_new_ones(family, dtype):
    model = made(family, dtype)
    expected, tolerance = computed(model), 1e-5 if dtype == torch.float32 else 0.1
    with keep_readings(model):
        first, again = computed(model), computed(model)
    assert torch.equal(first, again)
    torch.testing.assert_close(first, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(computed(model), expected), "outside of the context nothing changes"


def test_each_text_is_read_once():
    model = made()
    with counted() as counts, keep_readings(model):
        for _ in range(3):
            logits(model, NAME_FIRST)
        assert counts == {"texts": 1, "words": 0}
        logits(model, WITH_WORDS)
        assert counts == {"texts": 1, "words": 1}
        model.generate(NAME_FIRST, max_new_tokens=3, do_sample=False)
        with keep_readings(model):
            logits(model, NAME_FIRST)
        logits(model, NAME_FIRST)
        assert counts["texts"] == 1
    with counted() as counts, keep_readings(model):
        logits(model, NAME_FIRST)
        assert counts["texts"] == 1, "readings end with the context"


def test_changed_entries_are_other_readings():
    model = made()
    with keep_readings(model):
        before = logits(model, NAME_FIRST)
        model.glossary.replace("gold", "Dull.")
        replaced = logits(model, NAME_FIRST)
        model.glossary.remove("gold")
        removed = logits(model, NAME_FIRST)
        model.glossary.add(["gold", "Au"], ENTRIES[1].text)
        assert torch.equal(logits(model, NAME_FIRST), before)
    assert not torch.equal(replaced, before)
    assert not torch.equal(removed, replaced)
    model.glossary.replace("gold", "Dull.")
    with keep_readings(model):
        assert torch.equal(logits(model, NAME_FIRST), replaced)


def step(optimizer):
    def change(model):
        made_of = optimizer(model.parameters())
        model(NAME_FIRST, labels=NAME_FIRST, use_cache=False).loss.backward()
        made_of.step()

    return change


def one_number(model):
    model.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 1


def exchanged_rows(model):
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data.copy_(weight.data.flip(0))


def other_storage(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def loaded(model):
    state = {name: tensor * 1.01 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)


def normed(model):
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.5)


def hooked(model):
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, inputs, output: output * 1.1)


CHANGES = {
    "adamw": step(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)),
    "fused": step(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True)),
    "sgd": step(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    **{each.__name__: each for each in (one_number, exchanged_rows, other_storage, loaded, normed, hooked)},
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "eager": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_weights_within_the_context_is_seen(change):
    model = made()
    with keep_readings(model):
        before = computed(model)
        CHANGES[change](model)
        within = computed(model)
    assert torch.equal(within, read_anew(model))
    assert within.dtype != before.dtype or change == "eager" or not torch.equal(within, before)


def test_counted_edits_are_seen_without_comparing_numbers():
    for change in (CHANGES["sgd"], other_storage, loaded, normed, hooked, CHANGES["bfloat16"]):
        model = made()
        with keep_readings(model, check_numbers=False):
            computed(model)
            change(model)
            within = computed(model)
        assert torch.equal(within, read_anew(model))


def test_numbers_are_compared_if_one_of_two_contexts_wants_it():
    model = made()
    with keep_readings(model, check_numbers=False), ThreadPoolExecutor(1) as pool:
        computed(model)
        pool.submit(read_anew, model).result()
        one_number(model)
        within = computed(model)
    assert torch.equal(within, read_anew(model))


def test_only_read_rows_of_the_token_table_are_compared():
    model, table = made(), "model.embed_tokens.weight"
    weight = model.get_parameter(table).data
    unread = weight.shape[0] - 1
    read = TOKENIZER(ENTRIES[1].text)["input_ids"][-1]
    with counted() as counts, keep_readings(model):
        logits(model, NAME_FIRST)
        weight[unread] += 1
        logits(model, NAME_FIRST)
        assert counts["texts"] == 1
        weight[read] += 1
        logits(model, NAME_FIRST)
        assert counts["texts"] == 2


def test_token_table_with_other_readers_is_compared_whole():
    model = made()
    model.model.reader = torch.nn.Linear(1, 1)
    assert kept_readings._token_table(model.model) is model.model.embed_tokens.weight
    model.model.reader.weight = model.model.embed_tokens.weight
    assert kept_readings._token_table(model.model) is None


def test_change_of_adapters_within_the_context_is_seen():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(made(), config)
    model.add_adapter("other", config)
    model.eval()
    on = read_anew(model)
    with keep_readings(model):
        assert torch.equal(computed(model), on)
        with model.disable_adapter():
            off = computed(model)
        assert torch.equal(computed(model), on)
        model.set_adapter("other")
        other = computed(model)
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["other"] *= 2
        scaled = computed(model)
    assert torch.equal(scaled, read_anew(model))
    with model.disable_adapter():
        assert torch.equal(off, read_anew(model))
    assert not torch.equal(other, on)
    assert not torch.equal(scaled, other)
    with keep_readings(model):
        computed(model)
        merged = model.merge_and_unload()
        assert torch.equal(computed(merged), read_anew(merged))


def test_switched_off_layers_and_autocast_are_seen():
    model = made()
    with keep_readings(model):
        before = computed(model)
        with without_memories(model.model.layers, ["packs"]):
            off = computed(model)
        assert not torch.equal(off, before)
        assert torch.equal(computed(model), before)
        with torch.autocast("cpu", torch.bfloat16):
            cast = computed(model)
        assert torch.equal(computed(model), before)
    with without_memories(model.model.layers, ["packs"]):
        assert torch.equal(read_anew(model), off)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(read_anew(model), cast)


def test_training_mode_keeps_nothing():
    model = made().train()
    expected = computed(model)
    with keep_readings(model):
        assert torch.equal(computed(model), expected)
        assert not model.model.services["packs"].store.readings._readings


def test_readings_used_last_are_kept_up_to_a_size():
    model = made()
    store = model.model.services["packs"].store
    expected = read_anew(model)
    with keep_readings(model, max_bytes=1):
        assert torch.equal(computed(model), expected)
        assert len(store.readings._readings) == 1
    with keep_readings(model):
        computed(model)
        assert len(store.readings._readings) == 3, "two texts, and both as one"
        sizes = [each.num_bytes for each in store.readings._readings.values()]
    with keep_readings(model, max_bytes=max(sizes)):
        computed(model)
        assert sum(each.num_bytes for each in store.readings._readings.values()) <= max(sizes)


def test_models_and_threads_keep_their_own_contexts():
    first, second = made(), made("qwen2")
    expected, of_second = read_anew(first), read_anew(second)
    outside = computed(first)
    with keep_readings(first), ThreadPoolExecutor(2) as pool:
        assert torch.equal(computed(second), computed(made("qwen2"))), "the other model reads as ever"
        assert torch.equal(pool.submit(computed, first).result(), outside), "another thread reads as ever"
        within = [pool.submit(read_anew, first) for _ in range(4)]
        assert all(torch.equal(each.result(), expected) for each in within)
        with keep_readings(second):
            assert torch.equal(computed(second), of_second)
        assert torch.equal(computed(first), expected)


def test_copies_of_a_model_keep_nothing():
    model = made()
    with keep_readings(model):
        expected = computed(model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            readings = copied.model.services["packs"].store.readings
            assert not readings.is_open
            assert not readings._readings
            assert torch.equal(read_anew(copied), expected)

"""Whole models as vLLM runs them: parts of requests in one row, with keys and values in blocks."""

import copy
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from models.hosting import host_of
from models.pack_models import ENTRIES, chat_tokenizer, pack_model, tiny_tokenizer
from paged_engine import Attention, Engine
from tiny import prompt, tiny_model
from transformers import AutoModel

from midus_hf.memories.hosting import vllm
from midus_hf.memories.hosting.vllm import find_layout
from midus_hf.memories.packs import kept_readings, paged_reads, store
from midus_hf.memories.packs.glossary import Glossary
from midus_hf.memories.packs.reading import Pack
from midus_hf.memories.packs.store import KeptPacks
from midus_hf.ops.dispatch.calling import op_choices
from midus_hf.ops.dispatch.library import why_missing

ENGRAM = {"type": "engram", "layers": [0, 1], "rows": 97, "width": 8, "hash_heads": 2}
FAMILIES = ["llama", "gemma3", "qwen2"]


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


def with_packs(family, **options):
    return pack_model(family, torch.float32, options=options)


def with_engram(family):
    model = host_of(tiny_model(family, torch.float32), {"site": "beside-ffn", **ENGRAM})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".memories." in name:
                parameter.normal_(std=0.5)
    return model


def served(engine, model, tokenizer=None):
    """The stack of a model as vLLM makes it of the config; its glossary is read by a tokenizer."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "vllm"
    stack = AutoModel.from_config(config).to(torch.float32).eval()
    stack.load_state_dict(model.model.state_dict())
    if "glossary" in stack.services:
        stack.services["glossary"].glossary = Glossary(tokenizer or tiny_tokenizer(), ENTRIES)
    engine.serve(stack)
    return stack


@torch.no_grad()
def run_pass(engine, stack, tokens, parts):
    """Hidden states of a pass; parts are a row's number, blocks, and first and last position."""
    engine.begin([part[1:] for part in parts])
    ids = torch.cat([tokens[row, first:end] for row, _, first, end in parts])
    positions = torch.cat([torch.arange(first, end) for *_, first, end in parts])
    return stack(input_ids=ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]


FIRST, SECOND = [3, 9, 1, 16, 7, 4], [5, 2, 11, 8, 17, 13]
PASSES = [
    [(0, FIRST, 0, 7)], [(0, FIRST, 7, 8), (1, SECOND, 0, 11)], [(0, FIRST, 8, 22), (1, SECOND, 11, 12)],
    [(1, SECOND, 12, 13), (0, FIRST, 22, 23)], [(0, FIRST, 23, 24), (1, SECOND, 13, 14)], [(1, SECOND, 14, 24)],
]  # fmt: skip
each_memory = pytest.mark.parametrize("make", [with_engram, with_packs], ids=["engram", "packs"])


def whole_passes(model, tokens):
    return model.model(tokens, use_cache=False).last_hidden_state.detach()


def in_parts(engine, stack, tokens, passes):
    outputs = [[], []]
    for parts in passes:
        output = run_pass(engine, stack, tokens, parts)
        for (row, *_), each in zip(parts, output.split([end - first for *_, first, end in parts]), strict=True):
            outputs[row].append(each)
    return torch.stack([torch.cat(each) for each in outputs])


@each_memory
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_requests_are_computed_as_whole_ones(family, make, engine):
    model, tokens = make(family), prompt()
    expected, stack = whole_passes(model, tokens), served(engine, model)
    torch.testing.assert_close(in_parts(engine, stack, tokens, PASSES), expected, rtol=1e-4, atol=1e-5)
    reused = run_pass(engine, stack, tokens, [(0, [3, 9, 1, 0, 6, 10], 12, 24)])  # after blocks of the first request
    torch.testing.assert_close(reused, expected[0, 12:], rtol=1e-4, atol=1e-5)


def test_models_of_one_process_read_their_own_glossaries(engine):
    model, tokens = with_packs("llama"), prompt()[:1]
    expected, stack = whole_passes(model, tokens)[0], served(engine, model)
    layers = dict(engine.layers)
    served(engine, model).services["glossary"].glossary = Glossary(tiny_tokenizer(), [])
    engine.layers.clear()
    engine.layers.update(layers)
    output = run_pass(engine, stack, tokens, [(0, FIRST, 0, 24)])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_conversations_in_parts_are_computed_as_whole_ones(engine):
    """Two turns, with packs of two entries and of the words before their names."""
    tokenizer = chat_tokenizer()
    model = pack_model("llama", torch.float32, tokenizer=tokenizer)
    texts = [f"(Q) Is it {first} or\n{second}\n(A) So; no\n(Q) Or{'?' * 48}\n(A) Y" for first, second in ("#@", "@#")]
    tokens = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    expected, stack, count = whole_passes(model, tokens), served(engine, model, tokenizer), tokens.shape[1]
    blocks, bounds = [[*range(1, 49, 2)], [*range(2, 50, 2)]], [0, 11, 16, *range(count - 6, count), count]
    passes = [[(row, blocks[row], *bound) for row in range(2)] for bound in itertools.pairwise(bounds)]
    torch.testing.assert_close(in_parts(engine, stack, tokens, passes), expected, rtol=1e-4, atol=1e-5)
    stack.services["packs"].kept = KeptPacks()  # packs are made anew from ids in slots
    again = run_pass(engine, stack, tokens, [(0, blocks[0], count - 2, count)])
    torch.testing.assert_close(again, expected[0, -2:], rtol=1e-4, atol=1e-5)


@each_memory
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_prefix_computed_in_the_same_pass_is_read(order, make, engine):
    model, tokens = make("llama"), prompt()[:1]
    expected, stack = whole_passes(model, tokens)[0], served(engine, model)
    parts = [(0, FIRST, 0, 8), (0, [*FIRST[:2], *SECOND[2:]], 8, 20)]
    output = run_pass(engine, stack, tokens, [parts[number] for number in order])
    first, second = output.split((8, 12)) if order == (0, 1) else output.split((12, 8))[::-1]
    torch.testing.assert_close(torch.cat([first, second]), expected[:20], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_packs_are_attended_to_by_each_body(backend, family, engine, monkeypatch):
    if backend == "native" and why_missing():
        pytest.skip(why_missing())
    calls, attend = [], paged_reads.native_paged_attention
    monkeypatch.setattr(paged_reads, "native_paged_attention", lambda *each: (calls.append(each), attend(*each)))
    model, tokens = with_packs(family), prompt()
    expected, stack = whole_passes(model, tokens), served(engine, model)
    with op_choices(backend=backend):
        torch.testing.assert_close(in_parts(engine, stack, tokens, PASSES), expected, rtol=1e-4, atol=1e-5)
    assert bool(calls) == (backend == "native")


def test_text_of_an_entry_is_read_once_for_all_requests(engine, monkeypatch):
    """Requests with other words before the name read only these."""
    tokenizer, passes = chat_tokenizer(), Counter()
    model = pack_model("llama", torch.float32, tokenizer=tokenizer)
    stack, record = served(engine, model, tokenizer), kept_readings.record_pass

    def record_and_count(run, ids, positions, cache):
        passes["words" if cache.get_seq_length() else "texts"] += 1
        return record(run, ids, positions, cache)

    counts = []
    for number, words in enumerate(("is it", "or is it", "is it")):
        tokens = torch.tensor([tokenizer(f"(Q) {words} #\n(A) So; no")["input_ids"]])
        expected = whole_passes(model, tokens)[0]
        with monkeypatch.context() as patch:
            patch.setattr(kept_readings, "record_pass", record_and_count)
            blocks = [*range(10 * number + 1, 10 * number + 10)]
            output = run_pass(engine, stack, tokens, [(0, blocks, 0, tokens.shape[1])])
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
        counts.append(dict(passes))
        passes.clear()
    first, other_words, again = counts
    assert first["texts"] > 0
    assert first["words"] > 0
    assert [*other_words] == ["words"]
    assert again == {}


def test_packs_that_are_kept_are_bounded_in_bytes(monkeypatch):
    heads = ((torch.zeros(2, 5, 8), torch.zeros(2, 5, 8)),)
    monkeypatch.setattr(store, "_MAX_KEPT_BYTES", 3 * 2 * heads[0][0].nbytes)
    kept, read = KeptPacks(), []

    def take(*keys):
        read.clear()
        packs = kept.take(
            dict.fromkeys(keys), lambda missing: (read.extend(missing), dict.fromkeys(missing, Pack(heads, 0)))[1]
        )
        assert [*packs] == [*keys]
        return [*read]

    assert take("a", "b", "c") == ["a", "b", "c"]
    assert take("a") == []
    assert take("d") == ["d"]
    assert take("a", "c", "d") == []
    assert take("b") == ["b"]
    assert take("e", "f", "g", "h") == ["e", "f", "g", "h"]  # more than the bound, which this pass needs


@torch.no_grad()
def test_tokens_without_an_open_pack_keep_the_bits_of_the_engine(engine):
    tokenizer, outputs = tiny_tokenizer(), []
    tokens = torch.tensor([tokenizer(text)["input_ids"] for text in ("it is so; |", "it # is so;")])
    count, name = tokens.shape[1], tokens[1].tolist().index(tokenizer.convert_tokens_to_ids("#"))
    for model in (with_packs("llama"), host_of(tiny_model("llama", torch.float32))):
        parts = [(0, FIRST, 0, count), (1, SECOND, 0, count)]
        outputs.append(run_pass(engine, served(engine, model), tokens, parts).split(count))
    (plain, named), (of_base, named_of_base) = outputs
    assert torch.equal(plain, of_base)
    assert torch.equal(named[:name], named_of_base[:name])
    assert not torch.equal(named[name], named_of_base[name])


def refuse(engine, model, message):
    config = copy.deepcopy(model.config)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match=message):
        AutoModel.from_config(config)


def test_packs_refuse_what_they_do_not_read(engine):
    refuse(engine, with_packs("gemma2"), "caps scores of attention")
    engine.config.cache_config.cache_dtype = "fp8_e5m2"
    refuse(engine, with_packs("llama"), r"^--kv-cache-dtype is fp8_e5m2.*or float32. Leave the option out\.$")
    engine.config.lora_config = object()
    refuse(engine, with_packs("llama"), "--enable-lora changes keys and values by request")
    entries = {"site": "beside-ffn", **ENGRAM}, {"type": "packs", "layers": [0, 1, 2, 3]}
    refuse(engine, host_of(tiny_model("llama"), *entries), "'ngram', which would take texts of .*expected one of")


def test_attention_sinks_are_refused_when_the_glossary_is_opened(engine, tmp_path):
    model = with_packs("llama")
    model.save_pretrained(tmp_path)
    stack = served(engine, model)
    service, parts = stack.services["packs"], [(0, FIRST, 0, 4)]
    service.files.glossary = None
    service.settings = SimpleNamespace(model=str(tmp_path), revision=None, trust_remote_code=False)
    engine.layers["layers.1"].has_sink = True
    with pytest.raises(ValueError, match=r"attention sinks, .* Serve it with `transformers serve`"):
        run_pass(engine, stack, prompt(), parts)
    engine.layers["layers.1"].has_sink = False
    run_pass(engine, stack, prompt(), parts)
    assert len(service.files.glossary) == len(ENTRIES)


def test_cache_that_holds_no_single_numbers_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "version", lambda name: "0.32.0")
    attention, write = Attention("first"), Attention.write
    find_layout(attention)
    attention.impl.do_kv_cache_update = lambda layer, key, *rest: write(layer, key // 2, *rest)
    message = r"CPU_ATTN does not hold keys .*vLLM 0.32.0, torch.float32.*; expected one that does"
    with pytest.raises(ValueError, match=message):
        find_layout(attention)

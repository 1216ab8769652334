"""Memories in vLLM, which lays parts of several requests in one row, and what of it is refused."""

from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from memory.test_engram import EXACT, HASHED, IDS, SIZES, assert_same, filled, run, states, tables_of
from paged_engine import Attention, Engine

from midus_hf.memories.engram.layer import PagedEngramMemory
from midus_hf.memories.engram.options import EngramOptions
from midus_hf.memories.hosting import vllm
from midus_hf.memories.hosting.vllm import SlotState, SlotStates, first_attention
from midus_hf.memories.module import build_memory

FIRST, SECOND = [3, 9, 1], [5, 2, 11]  # blocks of two requests


@pytest.fixture
def engine(monkeypatch):
    return Engine(monkeypatch)


def filled_in_vllm(options):
    memory = build_memory(EngramOptions(**options), SIZES, attention="vllm").double()
    memory.load_state_dict(filled(options).state_dict())
    return memory


def run_parts(engine, memory, parts, padding=0):
    """Return the outputs of the tokens of one pass: for each part the number of a row, blocks, and the first and last position."""
    engine.begin([part[1:] for part in parts], padding)
    rows = [(row, position) for row, _, first, end in parts for position in range(first, end)] + [(0, 0)] * padding
    hidden = torch.stack([states()[row, position] for row, position in rows])
    ids = torch.tensor([int(IDS[row, position]) for row, position in rows])
    state = SlotState("first", "ngrams.1")
    output = memory(hidden[None], input_ids=ids[None], tables=tables_of(memory), state=state)[0]
    return output[: len(output) - padding]


@pytest.mark.parametrize("options", [HASHED, EXACT, {**HASHED, "kernel": 0}, {**HASHED, "max_order": 2, "kernel": 2}])
def test_parts_of_prompts_read_earlier_tokens(options, engine):
    expected, served = run(filled(options)), filled_in_vllm(options)
    assert type(served) is PagedEngramMemory
    outputs = [[], []]
    passes = [[(0, FIRST, 0, 5)], [(0, FIRST, 5, 6), (1, SECOND, 0, 7)]]
    passes += [[(1, SECOND, 7, 8), (0, FIRST, 6, 12)], [(1, SECOND, 8, 12)]]
    for number, parts in enumerate(passes):
        output = run_parts(engine, served, parts, padding=number).split([end - first for *_, first, end in parts])
        for (row, *_), each in zip(parts, output, strict=True):
            outputs[row].append(each)
    assert_same(torch.stack([torch.cat(each) for each in outputs]), expected)
    reused = run_parts(engine, served, [(0, [3, 9, 7], 8, 12)])  # the first two blocks are those of another request
    assert_same(reused, expected[0, 8:])


def test_earlier_tokens_are_none_while_there_is_no_cache(engine):
    memory = filled_in_vllm(HASHED)
    alone = run_parts(engine, memory, [(0, FIRST, 0, 1)])
    engine.context.attn_metadata = None
    output = memory(states()[:1], input_ids=IDS[:1], state=SlotState("first", "ngrams.1"))
    assert_same(output[0, :1], alone)


WRONG_SETTINGS = {
    "kv_transfer_config": "--kv-transfer-config brings keys .*. Leave the option out",
    "parallel_config.use_ubatching": "--enable-dbo and --ubatch-size split a pass .*. Leave the option out",
    "model_config.enable_prompt_embeds": "--enable-prompt-embeds brings tokens without ids. Leave the option out",
    "speculative_config": "--speculative-config was not tried .*. Leave the option out",
    "compilation_config.cudagraph_mode": "CUDA graphs repeat a pass .*. Pass --enforce-eager",
}


@pytest.mark.parametrize("path", WRONG_SETTINGS)
def test_options_that_leave_tables_empty_are_refused(path, engine):
    SlotStates(None, None, {("ngrams", 1): None})
    owner, _, name = path.rpartition(".")
    setattr(attrgetter(owner)(engine.config) if owner else engine.config, name, True)
    with pytest.raises(ValueError, match=f"memory 'ngrams' so, .*: {WRONG_SETTINGS[path]}, or serve the model with"):
        SlotStates(None, None, {("ngrams", 1): None})


def a_model(*attentions):
    return SimpleNamespace(layers=[SimpleNamespace(mixer_part=SimpleNamespace(**each)) for each in attentions])


def test_slots_are_those_of_the_first_full_layer(engine):
    sliding, whole = Attention("sliding"), Attention("whole")
    sliding.sliding_window = 8
    assert first_attention(a_model({"attn": sliding}, {"attn": whole}), "ngrams") is whole
    with pytest.raises(ValueError, match=r"no layer .* memory 'ngrams' reads; expected one. Serve the model"):
        first_attention(a_model({"attn": sliding}), "ngrams")


def test_another_backend_and_another_version_are_refused(engine, monkeypatch):
    monkeypatch.setattr(vllm, "version", lambda name: "0.99.1")
    attention = Attention("first")
    attention.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    with pytest.raises(ValueError, match=r"FLASHINFER, .*vLLM 0.99.1.*; expected CPU_ATTN.* Choose one with"):
        first_attention(a_model({"attn": attention}), "ngrams")
    with pytest.raises(ValueError, match=r"of vLLM 0.99.1 has no attn, .*; expected vLLM 0.32.0. Or serve"):
        first_attention(a_model({}), "ngrams")
    engine.context.attn_metadata = [{}, {}]
    with pytest.raises(ValueError, match=r"^vLLM 0.99.1 runs a pass in several parts"):
        vllm.slots_of_pass("first")

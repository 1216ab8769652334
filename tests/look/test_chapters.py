"""Chapters of a loaded model are counted, and are zero for the length of a context and then as before."""

import contextlib

import pytest
import torch
from accelerate import cpu_offload
from look.chapter_models import LAYERS as ROUTED_LAYERS
from look.chapter_models import READ, SHARED, routed_model, rows_of
from models.hosting import host_config
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES as TINY_FAMILIES
from tiny import prompt, tiny_model
from torch import distributed
from torch.distributed.fsdp import fully_shard

from midus_hf.evaluation.text_rows import read_rows
from midus_hf.look.ablation import ablate
from midus_hf.look.parts import chapter_parts, zero_chapters
from midus_hf.look.usage import record_usage
from midus_hf.memory import kept_values
from midus_hf.models import FAMILIES

CHAPTERS, TOKENS, LAYERS = 6, 4, [0, 2, 3]
ENTRY = {"type": "chapters", "memory_tokens": CHAPTERS * TOKENS, "chapters": CHAPTERS, "k": 2, "layers": LAYERS}


def chapter_model(*entries, dtype=torch.float32):
    """A tiny Llama with memories of chapters, which change what it computes, in eval mode."""
    torch.manual_seed(0)
    memory = [{**ENTRY, **entry} for entry in entries or ({},)]
    model = FAMILIES["llama"](host_config(TINY_FAMILIES["llama"].config(), memory))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "memor" in name:
                parameter.copy_(torch.randn_like(parameter))
    return model.to(dtype).eval()


def values(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def differing(before, model):
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


def logits(model):
    with torch.no_grad():
        return model(prompt()).logits


def bank_of(model, number=0, memory="chapters"):
    return model.model.memory_tables[memory][str(number)].bank


BANK = "model.memory_tables.chapters.{}.bank"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_zero_within_and_as_before_afterwards(dtype):
    model = chapter_model(dtype=dtype)
    before, computed = values(model), logits(model)
    with zero_chapters(model, [4, 1]):
        assert differing(before, model) == {BANK.format(0)}
        zero = bank_of(model).view(CHAPTERS, -1) == 0
        assert [bool(of_chapter.all()) for of_chapter in zero] == [False, True, False, False, True, False]
        assert torch.equal(bank_of(model)[:TOKENS], before[BANK.format(0)][:TOKENS])
        assert not torch.equal(logits(model), computed)
    assert not differing(before, model)
    assert torch.equal(logits(model), computed)


def test_an_exception_restores_too():
    model = chapter_model()
    before = values(model)
    with pytest.raises(KeyError), zero_chapters(model, [1]):
        assert differing(before, model)
        raise KeyError
    assert not differing(before, model)


def test_contexts_stack():
    model = chapter_model()
    before = values(model)
    with zero_chapters(model, [1]), zero_chapters(model, [2]):
        assert not bank_of(model).view(CHAPTERS, -1)[[1, 2]].any()
    assert not differing(before, model)


def test_rows_outside_may_change_within():
    model = chapter_model()
    with zero_chapters(model, [1]):
        bank_of(model).data[0] = 7
    assert (bank_of(model)[0] == 7).all() and bank_of(model)[TOKENS].all()


@pytest.mark.parametrize(
    ("share", "banks"),
    [
        ("every:2", [BANK.format(0), BANK.format(1)]),
        ("none", [f"model.layers.{layer}.memories.chapters.bank" for layer in LAYERS]),
    ],
)
def test_all_banks_of_a_memory_are_changed(share, banks):
    model = chapter_model({"share": share})
    before = values(model)
    with zero_chapters(model, [1]):
        assert differing(before, model) == set(banks)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_integers_are_zero_with_their_scales(bits):
    model = chapter_model({"bank_bits": bits})
    holder = model.model.memory_tables["chapters"]["0"]
    holder.bank_integers.random_(0, 100)
    before, computed = {name: buffer.clone() for name, buffer in holder.named_buffers()}, logits(model)
    with zero_chapters(model, [2]):
        zero = [(buffer.view(CHAPTERS, -1) == 0).all(dim=1).tolist() for buffer in holder.buffers()]
        assert zero == [[False, False, True, False, False, False]] * 2
    with zero_chapters(model, range(CHAPTERS)):  # some of which some token reads
        assert not torch.equal(logits(model), computed)
    assert all(torch.equal(buffer, before[name]) for name, buffer in holder.named_buffers())


def test_one_of_several_memories_is_changed():
    model = chapter_model({"name": "chapters"}, {"name": "chapters-2", "bank_rank": 3})
    before = values(model)
    with zero_chapters(model, [1], memory="chapters-2"):
        assert differing(before, model) == {"model.memory_tables.chapters-2.0.bank"}
    with pytest.raises(ValueError, match=r"memory is None; expected one of: chapters, chapters-2\."):
        zero_chapters(model, [1]).__enter__()


def test_a_wrapped_model_is_changed_in_every_copy():
    model = chapter_model()
    config = LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["memories.chapters", "chapters.0"], task_type="CAUSAL_LM"
    )
    wrapped = get_peft_model(model, config)
    computed = logits(wrapped)
    with zero_chapters(wrapped, range(CHAPTERS)):
        copies = [parameter for name, parameter in wrapped.named_parameters() if name.endswith(".bank")]
        assert len(copies) == 2 and not any(copy.any() for copy in copies)
        assert not torch.equal(logits(wrapped), computed)
    assert torch.equal(logits(wrapped), computed)


@pytest.mark.parametrize(
    ("chapters", "words", "message"),
    [
        ([6], {}, r"chapter is 6; expected a number from 0 to 5\."),
        ([-1], {}, r"chapter is -1; expected a number"),
        ([1], {"memory": "other"}, r"memory is 'other'; expected one of: chapters\."),
    ],
)
def test_what_is_not_there_is_refused(chapters, words, message):
    model = chapter_model()
    before = values(model)
    with pytest.raises(ValueError, match=message):
        zero_chapters(model, chapters, **words).__enter__()
    assert not differing(before, model)


def test_a_model_without_chapters_is_refused():
    with pytest.raises(
        ValueError,
        match=r"this llama model has no memory that reads chapters; expected one upscaled",
    ):
        zero_chapters(tiny_model("llama"), [1]).__enter__()


def test_offloaded_parameters_are_refused():
    model = cpu_offload(chapter_model(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"is offloaded; expected its parameters on a device"):
        zero_chapters(model, [1]).__enter__()


def test_sharded_parameters_are_refused():
    model = chapter_model()
    holder = model.model.memory_tables["chapters"]["0"]
    holder.bank = torch.nn.Parameter(holder.bank.detach()[:0])
    with pytest.raises(ValueError, match=r"a bank of memory 'chapters' is offloaded or sharded; expected it whole"):
        zero_chapters(model, [1]).__enter__()


def test_a_distributed_tensor_is_refused():
    model = chapter_model()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        with pytest.raises(
            ValueError, match=r"a bank of memory 'chapters' is offloaded or sharded; expected it whole"
        ):
            zero_chapters(model, [1]).__enter__()
    finally:
        distributed.destroy_process_group()


def test_values_that_are_kept_are_not_passed_over():
    model = chapter_model()
    computed = logits(model)
    with torch.no_grad(), kept_values(model):
        with pytest.raises(ValueError, match=r"kept_values keeps what memory 'chapters' derives from its bank"):
            zero_chapters(model, [1]).__enter__()
    with zero_chapters(model, range(CHAPTERS)), kept_values(model):
        assert not torch.equal(logits(model), computed)
    assert torch.equal(logits(model), computed)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_token_counts_once_for_each_chapter_that_it_opens(family):
    model = routed_model(family)
    with record_usage(model) as usage:
        for kinds in READ:
            read_rows(model, rows_of(kinds), batch_size=2)  # of other lengths: padding does not count
    opened = [sum(28 for read in READ.values() if chapter in read) for chapter in range(SHARED, CHAPTERS)]
    assert {position: counts.tolist() for position, counts in usage.items()} == {
        f"{layer} chapters": [opened] for layer in ROUTED_LAYERS
    }


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_chapter_matters_to_the_texts_that_read_it_alone(family):
    model, texts = routed_model(family), [rows_of("a"), rows_of("b")]
    before, parts = values(model), chapter_parts(model)
    measured = ablate(model, texts, parts=parts)
    assert measured.losses == {text.name: read_rows(model, text).mean for text in texts}
    assert [part.chapter for part in parts] == list(range(CHAPTERS))
    effects = {(row.part, row.text): row for row in measured.effects}
    for part in parts:
        for kind, read in READ.items():
            assert (effects[part.name, kind].effect.difference != 0) == (part.chapter in read)
    with zero_chapters(model, [1]):
        assert effects["chapters chapter 1", "a"].loss == read_rows(model, texts[0]).mean
    assert not differing(before, model)


@pytest.mark.parametrize("bf16", [False, True])
def test_counting_opened_chapters_changes_no_gradient(bf16):
    gradients = []
    for context in (contextlib.nullcontext, record_usage):
        model = routed_model().train()
        with context(model), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            model(prompt(), labels=prompt(), use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, recorded = gradients
    assert all(gradient is None or torch.equal(gradient, recorded[name]) for name, gradient in plain.items())
    assert plain.keys() == recorded.keys() and any(name.endswith("router_weight") for name in plain)

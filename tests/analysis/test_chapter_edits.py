"""Chapters of a loaded model are changed for the length of a context, and are then as before."""

import contextlib

import pytest
import torch
from accelerate import cpu_offload
from models.hosting import host_config
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES as TINY_FAMILIES
from tiny import prompt, tiny_model
from torch import distributed
from torch.distributed.fsdp import fully_shard

from midus_hf.analysis.chapters.edits import swap_chapters, zero_chapters
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
ROUTERS = {f"model.layers.{layer}.memories.chapters.router_{kind}" for layer in LAYERS for kind in ("weight", "bias")}


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


@pytest.mark.parametrize("edit", [lambda model: zero_chapters(model, [1]), lambda model: swap_chapters(model, 1, 2)])
def test_an_exception_restores_too(edit):
    model = chapter_model()
    before = values(model)
    with pytest.raises(KeyError), edit(model):
        assert differing(before, model)
        raise KeyError
    assert not differing(before, model)


def test_swapped_rows_stand_in_one_anothers_place():
    model = chapter_model()
    before = values(model)
    with swap_chapters(model, 5, 2):
        assert differing(before, model) == {BANK.format(0)}
        moved = before[BANK.format(0)].view(CHAPTERS, -1)[[0, 1, 5, 3, 4, 2]]
        assert torch.equal(bank_of(model).view(CHAPTERS, -1), moved)
    assert not differing(before, model)


def test_a_swap_with_the_router_does_not_change_what_is_computed():
    model = chapter_model().double()
    before, computed = values(model), logits(model)
    with swap_chapters(model, 1, 4, with_router=True):
        assert differing(before, model) == {BANK.format(0), *ROUTERS}
        torch.testing.assert_close(logits(model), computed, rtol=1e-10, atol=1e-10)
    with swap_chapters(model, 1, 4):
        assert not torch.allclose(logits(model), computed)
    assert not differing(before, model)


def test_contexts_stack():
    model = chapter_model()
    before = values(model)
    with contextlib.ExitStack() as stack:
        for number in (1, 2, 3):
            stack.enter_context(zero_chapters(model, [number]))
        stack.enter_context(swap_chapters(model, 3, 4))
        assert not bank_of(model).view(CHAPTERS, -1)[[1, 2, 4]].any()
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
def test_all_banks_are_changed_or_the_one_that_is_named(share, banks):
    model = chapter_model({"share": share})
    before = values(model)
    with zero_chapters(model, [1]):
        assert differing(before, model) == set(banks)
    with swap_chapters(model, 1, 2, with_router=True, bank=1):
        changed = differing(before, model)
    layers = {"every:2": (3,), "none": (2,)}[share]
    routers = {name for name in ROUTERS if any(f".{layer}." in name for layer in layers)}
    assert changed == {banks[1], *routers}


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_of_integers_are_zero_and_swapped_with_their_scales(bits):
    model = chapter_model({"bank_bits": bits})
    holder = model.model.memory_tables["chapters"]["0"]
    holder.bank_integers.random_(0, 100)
    before, computed = {name: buffer.clone() for name, buffer in holder.named_buffers()}, logits(model)
    with zero_chapters(model, [2]):
        zero = [(buffer.view(CHAPTERS, -1) == 0).all(dim=1).tolist() for buffer in holder.buffers()]
        assert zero == [[False, False, True, False, False, False]] * 2
    with zero_chapters(model, range(CHAPTERS)):  # some of which some token reads
        assert not torch.equal(logits(model), computed)
    with swap_chapters(model, 2, 5):
        for name, buffer in holder.named_buffers():
            assert torch.equal(buffer.view(CHAPTERS, -1), before[name].view(CHAPTERS, -1)[[0, 1, 5, 3, 4, 2]])
    assert all(torch.equal(buffer, before[name]) for name, buffer in holder.named_buffers())


def test_one_of_several_memories_is_changed():
    model = chapter_model({"name": "chapters"}, {"name": "chapters-2", "bank_rank": 3})
    before = values(model)
    with zero_chapters(model, [1], memory="chapters-2"):
        assert differing(before, model) == {"model.memory_tables.chapters-2.0.bank"}
    with pytest.raises(ValueError, match=r"the model has memories of chapters chapters, chapters-2; expected one"):
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
    before = values(wrapped)
    with swap_chapters(wrapped, 1, 4):
        changed = differing(before, wrapped)
        assert len(changed) == 2 and all(name.endswith(".bank") for name in changed)
    assert torch.equal(logits(wrapped), computed)


@pytest.mark.parametrize(
    ("chapters", "words", "message"),
    [
        ([6], {}, r"chapter is 6; expected a number from 0 to 5\."),
        ([True], {}, r"chapter is True; expected a number"),
        ([1, 1], {}, r"chapters is \[1, 1\]; expected each once\."),
        ([1], {"bank": 1}, r"bank is 1; expected a number from 0 to 0\."),
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
    with pytest.raises(ValueError, match=r"this llama model has no memory of chapters"):
        zero_chapters(tiny_model("llama"), [1]).__enter__()


def test_offloaded_parameters_are_refused():
    model = cpu_offload(chapter_model(), execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"bank of a memory is offloaded; expected it on a device"):
        zero_chapters(model, [1]).__enter__()


def test_sharded_parameters_are_refused():
    model = chapter_model()
    holder = model.model.memory_tables["chapters"]["0"]
    holder.bank = torch.nn.Parameter(holder.bank.detach()[:0])
    with pytest.raises(ValueError, match=r"bank of a memory is sharded; expected it whole"):
        zero_chapters(model, [1]).__enter__()


def test_a_distributed_tensor_is_refused():
    model = chapter_model()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        with pytest.raises(ValueError, match=r"bank of a memory is sharded; expected it whole"):
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

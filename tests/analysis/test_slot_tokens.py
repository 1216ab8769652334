"""What slots are said to add is what memories add, and the tokens nearest to it are the head's best."""

import pytest
import torch
from analysis.memory_models import ENTRIES, MEMORY_LAYERS, memory_model
from analysis.upscaled_folders import acting, loaded, saved_pair
from peft import LoraConfig, get_peft_model
from tiny import prompt, tiny_model
from training.tiny_run import tiny_tokenizer

from midus_hf.analysis.slots.slot_tokens import memory_of_slots, slot_tokens, slots_table
from midus_hf.analysis.slots.usage import record_usage
from midus_hf.analysis.watched_models import MemoryPlace
from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import build_memory


def slots_summed(memory, read: torch.Tensor) -> torch.Tensor:
    """What is retrieved, as the weighted sum of what slots add, `[B, T, D]`."""
    weights, slots = memory.retrieve(read)  # [B, T, H, k]
    total = torch.zeros(*read.shape[:2], memory.slot_outputs(slots.flatten()[:1], 0).shape[-1], dtype=read.dtype)
    for head in range(memory.num_heads):
        added = memory.slot_outputs(slots[:, :, head].flatten(), head)[:, 0].view(*slots[:, :, head].shape, -1)
        total += (weights[:, :, head].to(read.dtype).unsqueeze(-1) * added).sum(2)
    return total


@pytest.mark.parametrize("entry", ["headwise", "headwise-own", "headwise-shared", "product-key", "linear"])
def test_a_memory_adds_the_weighted_sum_of_what_its_slots_add(family, entry, monkeypatch):
    for values in ("own", "shared"):
        monkeypatch.setitem(ENTRIES, f"headwise-{values}", {**ENTRIES["headwise"], "values": values})
    model = memory_model(family, entry)
    memory = model.model.layers[1].memory.double()
    width = model.config.num_attention_heads * getattr(model.config, "head_dim", 8)
    read = torch.randn(2, 5, width if entry.startswith("headwise") else 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(memory(read), slots_summed(memory, read))


@pytest.mark.parametrize("options", [{}, {"heads": 2}, {"share": "none"}, {"key_pairs": 1}])
def test_rows_of_tables_add_what_they_are_said_to(options):
    torch.manual_seed(0)
    given = {"n": 4, "k": 3, "pre_value_width": 0, "zero": "none", "output_gate": False, **options}
    sizes = ModelSizes.of(tiny_model("llama").config)
    memory = build_memory(UltraMemOptions(**given), sizes).double()
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.copy_(torch.randn_like(parameter))
    read = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(memory(read), slots_summed(memory, read))


def test_a_row_is_read_through_each_part_of_the_projection():
    torch.manual_seed(0)
    options = UltraMemOptions(n=4, k=3, pre_value_width=0, output_gate=False, key_pairs=2, projections="per-block")
    memory = build_memory(options, ModelSizes.of(tiny_model("llama").config)).double()
    with torch.no_grad():
        memory.value_table.copy_(torch.randn_like(memory.value_table))
        added = memory.slot_outputs(torch.arange(memory.num_slots), 0)
        assert added.shape == (memory.num_slots, 4, 32)
        read = torch.randn(1, 4, 32, dtype=torch.float64)
        weights, slots = memory._select(read, None, "auto")
        moved = memory._shuffled(slots)
        each = added[moved % memory.num_slots, moved // memory.num_slots]  # [B, T, H, k, D]
        torch.testing.assert_close(memory(read), (weights.unsqueeze(-1) * each).sum((2, 3)))


@pytest.mark.parametrize("entry", ["headwise", "product-key"])
def test_nearest_tokens_are_the_heads_best(family, entry):
    model = memory_model(family, entry)
    found = slot_tokens(model, tiny_tokenizer(), 1, head=2, slots=[5, 1], top=3)
    assert [(near.slot, near.part, near.share, near.head) for near in found] == [
        (5, None, None, 2),
        (1, None, None, 2),
    ]
    for near in found:
        with torch.no_grad():
            (added,) = model.model.layers[1].memory.slot_outputs(torch.tensor([near.slot]), 2)
            logits = model.lm_head(model.model.norm(added))[0]
        assert near.norm == pytest.approx(added.norm().item(), rel=1e-5)
        assert [token.id for token in near.tokens] == logits.topk(3).indices.tolist()
        best = (logits - logits.mean()).topk(3).values.tolist()
        assert [token.logit for token in near.tokens] == pytest.approx(best, rel=1e-4, abs=1e-5)


def test_the_norm_behind_the_feed_forward_network_is_on_the_way(family):
    model = acting(loaded(saved_pair(family, "ultramem-v2")[1]))
    (near, *_) = slot_tokens(model, tiny_tokenizer(), 1, slots=[3], top=4)
    block = model.model.layers[1]
    memory = block.memories["ultramem"]
    tables = {id(reader): shared for reader, shared in model.model.table_readers()}.get(id(memory))
    with torch.no_grad():
        added = memory.slot_outputs(torch.tensor([3]), 0, tables=tables)[0, :1]
        behind = block.post_feedforward_layernorm(added) if family.startswith("gemma") else added
        logits = model.lm_head(model.model.norm(behind))[0]
    assert near.head is None and [token.id for token in near.tokens] == logits.topk(4).indices.tolist()


@pytest.mark.parametrize(("entry", "head"), [("headwise", None), ("headwise", 1), ("linear", None), ("linear", 1)])
def test_the_most_used_slots_are_those_that_were_counted_most(entry, head):
    model = memory_model("llama", entry)
    with record_usage(model) as usage, torch.no_grad():
        model(prompt(), use_cache=False)
    found = slot_tokens(model, tiny_tokenizer(), 1, head=head, usage=usage, most=4)
    counts = usage.counts[MemoryPlace(1)].double()
    if entry == "linear" and head is None:
        counts = counts.sum(0, keepdim=True)
    elif head is not None:
        counts = counts[head : head + 1]
    shares = counts / counts.sum(-1, keepdim=True)
    assert [near.share for near in found] == pytest.approx(shares.flatten().sort(descending=True).values[:4].tolist())
    for near in found:
        row = near.head if entry == "headwise" and head is None else 0
        assert near.share == pytest.approx(float(shares[row, near.slot]))
    heads = {near.head for near in found}
    assert heads == {head} if head is not None or entry == "linear" else None not in heads


def test_slots_that_nothing_read_are_not_shown_unless_they_are_named():
    model = memory_model("llama", "linear")
    with record_usage(model) as usage, torch.no_grad():
        model(prompt(1, 1), use_cache=False)
    assert 3 <= len(slot_tokens(model, tiny_tokenizer(), 1, usage=usage, most=20)) < 20
    assert len(slot_tokens(model, tiny_tokenizer(), 1, usage=usage, slots=range(20))) == 20


def test_a_slot_that_adds_nothing_is_near_to_nothing():
    model = memory_model("llama")
    model.model.layers[1].memory.value_bank.data.zero_()
    found = slot_tokens(model, tiny_tokenizer(), 1, slots=[0])
    assert [(near.head, near.norm, near.tokens) for near in found] == [(head, 0.0, []) for head in range(4)]
    table = slots_table(found, MemoryPlace(1))
    assert table.rows[1] == ["1", "0", "", "0", "adds nothing"] and "in layer 1 " in table.title


def test_the_memory_of_a_wrapped_model_is_probed():
    folder = saved_pair("llama", "ultramem-v2")[1]
    usual = slot_tokens(acting(loaded(folder)), tiny_tokenizer(), 1, slots=[0, 2])
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["memories.ultramem"])
    wrapped = get_peft_model(acting(loaded(folder)), lora)
    found = slot_tokens(wrapped, tiny_tokenizer(), 1, slots=[0, 2])
    assert [[token.id for token in near.tokens] for near in found] == [
        [token.id for token in near.tokens] for near in usual
    ]
    assert [near.norm for near in found] == pytest.approx([near.norm for near in usual])
    logits = [[token.logit for near in each for token in near.tokens] for each in (found, usual)]
    assert logits[0] == pytest.approx(logits[1], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 0}, "layer is 0; expected one with a memory of slots: 1, 3."),
        ({"head": 4}, "head is 4; expected a number from 0 to 3."),
        ({"slots": [64]}, "slot is 64; expected a number from 0 to 63."),
        ({"top": 0}, "top is 0; expected at least 1."),
        ({"most": 0}, "most is 0; expected at least 1."),
        ({"memory": "other"}, "memory is 'other'; expected one of: ."),
    ],
)
def test_what_is_not_there_is_refused(options, message):
    with pytest.raises(ValueError) as refused:
        slot_tokens(memory_model("llama"), tiny_tokenizer(), **{"layer": 1, "slots": [0], **options})
    assert str(refused.value) == message


def test_a_model_without_slots_and_a_memory_that_is_elsewhere_are_refused():
    with pytest.raises(
        ValueError,
        match=r"this llama model has no memory whose slots add values; expected one upscaled with .* linear",
    ):
        memory_of_slots(tiny_model("llama"), 1)
    model = memory_model("llama")
    model.model.layers[MEMORY_LAYERS[0]].memory.to("meta")
    with pytest.raises(ValueError, match="the memory of layer 1 is offloaded; expected its parameters on a device"):
        memory_of_slots(model, 1)

"""Models whose blocks wait in tiers: they compute the same, and nothing that happens to model or bank leaves a stale block."""

import copy
import pickle

import pytest
import torch
from models.hierarchical_models import IDS, OTHER_IDS, fill, hierarchical_model
from models.hosting import logits
from tiny import prompt

from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.banks.tiers import TIERS

TIERED = [
    {1: one, 3: other}
    for one, other in (("device", "device"), ("disk", "disk"), ("device", "disk"), ("memory", "device"))
]


@pytest.fixture(params=TIERED, ids=lambda levels: "-".join(levels.values()))
def model(request, tmp_path):
    """A model with tiers, whose blocks were all fetched once."""
    model = hierarchical_model("llama", "hier-ffn", tmp_path, torch.float32)
    model.open_banks(tmp_path, tiers={"levels": request.param})
    for ids in (IDS, OTHER_IDS):
        logits(model, prompt(), memory_ids=ids)
    return model


@pytest.fixture
def plain(tmp_path):
    """Opens the same bank without tiers, in a model of its own."""

    def opened(folder=tmp_path):
        model = hierarchical_model("llama", "hier-ffn", tmp_path / "plain", torch.float32)
        model.open_banks(folder)
        return model

    return opened


def the_same(model, other):
    return all(
        torch.equal(logits(model, prompt(), memory_ids=ids), logits(other, prompt(), memory_ids=ids))
        for ids in (IDS, OTHER_IDS, IDS.flip(0))
    )


def test_every_tier_computes_the_same(model, plain):
    assert the_same(model, plain())
    statistics = model.banks.statistics()
    assert tuple(statistics) == TIERS and sum(counts.misses for counts in statistics.values()) >= 6
    tokens = model.generate(prompt(6), memory_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    expected = plain().generate(prompt(6), memory_ids=IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(tokens, expected)


def test_what_a_training_step_changed_is_served(model, plain):
    other = plain()
    before = logits(model, prompt(), memory_ids=IDS)
    for one in (model, other):
        bank = one.train().banks.train()["hier-ffn"]
        one(prompt(), labels=prompt(), memory_ids=IDS).loss.backward()
        bank.step(1e-1, (0.9, 0.95), 1e-8, 0.0)
        one.eval()
    assert the_same(model, other)
    assert not torch.allclose(logits(model, prompt(), memory_ids=IDS), before, atol=1e-3)


def test_training_gets_masters_and_not_what_waits(model):
    """Gradients reach them, and what was read ahead is left alone."""
    bank = model.train().banks.train()["hier-ffn"]
    model.prefetch_memory(IDS)
    model(prompt(), labels=prompt(), memory_ids=IDS).loss.backward()
    assert len(bank.leaves()) == 4


def test_what_an_edit_put_in_the_place_of_the_bank_is_served_once_it_is_opened(model, plain, tmp_path):
    """As `midus bank ... --overwrite` does: the folder is another one afterwards."""
    before = plain()
    model.save_pretrained(tmp_path / "edited")
    folder = tmp_path / "edited" / "memory_bank" / "hier-ffn"
    writer = MemoryBank(folder, model.banks.layouts["hier-ffn"], writable=True)
    for level, index in ((1, 1), (3, 13)):
        writer.forget(level, index)
    writer.close()
    (tmp_path / "memory_bank").rename(tmp_path / "old")
    (tmp_path / "edited" / "memory_bank").rename(tmp_path / "memory_bank")
    tiers = model.banks.of("hier-ffn").tiers
    assert the_same(model, before)  # what it opened is one bank, all of it
    model.open_banks(tmp_path, tiers=tiers)
    assert the_same(model, plain()) and not the_same(model, before)


def test_a_model_in_another_dtype_gets_its_blocks_in_it(model, plain):
    other = plain()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        assert the_same(model.to(dtype), other.to(dtype))


def test_a_model_that_leaves_its_device_finds_its_blocks_there(model):
    expected = logits(model, prompt(), memory_ids=IDS)
    fetched = copy.deepcopy(model).to("meta").fetch_memory(IDS)["hier-ffn"]
    assert all(record.device.type == "meta" for record in fetched.records.values())
    assert torch.equal(logits(model, prompt(), memory_ids=IDS), expected)


def test_copies_serve_what_was_written_since(model, plain, tmp_path):
    """One that was made by `deepcopy` reads the same bank; one that was pickled opens it anew, with the same tiers."""
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert all(the_same(one, model) for one in copies)
    assert copies[1].banks.of("hier-ffn").tiers == model.banks.of("hier-ffn").tiers
    layout = model.banks.layouts["hier-ffn"]
    writer = MemoryBank(tmp_path / "memory_bank" / "hier-ffn", layout, writable=True)
    before = logits(model, prompt(), memory_ids=IDS)
    writer.write(1, 1, torch.zeros(layout.record_numel(1)))
    fill(writer, but=[(1, 1)])
    writer.close()
    assert all(the_same(one, plain()) for one in (model, *copies))
    assert not torch.equal(logits(model, prompt(), memory_ids=IDS), before)

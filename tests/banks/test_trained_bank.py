"""Blocks that train: each as AdamW would train it if it saw the steps that fetched it alone."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from banks.trained_blocks import (
    EVERY,
    FETCHED,
    PATHS,
    SETTINGS,
    bank_in,
    blocks_of,
    by_adamw,
    loss_of,
    train,
)
from safetensors.torch import load_file, save_file

from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import level_file


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": 0.0},
        {"weight_decay": 1e-3, "lr": 1e-2, "eps": 1e-8},
        {"betas": (0.5, 0.999)},
        {"eps": 0.1},
        {"betas": (0.0, 0.9)},
    ],
    ids=str,
)
def test_blocks_train_as_adamw_trains_them_in_the_steps_that_fetch_them(changes, folder):
    settings, bank = {**SETTINGS, **changes}, bank_in(folder)
    start = blocks_of(bank)
    train(bank, settings=settings)
    actual, expected = blocks_of(bank), by_adamw(folder, settings)
    for key in EVERY:
        assert (actual[key] - start[key]).abs().max() > 5e-3
        torch.testing.assert_close(actual[key].double(), expected[key], rtol=2e-5, atol=2e-6)
    assert bank.touched() == EVERY


def test_rates_may_change_between_steps(folder):
    """As a schedule changes them; decay and rate are those of the step."""
    bank = bank_in(folder)
    master = bank.block(3, 5)
    own = master.detach().double().clone().requires_grad_()
    optimizer = torch.optim.AdamW([own], lr=1.0, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step, lr in enumerate((1e-2, 5e-3, 1e-3)):
        gradient = torch.linspace(-1, 2, len(own)).roll(step)
        master = bank.block(3, 5)
        master.grad, own.grad = gradient.clone(), gradient.double()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        bank.step(lr, (0.9, 0.95), 1e-6, 0.1)
    torch.testing.assert_close(master.detach().double(), own.detach(), rtol=1e-5, atol=1e-6)


def test_gradients_of_several_passes_add_up_before_a_step(folder):
    bank = bank_in(folder)
    for step in (0, 3):
        loss_of(bank.fetch(torch.tensor(PATHS[step])), step).backward()
    keys = sorted(FETCHED[0] | FETCHED[3])
    assert len(bank.leaves()) == len(keys)
    together = [leaf.grad.clone() for leaf in bank.leaves()]
    bank.forget_gradients()
    assert bank.leaves() == []
    sums = {key: torch.zeros_like(bank.block(*key)) for key in keys}
    for step in (0, 3):
        loss_of(bank.fetch(torch.tensor(PATHS[step])), step).backward()
        for key in FETCHED[step]:
            sums[key] += bank.block(*key).grad
        bank.forget_gradients()
    for result, key in zip(together, keys, strict=True):
        torch.testing.assert_close(result, sums[key])


def test_a_step_without_gradients_changes_nothing(folder):
    bank = bank_in(folder)
    train(bank, steps=[0])
    before = blocks_of(bank)
    bank.step(**SETTINGS)
    bank.fetch(torch.tensor(PATHS[1]))
    bank.step(**SETTINGS)
    after = blocks_of(bank)
    assert all(torch.equal(after[key], before[key]) for key in EVERY)
    assert bank.touched() == sorted(FETCHED[0])


def test_processes_get_the_mean_of_the_gradients_of_all(folder, monkeypatch):
    """Of every block that any of two processes fetched, zeros where the other did not; so their blocks stay equal."""
    banks = [bank_in(folder), bank_in(folder)]
    gradients = []
    for bank, step in zip(banks, (0, 1), strict=True):
        loss_of(bank.fetch(torch.tensor(PATHS[step])), step).backward()
        gradients.append({key: leaf.grad.clone() for key, leaf in bank._leaves.items()})
    keys = sorted(FETCHED[0] | FETCHED[1])
    zeros = {key: torch.zeros(banks[0].layout.record_numel(key[0])) for key in keys}
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda of_all, own: of_all.__setitem__(slice(None), [sorted(g) for g in gradients])
    )
    for bank, own in zip(banks, gradients, strict=True):
        (other,) = (result for result in gradients if result is not own)
        calls = iter(keys)
        monkeypatch.setattr(
            dist, "all_reduce", lambda grad, calls=calls, other=other: grad.add_((zeros | other)[next(calls)])
        )
        bank.average_gradients()
        assert next(calls, None) is None
        for key, leaf in zip(keys, bank.leaves(), strict=True):
            torch.testing.assert_close(leaf.grad, sum((zeros | result)[key] for result in gradients) / 2)
        bank.step(**SETTINGS)
    first, second = (blocks_of(bank, keys) for bank in banks)
    assert all(torch.equal(first[key], second[key]) for key in keys)
    assert banks[0].touched() == banks[1].touched() == keys


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_looking_at_blocks_wants_no_gradients_and_touches_nothing(mode, folder):
    """An evaluation between two steps: its blocks need no room for moments, and are not written when the bank is saved."""
    bank = bank_in(folder)
    train(bank, steps=[0])
    held = set(bank._leaves)
    with mode():
        fetched = bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]]))
        assert bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]])) is fetched
    assert not any(record.requires_grad or record.is_inference() for record in fetched.records.values())
    assert set(bank._leaves) == held and bank.touched() == sorted(FETCHED[0])
    train(bank, steps=[3])  # blocks that were looked at
    with torch.no_grad():
        again = bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]]))
        assert torch.equal(again.blocks_for(0).levels[1].tensors["gate"][1], blocks_of(bank)[3, 5][:4].view(1, 4))
    assert again is not fetched


def test_blocks_that_were_trained_and_others_of_the_bank_are_looked_at_together(folder, tmp_path):
    bank = bank_in(folder, torch.bfloat16)
    train(bank, steps=[0])
    bank.save_state(tmp_path / "state")
    bank.load_state(tmp_path / "state")
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad():
            fetched = bank.fetch(torch.tensor([[0, 1, 5], [1, 3, 9]]), dtype=dtype)
        assert bank.touched() == sorted(FETCHED[0])
        trained, other = fetched.records[3]
        assert torch.equal(trained, blocks_of(bank)[3, 5].to(dtype))
        assert torch.equal(other, bank.bank.block(3, 9).to(dtype))


def broken_state(file, change: str) -> None:
    """Change the state of level 3, which has 27 nodes and the generic block."""
    state = load_file(file)
    if change == "other size":
        state["states"] = state["states"][:, :, 1:].contiguous()
    elif change == "fewer rows":
        state["states"] = state["states"][1:].contiguous()
    elif change == "fewer steps":
        state["steps"] = state["steps"][1:].contiguous()
    elif change == "27":
        state["nodes"][0] = 27
    elif change == "no nodes":
        del state["nodes"]
    save_file(state, file)
    if change == "no file":
        file.unlink()
    elif change == "no tensors":
        file.write_bytes(b"text")
    elif change == "cut":
        file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("other size", "The size of tensor"),
        ("fewer rows", "out of bounds"),
        ("fewer steps", "shorter"),
        ("27", "out of bounds"),
        ("no nodes", "nodes"),
        ("no file", "No such file"),
        ("no tensors", "header|Header"),
        ("cut", ""),
    ],
)
def test_a_state_that_is_not_of_this_bank_is_refused(folder, tmp_path, change, message):
    bank = bank_in(folder)
    train(bank)
    bank.save_state(tmp_path / "state")
    broken_state(tmp_path / "state" / level_file(3), change)
    other = bank_in(folder)
    remedy = "expected that of a run that trains blocks. Resume from another checkpoint"
    with pytest.raises(BankError, match=rf"state of blocks in .* cannot be read \(.*({message}).*\); {remedy}"):
        other.load_state(tmp_path / "state")


def test_fetches_that_want_gradients_serve_one_pass_each(folder):
    bank = bank_in(folder)
    ids = torch.tensor(PATHS[0])
    first, second = bank.fetch(ids), bank.fetch(ids)
    assert first is not second
    with torch.no_grad():
        looked = bank.fetch(ids)
    assert bank.fetch(ids) is not looked and all(record.requires_grad for record in bank.fetch(ids).records.values())


def test_masters_are_in_float32_whatever_the_bank_stores(folder):
    """Steps that bfloat16 would round away add up."""
    bank = bank_in(folder, torch.bfloat16)
    bank.block(3, 5).data.fill_(1.0)
    for _ in range(20):
        bank.block(3, 5).grad = torch.ones(bank.layout.record_numel(3))
        bank.step(1e-4, (0.9, 0.95), 1e-8, 0.0)
    torch.testing.assert_close(blocks_of(bank)[3, 5], torch.full((24,), 1 - 20e-4))


def test_what_trains_leaves_nothing_on_the_disk_and_takes_what_was_touched(folder, tmp_path, monkeypatch):
    """Not while it is used either: a process that is killed cannot clean up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    bank = bank_in(folder)
    train(bank)
    assert bank._states and not list((tmp_path / "temporary").iterdir())
    untouched = [row for row in range(28) if (3, row - 1) not in bank.touched()]
    assert not bank._states[3][untouched].any()

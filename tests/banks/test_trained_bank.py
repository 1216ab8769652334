"""Blocks that train: each as AdamW would train it if it saw the steps that fetched it alone; put aside, saved, gone on from."""

import json
import tempfile

import pytest
import torch
import torch.distributed as dist

from midus_config.fetched_blocks import BankLayout
from midus_config.memories.hierarchical import HierFFNOptions
from midus_config.model_sizes import ModelSizes
from midus_hf.banks import MemoryBank
from midus_hf.banks.level_file import BankError, LevelFile
from midus_hf.banks.memory_bank import create_bank
from midus_hf.banks.trained_bank import TrainedBank

SIZES = ModelSizes(hidden_size=4, num_heads=2, intermediate_size=6, num_layers=2)
SETTINGS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
PATHS = [
    [[0, 1, 5], [0, 1, 5]],
    [[2, 7, 22], [0, 1, 4]],
    [[-1, -1, -1], [0, 0, 0]],
    [[0, 1, 5], [2, 7, 22]],
    [[0, 2, 6]],
]
"""What each of five steps fetches, from a tree of three children a node; level 2 has no blocks."""

FETCHED = [{(1, 0), (3, 5)}, {(1, 2), (3, 22), (1, 0), (3, 4)}, {(1, 3), (3, 27), (1, 0), (3, 0)}]
FETCHED += [{(1, 0), (3, 5), (1, 2), (3, 22)}, {(1, 0), (3, 6)}]
EVERY = sorted(set().union(*FETCHED))


def layout_of():
    return BankLayout("hier-ffn", (0, 1), HierFFNOptions(sizes=[2, 0, 1], branching=3).fetched(SIZES))


def bank_in(folder, dtype=torch.float32, **options):
    """A bank of which two blocks were written, one of which is trained here."""
    if not folder.exists():
        create_bank(folder, layout_of(), dtype, 4)
        bank = MemoryBank(folder, layout_of(), writable=True)
        for level, index in ((3, 5), (3, 9)):
            bank.write(level, index, torch.linspace(-1, 1, bank.layout.record_numel(level)))
        bank.close()
    return TrainedBank(MemoryBank(folder, layout_of()), **options)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


def loss_of(fetched, step):
    """Of what rows fetched, with other gradients at every step and for every row."""
    total = torch.zeros((), dtype=torch.float32)
    for layer in (0, 1):
        for number, level in enumerate(fetched.of(layer).levels):
            for row, block in enumerate(level.blocks.tolist()):
                for name, tensor in level.tensors.items():
                    place = torch.arange(tensor[0].numel(), dtype=torch.float32).view(tensor.shape[1:])
                    weight = (place + 3 * step + 7 * layer + 2 * number + row + len(name)).sin()
                    total = total + (weight * tensor[block]).sum() + 0.2 * (step + 1) * tensor[block].square().sum()
    return total


def train(bank, steps=range(5), settings=SETTINGS, between=lambda bank: None):
    for step in steps:
        loss_of(bank.fetch(torch.tensor(PATHS[step])), step).backward()
        between(bank)
        bank.step(**settings)


def blocks_of(bank, keys=EVERY):
    with torch.no_grad():
        return {key: bank.block(*key).detach().clone() for key in keys}


def by_adamw(folder, settings=SETTINGS):
    """The same in float64 by torch's AdamW, of which each block has one, whose steps are those that fetched it."""
    start = MemoryBank(folder, layout_of())
    masters = {key: start.block(*key).double().clone().requires_grad_() for key in EVERY}
    optimizers = {key: torch.optim.AdamW([master], **settings, foreach=False) for key, master in masters.items()}
    for step, paths in enumerate(PATHS):
        reader = bank_in(folder)
        reader.block = lambda level, index: masters[level, index]
        loss_of(reader.fetch(torch.tensor(paths)), step).backward()
        for key in FETCHED[step]:
            optimizers[key].step()
            masters[key].grad = None
        assert all(master.grad is None for master in masters.values())
        reader.close()
    start.close()
    return {key: master.detach() for key, master in masters.items()}


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
    found, expected = blocks_of(bank), by_adamw(folder, settings)
    for key in EVERY:
        assert (found[key] - start[key]).abs().max() > 5e-3
        torch.testing.assert_close(found[key].double(), expected[key], rtol=2e-5, atol=2e-6)
    assert bank.touched() == EVERY
    bank.close()


def test_rates_may_change_between_steps(folder):
    """As a schedule changes them; decay and rate are those of the step."""
    bank = bank_in(folder)
    master = bank._state(3, 5).master
    own = master.detach().double().clone().requires_grad_()
    optimizer = torch.optim.AdamW([own], lr=1.0, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    for step, lr in enumerate((1e-2, 5e-3, 1e-3)):
        gradient = torch.linspace(-1, 2, len(own)).roll(step)
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
    for found, key in zip(together, keys, strict=True):
        torch.testing.assert_close(found, sums[key])


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
        gradients.append({key: state.master.grad.clone() for key, state in bank._states.items()})
    keys = sorted(FETCHED[0] | FETCHED[1])
    zeros = {key: torch.zeros(banks[0].layout.record_numel(key[0])) for key in keys}
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda of_all, own: of_all.__setitem__(slice(None), [sorted(g) for g in gradients])
    )
    for bank, own in zip(banks, gradients, strict=True):
        (other,) = (found for found in gradients if found is not own)
        calls = iter(keys)
        monkeypatch.setattr(
            dist, "all_reduce", lambda grad, calls=calls, other=other: grad.add_((zeros | other)[next(calls)])
        )
        bank.average_gradients()
        assert next(calls, None) is None
        for key, leaf in zip(keys, bank.leaves(), strict=True):
            torch.testing.assert_close(leaf.grad, sum((zeros | found)[key] for found in gradients) / 2)
        bank.step(**SETTINGS)
    first, second = (blocks_of(bank, keys) for bank in banks)
    assert all(torch.equal(first[key], second[key]) for key in keys)
    assert banks[0].touched() == banks[1].touched() == keys


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_looking_at_blocks_wants_no_gradients_and_touches_nothing(mode, folder):
    """An evaluation between two steps: its blocks need no room for moments, and are not written when the bank is saved."""
    bank = bank_in(folder)
    train(bank, steps=[0])
    held = set(bank._states)
    with mode():
        fetched = bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]]))
        assert bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]])) is fetched
    assert not any(record.requires_grad or record.is_inference() for record in fetched.records.values())
    assert set(bank._states) == held and bank.touched() == sorted(FETCHED[0])
    train(bank, steps=[3])  # blocks that were looked at
    with torch.no_grad():
        again = bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]]))
        assert torch.equal(again.of(0).levels[1].tensors["gate"][1], blocks_of(bank)[3, 5][:4].view(1, 4))
    assert again is not fetched


@pytest.mark.parametrize("source", ["put aside", "resumed"])
def test_looking_at_blocks_that_were_trained_keeps_none_in_memory(source, folder, tmp_path):
    """Also where some blocks of a batch were trained, in float32, and others are the bank's."""
    bank = bank_in(folder, torch.bfloat16, bytes_in_memory=0)
    train(bank, steps=[0])
    if source == "resumed":
        bank.save_state(tmp_path / "state")
        bank.load_state(tmp_path / "state")
    for dtype in (torch.float32, torch.bfloat16, None):
        with torch.no_grad():
            fetched = bank.fetch(torch.tensor([[0, 1, 5], [1, 3, 9]]), dtype=dtype)
        assert bank._states == {} and bank.touched() == sorted(FETCHED[0])
        trained, other = fetched.records[3]
        assert torch.equal(trained, blocks_of(bank)[3, 5].to(trained.dtype))
        assert torch.equal(other, bank.bank.block(3, 9).to(other.dtype))


def test_fetches_that_want_gradients_serve_one_pass_each(folder):
    bank = bank_in(folder)
    ids = torch.tensor(PATHS[0])
    first, second = bank.fetch(ids), bank.fetch(ids)
    assert first is not second
    with torch.no_grad():
        looked = bank.fetch(ids)
    assert bank.fetch(ids) is not looked and all(record.requires_grad for record in bank.fetch(ids).records.values())


@pytest.mark.parametrize("room", [0, 1000])
def test_blocks_put_aside_train_to_the_same_bytes(room, folder):
    kept, aside = bank_in(folder), bank_in(folder, bytes_in_memory=room)
    train(kept)
    for step in range(5):
        train(aside, steps=[step])
        assert sum(state.nbytes for state in aside._states.values()) <= room
    assert aside.touched() == kept.touched() == EVERY
    expected, found = blocks_of(kept), blocks_of(aside)
    assert all(torch.equal(found[key], expected[key]) for key in EVERY)
    aside.close()
    kept.close()


def test_blocks_fetched_and_never_updated_are_not_written(folder, tmp_path):
    bank = bank_in(folder, bytes_in_memory=0)
    train(bank, steps=[0])
    bank.fetch(torch.tensor([[2, 8, 26]]))
    bank.step(**SETTINGS)
    assert bank.touched() == sorted(FETCHED[0])
    bank.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert saved.written(1) == [0] and saved.written(3) == [5, 9]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("room", [0, 2**30])
def test_saving_writes_what_was_trained_in_the_dtype_of_the_bank(room, dtype, folder, tmp_path):
    bank = bank_in(folder, dtype, bytes_in_memory=room)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(bank)
    bank.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert saved.dtype == dtype and saved.seed == bank.bank.seed
    assert saved.written(1) == [0, 2, 3] and saved.written(3) == [0, 4, 5, 6, 9, 22, 27]
    trained = blocks_of(bank)
    assert all(block.dtype == torch.float32 for block in trained.values())
    for key in EVERY:
        assert torch.equal(saved.block(*key), trained[key].to(dtype))
    for key in ((3, 9), (1, 1), (3, 1)):
        assert torch.equal(saved.block(*key), bank.bank.block(*key))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # its own files stay


def test_masters_are_in_float32_whatever_the_bank_stores(folder):
    """Steps that bfloat16 would round away add up."""
    bank = bank_in(folder, torch.bfloat16)
    bank._state(3, 5).master.data.fill_(1.0)
    for _ in range(20):
        bank._state(3, 5).master.grad = torch.ones(bank.layout.record_numel(3))
        bank.step(1e-4, (0.9, 0.95), 1e-8, 0.0)
    torch.testing.assert_close(blocks_of(bank)[3, 5], torch.full((24,), 1 - 20e-4))


@pytest.mark.parametrize("room", [0, 1000, 2**30])
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_training_goes_on_from_a_saved_state_to_the_same_bytes(stop, room, folder, tmp_path):
    whole = bank_in(folder)
    train(whole)
    first = bank_in(folder, bytes_in_memory=room)
    train(first, steps=range(stop))
    first.save_state(tmp_path / "state")
    half = blocks_of(first)
    train(first, steps=range(stop, 5))  # saving changed nothing
    second = bank_in(folder, bytes_in_memory=room)
    train(second, steps=[4])  # what was trained before is left behind
    second.load_state(tmp_path / "state")
    assert second.touched() == sorted(set().union(*FETCHED[:stop]))
    assert all(torch.equal(block, half[key]) for key, block in blocks_of(second).items())
    train(second, steps=range(stop, 5))
    expected = blocks_of(whole)
    for bank in (first, second):
        found = blocks_of(bank)
        assert bank.touched() == EVERY and all(torch.equal(found[key], expected[key]) for key in EVERY)
    second.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert all(torch.equal(saved.block(*key), expected[key]) for key in EVERY)


def test_a_state_saved_again_has_blocks_that_were_not_fetched_since(folder, tmp_path):
    bank = bank_in(folder)
    train(bank, steps=range(2))
    bank.save_state(tmp_path / "first")
    second = bank_in(folder)
    second.load_state(tmp_path / "first")
    train(second, steps=[4])
    second.save_state(tmp_path / "second")
    train(bank, steps=[4])
    third = bank_in(folder)
    third.load_state(tmp_path / "second")
    assert third.touched() == bank.touched()
    found, expected = blocks_of(third, bank.touched()), blocks_of(bank, bank.touched())
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_state_may_be_saved_where_it_was_loaded_from(folder, tmp_path):
    """Its blocks are read when they are fetched, so they are still read from there."""
    bank = bank_in(folder)
    train(bank, steps=range(2))
    bank.save_state(tmp_path / "state")
    expected = blocks_of(bank, bank.touched())
    second = bank_in(folder)
    second.load_state(tmp_path / "state")
    second.save_state(tmp_path / "state")
    third = bank_in(folder)
    third.load_state(tmp_path / "state")
    for again in (second, third):
        found = blocks_of(again, bank.touched())
        assert again.touched() == bank.touched() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_what_was_put_aside_before_a_state_was_loaded_is_left_behind(folder, tmp_path):
    bank = bank_in(folder, bytes_in_memory=0)
    start = blocks_of(bank)
    bank.save_state(tmp_path / "state")
    train(bank)
    bank.load_state(tmp_path / "state")
    assert bank.touched() == []
    again = blocks_of(bank)
    assert all(torch.equal(again[key], start[key]) for key in EVERY)
    train(bank, steps=[0])
    assert bank.touched() == sorted(FETCHED[0])


@pytest.mark.parametrize("damage", ["no list", "file", "sizes", "flipped"])
def test_a_state_that_is_damaged_or_anothers_is_refused(damage, folder, tmp_path):
    bank, state = bank_in(folder), tmp_path / "state"
    train(bank, steps=range(2))
    bank.save_state(state)
    if damage == "no list":
        (state / "touched.json").unlink()
    elif damage == "file":
        (state / "level-3.safetensors").unlink()
    elif damage == "sizes":
        found = json.loads((state / "touched.json").read_text())
        (state / "touched.json").write_text(json.dumps({**found, "3": found["3"][:-1]}))
    else:
        content = bytearray((state / "level-3.safetensors").read_bytes())
        content[-1] ^= 1
        (state / "level-3.safetensors").write_bytes(content)
    second = bank_in(folder)
    with pytest.raises(BankError):
        second.load_state(state)
        blocks_of(second)


def test_what_was_put_aside_leaves_nothing_on_the_disk(folder, tmp_path, monkeypatch):
    """Not while it is used either: a process that is killed cannot clean up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    bank = bank_in(folder, bytes_in_memory=0)
    train(bank)
    assert bank._waiting and not list((tmp_path / "temporary").iterdir())
    bank.close()


def test_a_bank_that_was_not_written_to_its_end_is_none(folder, tmp_path, monkeypatch):
    bank = bank_in(folder)
    train(bank)
    written, write = [], LevelFile.write

    def stop(*args):
        if len(written) == 3:
            raise OSError("the disk is gone")
        written.append(write(*args))

    monkeypatch.setattr(LevelFile, "write", stop)
    with pytest.raises(OSError, match="gone"):
        bank.save(tmp_path / "half")
    with pytest.raises(BankError, match="there is no memory bank"):
        MemoryBank(tmp_path / "half", layout_of())


def test_files_are_closed(folder, tmp_path):
    fds = tmp_path.joinpath("/proc/self/fd")
    before = len(list(fds.iterdir()))
    bank = bank_in(folder, bytes_in_memory=0)
    train(bank)
    bank.save_state(tmp_path / "state")
    for _ in range(2):
        bank.load_state(tmp_path / "state")
        train(bank, steps=[0])
    bank.close()
    assert len(list(fds.iterdir())) == before

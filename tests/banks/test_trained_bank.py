"""Blocks that train: each as AdamW would train it if it saw the steps that fetched it alone; saved, loaded and gone on from."""

import tempfile

import pytest
import torch
from safetensors.torch import load, save

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import MemoryBank, create_bank
from midus_hf.memories.hierarchical.options import BankLayout, HierFFNOptions, level_file
from midus_hf.memories.hierarchical.training import TrainedBank

SIZES = ModelSizes(hidden_size=4, num_heads=2, intermediate_size=6, num_layers=2)
SETTINGS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
# What each of five steps fetches, from a tree of three children a node; level 2 has no blocks.
PATHS = [[[0, 1, 5], [0, 1, 5]], [[2, 7, 22], [0, 1, 4]], [[-1, -1, -1], [0, 0, 0]]]
PATHS += [[[0, 1, 5], [2, 7, 22]], [[0, 2, 6]]]
FETCHED = [{(1, 0), (3, 5)}, {(1, 2), (3, 22), (1, 0), (3, 4)}, {(1, -1), (3, -1), (1, 0), (3, 0)}]
FETCHED += [{(1, 0), (3, 5), (1, 2), (3, 22)}, {(1, 0), (3, 6)}]
EVERY = sorted(set().union(*FETCHED))


def layout_of():
    return BankLayout("hier-ffn", (0, 1), HierFFNOptions(sizes=[2, 0, 1], branching=3).fetched(SIZES))


def bank_in(folder, dtype=torch.float32):
    """A bank of which two blocks were written, one of which is trained here."""
    if not folder.exists():
        create_bank(folder, layout_of(), dtype, 4)
        bank = MemoryBank(folder, layout_of())
        for level, index in ((3, 5), (3, 9)):
            bank.write(level, index, torch.linspace(-1, 1, bank.layout.record_numel(level)))
    return TrainedBank(MemoryBank(folder, layout_of()))


def loss_of(fetched, step):
    """Of what rows fetched, with other gradients at every step and for every row."""
    total = torch.zeros((), dtype=torch.float32)
    for layer in (0, 1):
        for number, level in enumerate(fetched.blocks_for(layer)):
            for row, block in enumerate(level.blocks.tolist()):
                for name, tensor in level.tensors.items():
                    numbers = torch.arange(tensor[0].numel(), dtype=torch.float32).view(tensor.shape[1:])
                    weight = (numbers + 3 * step + 7 * layer + 2 * number + row + len(name)).sin()
                    total = total + (weight * tensor[block]).sum() + 0.2 * (step + 1) * tensor[block].square().sum()
    return total


def train(bank, steps=range(5), settings=SETTINGS, rates=None):
    """Take steps of AdamW, with a rate of its own at each where rates are given."""
    for step in steps:
        loss_of(bank.fetch(torch.tensor(PATHS[step])), step).backward()
        bank.step(**(settings if rates is None else {**settings, "lr": rates[step]}))


def blocks_of(bank, keys=EVERY):
    with torch.no_grad():
        return {key: bank.block(*key).detach().clone() for key in keys}


def by_adamw(folder, settings=SETTINGS, rates=None):
    """The same in float64 by torch's AdamW, of which each block has one, whose steps are those that fetched it."""
    start = MemoryBank(folder, layout_of())
    masters = {key: start.block(*key).double().clone().requires_grad_() for key in EVERY}
    optimizers = {key: torch.optim.AdamW([master], **settings, foreach=False) for key, master in masters.items()}
    for step, paths in enumerate(PATHS):
        reader = bank_in(folder)
        reader.block = lambda level, index: masters[level, index]
        loss_of(reader.fetch(torch.tensor(paths)), step).backward()
        for key in FETCHED[step]:
            if rates is not None:
                optimizers[key].param_groups[0]["lr"] = rates[step]
            optimizers[key].step()
            masters[key].grad = None
        assert all(master.grad is None for master in masters.values()), step
    return {key: master.detach() for key, master in masters.items()}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


CHANGES = [{}, {"betas": (0.5, 0.999), "weight_decay": 0.0, "eps": 0.1}, {"rates": (1e-2, 8e-3, 6e-3, 2e-2, 3e-2)}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_blocks_train_as_by_adamw_in_their_steps(changes, dtype, folder):
    """In float32, whatever the bank stores."""
    rates, bank = changes.get("rates"), bank_in(folder, dtype)
    settings = {**SETTINGS, **{name: value for name, value in changes.items() if name != "rates"}}
    start = blocks_of(bank)
    train(bank, settings=settings, rates=rates)
    actual, expected = blocks_of(bank), by_adamw(folder, settings, rates)
    for key in EVERY:
        assert (actual[key] - start[key]).abs().max() > 5e-3
        torch.testing.assert_close(actual[key].double(), expected[key], rtol=2e-5, atol=2e-6)
    assert bank.touched() == EVERY


def test_step_without_gradients_changes_nothing(folder):
    bank, ids = bank_in(folder), torch.tensor(PATHS[0])
    with torch.no_grad():
        looked = bank.fetch(ids)
    fetched = bank.fetch(ids), bank.fetch(ids)  # with gradients, each serves one pass
    assert len({*map(id, (looked, *fetched))}) == 3
    assert all(record.requires_grad for record in fetched[0].records.values())
    train(bank, steps=[0])
    before = blocks_of(bank)
    bank.step(**SETTINGS)
    bank.fetch(torch.tensor(PATHS[1]))
    bank.step(**SETTINGS)
    after = blocks_of(bank)
    assert all(torch.equal(after[key], before[key]) for key in EVERY)
    assert bank.touched() == sorted(FETCHED[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fetch_without_gradients_touches_nothing(mode, folder):
    """An evaluation between two steps: its blocks need no room for moments, and are not written when the bank is saved."""
    bank = bank_in(folder)
    train(bank, steps=[0])
    held = set(bank._leaves)
    with mode():
        fetched = bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]]))
        assert bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]])) is fetched
    assert not any(record.requires_grad or record.is_inference() for record in fetched.records.values())
    assert set(bank._leaves) == held
    assert bank.touched() == sorted(FETCHED[0])
    train(bank, steps=[3])  # blocks that were looked at
    with torch.no_grad():
        again = bank.fetch(torch.tensor([[2, 8, 26], [0, 1, 5]]))
        assert torch.equal(again.blocks_for(0)[1].tensors["gate"][1], blocks_of(bank)[3, 5][:4].view(1, 4))
    assert again is not fetched


def test_trained_and_other_blocks_are_fetched_together(folder, tmp_path):
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


def rewritten(content, name, change):
    """A file of tensors with one changed."""
    tensors = load(content)
    return save({**tensors, name: change(tensors[name]).contiguous()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: rewritten(content, "states", lambda states: states[:, :, 1:]), "The size of tensor"),
        (lambda content: rewritten(content, "states", lambda states: states[1:]), "out of bounds"),
        (lambda content: rewritten(content, "steps", lambda steps: steps[1:]), "shorter"),
        (None, "No such file"),
        (lambda content: b"text", "header|Header"),
    ],
    ids=["other size", "fewer rows", "fewer steps", "no file", "no tensors"],
)
def test_state_of_another_bank_is_refused(folder, tmp_path, change, message):
    """Of level 3, which has 27 nodes and the generic block."""
    bank, file = bank_in(folder), tmp_path / "state" / level_file(3)
    train(bank)
    bank.save_state(tmp_path / "state")
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(file.read_bytes()))
    remedy = "expected that of a run that trains blocks. Resume from another checkpoint"
    with pytest.raises(ValueError, match=rf"state of blocks in .* cannot be read \(.*({message}).*\); {remedy}"):
        bank_in(folder).load_state(tmp_path / "state")


def test_training_leaves_no_file_and_fills_touched_blocks(folder, tmp_path, monkeypatch):
    """Not while it is used either: a process that is killed cannot clean up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    bank = bank_in(folder)
    train(bank)
    assert bank._states
    assert not list((tmp_path / "temporary").iterdir())
    untouched = [row for row in range(28) if (3, row - 1) not in bank.touched()]
    assert not bank._states[3][untouched].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trained_bank_is_saved_in_its_dtype(dtype, folder, tmp_path):
    bank = bank_in(folder, dtype)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(bank)
    bank.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert saved.dtype == dtype
    assert saved.description["seed"] == bank.bank.description["seed"]
    assert (saved.written(1), saved.written(3)) == ([-1, 0, 2], [-1, 0, 4, 5, 6, 9, 22])
    trained = blocks_of(bank)
    assert all(block.dtype == torch.float32 for block in trained.values())
    for key in EVERY:
        assert torch.equal(saved.block(*key), trained[key].to(dtype))
    for key in ((3, 9), (1, 1), (3, 1)):
        assert torch.equal(saved.block(*key), bank.bank.block(*key))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # its own files stay
    bank.save(folder)
    own = MemoryBank(folder, layout_of())
    assert all(torch.equal(own.block(*key), saved.block(*key)) for key in EVERY)


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_resumed_training_gives_the_same_bytes(stop, folder, tmp_path):
    whole, first, second, third = (bank_in(folder) for _ in range(4))
    train(whole)
    train(first, steps=range(stop))
    first.save_state(tmp_path / "state")
    half = blocks_of(first)
    train(second, steps=[4])  # what was trained before is left behind
    second.load_state(tmp_path / "state")
    second.save_state(tmp_path / "state")  # from where its blocks are read when they are fetched
    third.load_state(tmp_path / "state")
    for bank in (second, third):
        assert bank.touched() == sorted(set().union(*FETCHED[:stop]))
        assert all(torch.equal(block, half[key]) for key, block in blocks_of(bank).items())
    expected = blocks_of(whole)
    for bank in (first, second, third):  # saving changed nothing
        train(bank, steps=range(stop, 5))
        actual = blocks_of(bank)
        assert bank.touched() == EVERY
        assert all(torch.equal(actual[key], expected[key]) for key in EVERY)

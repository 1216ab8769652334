"""A bank whose blocks train for a few steps, and what AdamW makes of each by itself."""

import torch

from midus_hf.banks import MemoryBank
from midus_hf.banks.memory_bank import create_bank
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.hierarchical.options import HierFFNOptions

SIZES = ModelSizes(hidden_size=4, num_heads=2, intermediate_size=6, num_layers=2)
SETTINGS = {"lr": 3e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
# What each of five steps fetches, from a tree of three children a node; level 2 has no blocks.
PATHS = [
    [[0, 1, 5], [0, 1, 5]],
    [[2, 7, 22], [0, 1, 4]],
    [[-1, -1, -1], [0, 0, 0]],
    [[0, 1, 5], [2, 7, 22]],
    [[0, 2, 6]],
]
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
        for number, level in enumerate(fetched.blocks_for(layer).levels):
            for row, block in enumerate(level.blocks.tolist()):
                for name, tensor in level.tensors.items():
                    numbers = torch.arange(tensor[0].numel(), dtype=torch.float32).view(tensor.shape[1:])
                    weight = (numbers + 3 * step + 7 * layer + 2 * number + row + len(name)).sin()
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
    return {key: master.detach() for key, master in masters.items()}

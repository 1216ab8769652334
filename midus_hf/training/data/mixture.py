"""Several corpora in one run, each with a share of the run's sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Mixture(Dataset):
    """The sequences of a whole run, in the order in which the run trains on them.

    A corpus gives `weight / sum(weights)` of the sequences, a number that is rounded up or down so that all numbers add
    up to the length of the run. The n sequences of a corpus are spread evenly: one lies at a random position in each
    n-th part of the run. Sequences are taken from the corpus in a random order; when the corpus is used up, it is
    repeated in another random order.

    Args:
        weights: Weight of each corpus, above 0.
        sequences_a_step: Sequences that all processes together take in a step.
        seed: Seed of the order. The order depends on nothing else, so it is the same in every process and when a run
            resumes.

    Raises:
        ValueError: If the share of a corpus is less than one sequence.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float], steps: int, sequences_a_step: int, seed: int):
        num_sequences = steps * sequences_a_step
        self.parts, self.steps, self.counts = parts, steps, split_by_weights(weights, num_sequences)
        for index, count in enumerate(self.counts):
            if count == 0:
                raise ValueError(
                    f"corpus[{index}].weight is {weights[index]:g}, less than one of the {num_sequences:,} sequences of the "
                    "run; raise it, or leave this corpus out."
                )
        positions, indices = [], []
        for part, (dataset, count) in enumerate(zip(parts, self.counts, strict=True)):
            positions.append((np.arange(count) + np.random.default_rng([seed, part]).random(count)) / count)
            indices.append(_passes(len(dataset), count, [seed, part]))
        order = np.argsort(np.concatenate(positions), kind="stable")
        self._part = np.repeat(np.arange(len(parts)), self.counts)[order]
        self._index = np.concatenate(indices)[order]

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        part, sequence = self.place(index)
        return self.parts[part][sequence]

    def place(self, index: int) -> tuple[int, int]:
        """Return which corpus a sequence comes from, and its index in this corpus."""
        return int(self._part[index]), int(self._index[index])


def split_by_weights(weights: Sequence[float], total: int) -> list[int]:
    """Split `total` into whole numbers in proportion to weights, by the method of largest remainders."""
    shares = np.asarray(weights, np.float64) / np.sum(weights) * total
    counts = np.floor(shares).astype(np.int64)
    largest = np.argsort(counts - shares, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts.tolist()


def _passes(length: int, count: int, seed: list[int]) -> np.ndarray:
    """Return the first `count` indices of passes over `length` sequences, each pass in another random order."""
    passes = range(-(-count // length))
    orders = [np.random.default_rng([*seed, 1 + number]).permutation(length) for number in passes]
    return np.concatenate(orders)[:count]

"""Several corpora in one run, each for a share of its sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Mixture(Dataset):
    """The sequences of a whole run, in the order in which it takes them.

    A corpus gives `weight / sum(weights)` of them, to the nearest whole sequence, spread evenly over the run: of its n
    sequences one lies in each n-th part of the run, at a random place there. It is gone through in a random order, and
    once more in another when it is at its end.

    Args:
        parts: The sequences of each corpus.
        weights: One for each corpus, above 0.
        steps: Steps of the run.
        sequences_a_step: How many sequences all processes take in a step.
        seed: What the order follows from, and nothing else: it is the same in every process and when a run resumes.

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
        places, indices = [], []
        for part, (dataset, count) in enumerate(zip(parts, self.counts, strict=True)):
            places.append((np.arange(count) + np.random.default_rng([seed, part]).random(count)) / count)
            indices.append(_passes(len(dataset), count, [seed, part]))
        order = np.argsort(np.concatenate(places), kind="stable")
        self._part = np.repeat(np.arange(len(parts)), self.counts)[order]
        self._index = np.concatenate(indices)[order]

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        part, place = self.place(index)
        return self.parts[part][place]

    def place(self, index: int) -> tuple[int, int]:
        """The corpus that a sequence is from, and which of its sequences it is."""
        return int(self._part[index]), int(self._index[index])


def split_by_weights(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in proportion to weights: those nearest below, and one more for the largest remainders.

    Args:
        weights: Above 0.
        total: What the numbers add up to.
    """
    shares = np.asarray(weights, np.float64) / np.sum(weights) * total
    counts = np.floor(shares).astype(np.int64)
    largest = np.argsort(counts - shares, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return counts.tolist()


def _passes(length: int, count: int, seed: list[int]) -> np.ndarray:
    """The first `count` places of passes over `length` sequences, each in an order of its own."""
    passes = range(-(-count // length))
    orders = [np.random.default_rng([*seed, 1 + number]).permutation(length) for number in passes]
    return np.concatenate(orders)[:count]

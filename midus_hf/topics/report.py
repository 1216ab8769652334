"""The largest nodes of a tree, with the words that set each of them apart."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from midus_hf.topics.tree import ClusterTree

_READ, _TEXT, _WORDS = 100, 2000, 8  # documents of a node that are read, characters of each, words that are named
_WORD = re.compile(r"[^\W\d_]{3,}")


def nodes_with_words(
    tree: ClusterTree, leaves: np.ndarray, documents: np.ndarray, texts: Sequence[str], level: int, most: int
) -> dict[int, tuple[int, list[str]]]:
    """Return the largest nodes of a level, from 1, by number: how many windows each has, and words that others' texts have less of.

    `leaves` and `documents` are those of the windows, `[N]`. Raises a ValueError if the tree lacks the level, or `most` is below 1.
    """
    if not 1 <= level <= tree.levels:
        raise ValueError(f"level is {level}; expected a number from 1 to {tree.levels}, the levels of the tree.")
    if most < 1:
        raise ValueError(f"nodes is {most}; expected at least 1.")
    nodes = np.asarray(leaves, np.int64) // tree.branching ** (tree.levels - level)
    numbers, sizes = np.unique(nodes, return_counts=True)
    read, largest = {}, {}
    for index in sorted(np.argsort(-sizes, kind="stable")[:most].tolist()):
        node, members = int(numbers[index]), np.unique(documents[nodes == numbers[index]])
        drawn = np.random.default_rng([level, node]).permutation(members)[:_READ].tolist()
        read[node] = [set(_WORD.findall(texts[number][:_TEXT].lower())) for number in drawn]
    everywhere = Counter(word for of_node in read.values() for words in of_node for word in words)
    total = sum(map(len, read.values()))
    for node, of_node in read.items():
        shares = {word: count / len(of_node) for word, count in Counter(w for words in of_node for w in words).items()}
        ratios = {word: share * total / everywhere[word] for word, share in shares.items()}
        # Squared, so that words of every text, which chance puts into some topics more than into others, weigh little.
        weights = {word: shares[word] * math.log(ratio) ** 2 for word, ratio in ratios.items() if ratio > 1}
        words = sorted(weights, key=lambda word: (-weights[word], word))[:_WORDS]
        largest[node] = (int(sizes[numbers == node][0]), words)
    return largest

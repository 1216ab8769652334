"""The least time that an op can take on a GPU: the largest of what memory, caches, tensor cores and lanes need.

What is counted is what any implementation must do, once: inputs read and outputs written, rows gathered, products taken.
Of the peaks, memory and products were measured by others; cache and lanes are nominal.
"""

from dataclasses import dataclass

from benchmarks.ops.shapes import Shape


@dataclass(frozen=True)
class Peaks:
    """What a GPU can do in a second.

    Args:
        memory_bytes: Read from or written to its memory.
        cache_bytes: Gathered from its second-level cache.
        flop: Of bfloat16 matrix products.
        comparisons: Compares, minima and maxima by its scalar lanes.
        cache_size: Bytes of its second-level cache.
    """

    memory_bytes: float
    cache_bytes: float
    flop: float
    comparisons: float
    cache_size: float


H200 = Peaks(4.3e12, 5.5e12, 790e12, 132 * 64 * 1.755e9, 50e6)
"""Comparisons run at half the rate of additions: 64 a clock on each of 132 multiprocessors, at 1.755 GHz."""

_SELECTION_COMPARISONS = 1360
"""That selecting 4 of 64 rows, 4 of 64 columns and 4 of their pairs takes, per head and token."""


@dataclass(frozen=True)
class Work:
    """What must be done.

    Args:
        flop: Of matrix products.
        memory_bytes: Streams of token-sized tensors through memory.
        cache_bytes: Gathered rows.
        comparisons: Of selection.
    """

    flop: float = 0.0
    memory_bytes: float = 0.0
    cache_bytes: float = 0.0
    comparisons: float = 0.0

    def microseconds(self, peaks: Peaks) -> float:
        """The largest of the four times, which a good kernel overlaps."""
        return 1e6 * max(
            self.flop / peaks.flop,
            self.memory_bytes / peaks.memory_bytes,
            self.cache_bytes / peaks.cache_bytes,
            self.comparisons / peaks.comparisons,
        )


def scoring_flop(shape: Shape, tokens: int) -> float:
    """Products of each head's query halves with all its sub-keys."""
    return 2.0 * tokens * shape.heads * shape.n * shape.head_dim


def expansion_flop(shape: Shape) -> float:
    """The bank times the transform of each head."""
    return 2.0 * shape.slots * shape.head_dim**2 * shape.heads


def stream_bytes(shape: Shape, tokens: int, element: int) -> float:
    """One tensor `[S, H, d]`."""
    return float(tokens * shape.width * element)


def gathered_bytes(shape: Shape, tokens: int, element: int) -> float:
    """k rows of a head's width for each head of each token."""
    return float(tokens * shape.heads * shape.k * shape.head_dim * element)


def saved_bytes(shape: Shape, tokens: int) -> float:
    """Slots and weights that the gradient needs, 16 bits each."""
    return float(tokens * shape.heads * shape.k * 4)


def transform_flop(shape: Shape, tokens: int) -> float:
    """The heads' transforms of the bank or of what each token gathered, whichever is less."""
    return min(expansion_flop(shape), 2.0 * tokens * shape.heads * shape.head_dim**2)


def headwise_work(shape: Shape, tokens: int, element: int, mode: str) -> Work:
    """Head-wise memory with expanded values. Backward: products of rows and gradients, and sums of gradients by row."""
    if mode == "forward":
        return Work(
            flop=scoring_flop(shape, tokens) + transform_flop(shape, tokens),
            memory_bytes=2 * stream_bytes(shape, tokens, element),
            cache_bytes=gathered_bytes(shape, tokens, element),
            comparisons=_selection(shape, tokens),
        )
    return Work(
        flop=2 * scoring_flop(shape, tokens) + 2 * transform_flop(shape, tokens),
        memory_bytes=3 * stream_bytes(shape, tokens, element) + saved_bytes(shape, tokens),
        cache_bytes=2 * gathered_bytes(shape, tokens, element),
    )


def selection_work(shape: Shape, tokens: int, element: int, mode: str) -> Work:
    """Product-key selection alone; scores in 32 bits, slots in 16."""
    found = float(tokens * shape.heads * shape.k * 6)
    if mode == "forward":
        return Work(
            flop=scoring_flop(shape, tokens),
            memory_bytes=stream_bytes(shape, tokens, element) + found,
            comparisons=_selection(shape, tokens),
        )
    return Work(
        flop=2 * scoring_flop(shape, tokens),
        memory_bytes=2 * stream_bytes(shape, tokens, element) + found,
    )


def bag_work(shape: Shape, tokens: int, element: int, mode: str) -> Work:
    """One bag of H * k rows a token out of `[N, D]`, gathered row by row or as a product with all rows, whichever is less.

    The bank is taken to stay in the cache.
    """
    rows = float(tokens * shape.heads * shape.k * shape.width * element)
    weights = float(tokens * shape.heads * shape.k * 6)
    passes = 1 if mode == "forward" else 2
    gathering = Work(
        memory_bytes=(1 if mode == "forward" else 2) * weights + stream_bytes(shape, tokens, element),
        cache_bytes=passes * rows,
    )
    multiplying = Work(
        flop=passes * 2.0 * tokens * shape.slots * shape.width,
        memory_bytes=gathering.memory_bytes,
    )
    return min(gathering, multiplying, key=lambda work: work.microseconds(H200))


def product_key_memory_work(shape: Shape, tokens: int, element: int, mode: str) -> Work:
    """Selection, then one bag a token."""
    selecting, bag = selection_work(shape, tokens, element, mode), bag_work(shape, tokens, element, mode)
    return Work(
        flop=selecting.flop + bag.flop,
        memory_bytes=selecting.memory_bytes + bag.memory_bytes,
        cache_bytes=selecting.cache_bytes + bag.cache_bytes,
        comparisons=selecting.comparisons,
    )


def peaks_of(device: str) -> Peaks | None:
    """Of a GPU by its name; None where they are not known."""
    return H200 if "H200" in device else None


def _selection(shape: Shape, tokens: int) -> float:
    """The count for n = 64 and k = 4, in proportion to other n and k."""
    return _SELECTION_COMPARISONS * (shape.n / 64) * (shape.k / 4) * tokens * shape.heads

"""The least time that an op can take on a GPU: the largest of the times that memory, caches, tensor cores and lanes need.

Work is what every implementation must do, counted once: reading inputs, writing outputs, gathering rows, computing
products. The peaks of memory and products were measured by others; the peaks of cache and lanes are nominal.
"""

from dataclasses import dataclass

from benchmarks.ops.shapes import Shape


@dataclass(frozen=True)
class Peaks:
    """Rates of a GPU per second: bytes of memory, bytes gathered from the cache, bfloat16 operations, comparisons of lanes."""

    memory_bytes: float
    cache_bytes: float
    flop: float
    comparisons: float


# Peaks of an H200. Comparisons run at half the rate of additions: 64 per clock on each of 132 multiprocessors, at
# 1.755 GHz.
H200 = Peaks(4.3e12, 5.5e12, 790e12, 132 * 64 * 1.755e9)

# Comparisons per head and token for selecting 4 of 64 rows, 4 of 64 columns and 4 of their pairs.
_SELECTION_COMPARISONS = 1360


@dataclass(frozen=True)
class Work:
    """Work that any implementation of a call must do: operations of products, bytes of tensors, bytes of rows, comparisons."""

    flop: float = 0.0
    memory_bytes: float = 0.0
    cache_bytes: float = 0.0
    comparisons: float = 0.0

    def microseconds(self, peaks: Peaks) -> float:
        """Return the largest of the four times, since a good kernel overlaps them."""
        return 1e6 * max(
            self.flop / peaks.flop,
            self.memory_bytes / peaks.memory_bytes,
            self.cache_bytes / peaks.cache_bytes,
            self.comparisons / peaks.comparisons,
        )


def scoring_flop(shape: Shape, tokens: int) -> float:
    """Count the operations of each head's query halves times all of the head's sub-keys."""
    return 2.0 * tokens * shape.heads * shape.n * shape.head_dim


def expansion_flop(shape: Shape) -> float:
    """Count the operations of the bank times the transform of each head."""
    return 2.0 * shape.slots * shape.head_dim**2 * shape.heads


def stream_bytes(shape: Shape, tokens: int, element: int) -> float:
    """Count the bytes of one tensor `[S, H, d]`."""
    return float(tokens * shape.width * element)


def gathered_bytes(shape: Shape, tokens: int, element: int) -> float:
    """Count the bytes of k rows of a head's width for each head of each token."""
    return float(tokens * shape.heads * shape.k * shape.head_dim * element)


def saved_bytes(shape: Shape, tokens: int) -> float:
    """Count the bytes of the slots and weights that the gradient needs, 16 bits each."""
    return float(tokens * shape.heads * shape.k * 4)


def transform_flop(shape: Shape, tokens: int) -> float:
    """Count the operations of the heads' transforms of the bank or of the gathered sums, whichever are fewer."""
    return min(expansion_flop(shape), 2.0 * tokens * shape.heads * shape.head_dim**2)


def headwise_work(shape: Shape, tokens: int, element: int, mode: str) -> Work:
    """Return the work of head-wise memory; backward, this is products of rows and gradients, and sums of gradients per row."""
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
    """Return the work of product-key selection alone, with scores of 32 bits and slots of 16."""
    result_bytes = float(tokens * shape.heads * shape.k * 6)
    if mode == "forward":
        return Work(
            flop=scoring_flop(shape, tokens),
            memory_bytes=stream_bytes(shape, tokens, element) + result_bytes,
            comparisons=_selection(shape, tokens),
        )
    return Work(
        flop=2 * scoring_flop(shape, tokens),
        memory_bytes=2 * stream_bytes(shape, tokens, element) + result_bytes,
    )


def bag_work(shape: Shape, tokens: int, element: int, mode: str) -> Work:
    """Return the work of one bag per token: H * k rows of `[N, D]`, gathered or multiplied with all rows, whichever is faster.

    The bank is assumed to stay in the cache.
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
    """Return the work of selection, then of one bag per token."""
    selecting, bag = selection_work(shape, tokens, element, mode), bag_work(shape, tokens, element, mode)
    return Work(
        flop=selecting.flop + bag.flop,
        memory_bytes=selecting.memory_bytes + bag.memory_bytes,
        cache_bytes=selecting.cache_bytes + bag.cache_bytes,
        comparisons=selecting.comparisons,
    )


def peaks_of(device: str) -> Peaks | None:
    """Return the peaks of a GPU by its name; None if they are unknown."""
    return H200 if "H200" in device else None


def _selection(shape: Shape, tokens: int) -> float:
    """Count the comparisons of selection, in proportion to the count for n = 64 and k = 4."""
    return _SELECTION_COMPARISONS * (shape.n / 64) * (shape.k / 4) * tokens * shape.heads

"""UltraMemV2: Tucker-decomposed retrieval from a large value table, parallel to feed-forward networks."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from midus_hf.config.declared_tensors import ZEROS, Constant, DeclaredTensor, Initial, LateInitial, ModelSizes, Normal
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.flops import linear, rms_norm, top_k
from midus_hf.memories.options import (
    ADDRESSING_HELP,
    RANDOM_SLOTS,
    Addressing,
    MemoryOptions,
    SharedTables,
    package_only,
)
from midus_hf.memories.registry import register_memory

if TYPE_CHECKING:
    import torch

Zero = Literal["values", "projection", "none"]

# Most rows, and columns, that the first stage keeps: with more, the grid of their scores becomes too large (section 4.1).
_MAX_SIDE = 128
_MAX_SLOTS = 2**31 - 1
# Candidates to score in all trials together, and bounds of their number: a mean of many candidates needs few trials.
_CANDIDATES, _MIN_TRIALS, _MAX_TRIALS = 1 << 20, 4, 512


@dataclass(frozen=True)
class UniformCores:
    """Square matrices `[..., r, r]`, uniform between 0 and 1, each divided by its largest singular value."""

    def fill(self, tensor: "torch.Tensor", generator: "torch.Generator | None" = None) -> None:
        import torch

        drawn = torch.empty(tensor.shape, dtype=torch.float32).uniform_(generator=generator)
        tensor.copy_(drawn / torch.linalg.matrix_norm(drawn, 2, keepdim=True))


class ScoreStatistics(NamedTuple):
    """Mean and variance of the scores of the k best slots, if scores of single keys are standard normal."""

    mean: float
    variance: float


MEASURED: dict[tuple[int, int, int, int], ScoreStatistics] = {}


def best_scores(n: int, rank: int, side: int, k: int) -> ScoreStatistics:
    """Measure the scores of the k best slots: draw scores and cores, the same at every call, and retrieve.

    There are n row keys and as many column keys, cores of rank r, and `side` rows and columns that the first stage chooses.
    """
    import torch

    sizes = (n, rank, side, k)
    if sizes in MEASURED:
        return MEASURED[sizes]
    trials = min(max(_MIN_TRIALS, _CANDIDATES // side**2), _MAX_TRIALS)
    draw: Any = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64, "device": "cpu"}
    rows, columns = torch.randn(2, trials, n, rank, **draw)
    # Cores are positive, so their leading singular vectors are too, up to their common sign.
    left, values, right = torch.linalg.svd(torch.rand(trials, rank, rank, **draw))
    core = (left * (values / values[:, :1])[:, None]) @ right
    # [trials, side, rank] each
    best_rows, best_columns = (
        states.gather(1, (states @ vector.abs()[..., None]).topk(side, dim=1).indices.expand(-1, -1, rank))
        for states, vector in ((rows, left[..., 0]), (columns, right[:, 0]))
    )
    chosen = (best_rows @ core @ best_columns.mT).flatten(1).topk(k).values
    MEASURED[sizes] = ScoreStatistics(chosen.mean().item(), chosen.var(correction=0).item())
    return MEASURED[sizes]


def gain_of_norms(key_width: int, *first_choice: int) -> Constant:
    """Return the gain of query and key norms by which the best slots' mean score starts at 1 (B.2).

    `first_choice` are the arguments of `best_scores`.
    """
    return Constant((key_width * _score_scale(best_scores(*first_choice))) ** -0.25)


def values_of_scores(
    slots: int, width: int, pre_width: int, layers: int, inner: float, hidden: int, *first_choice: int
) -> Normal:
    """Return the distribution of values that gives the variance of a feed-forward network (equation 21).

    The formula without pre-values follows from the same derivation. `slots` is the number that a token reads, `inner` the width of
    feed-forward networks divided by that of the model, and `first_choice` are the arguments of `best_scores`.
    """
    scores = best_scores(*first_choice)
    mean_square = (scores.mean**2 + scores.variance) / _score_scale(scores) ** 2
    summed = slots * mean_square * width * layers
    if pre_width:
        return Normal((0.2 * inner * hidden / (summed * pre_width)) ** 0.25)
    return Normal(math.sqrt(0.08 * inner * hidden / summed))


def _score_scale(scores: ScoreStatistics) -> float:
    """Return the divisor of scores: their mean, or 1 if so many slots are chosen that it is below 1."""
    return max(scores.mean, 1.0)


@register_memory("ultramem-v2", default_name="ultramem")
@dataclass(kw_only=True)
class UltraMemV2Options(MemoryOptions):
    """Size of the table, retrieval of slots, and use of values (sections 3.1 to 3.5, appendices B and E).

    A layer that reads g value tables of n * n rows has sqrt(g) * n row keys, rounded down, and as many column keys, one pair for
    every row that it reads. A first stage keeps k rows and k columns, at most 128 and all keys.
    """

    sites = ("beside-ffn", "skip")
    controls = {"one-row": {"n": 1, "k": 1, "share": "none"}, **RANDOM_SLOTS}
    value_roles = ("value",)  # the core has the role "transform" but mixes scores
    scales_initialisation = True  # equation 21 assumes feed-forward networks that start as in equation 20

    n: int = option(128, "keys per side; a value table has n * n rows")
    rank: int = option(2, "r of the Tucker core; each rank has separate queries and keys")
    k: int = option(32, "slots that each head retrieves per token")
    heads: int = option(1, "heads, each with separate queries, keys and cores; all read the same table")
    key_width: int | str = option("1/2", "D_k, a number or a fraction of the hidden size", "a number | 1/2")
    value_width: int | str = option("3/16", "D_v, the width of the rows that are summed", "a number | 3/16")
    pre_value_width: int | str = option(
        "1/16",
        "D_p, the width of pre-values, whose products with the input scale values; 0: values are not scaled",
        "a number | 1/16",
    )
    share: str = option(
        "none",
        "which value tables a layer reads. none: its own; all: one that all layers read; ring:G: its own and those of its G - 1 "
        "nearest neighbours, where the first layer counts as the neighbour of the last (appendix E.5)",
        "none | all | ring:G",
    )
    zero: Zero = option(
        "values",
        "what starts at zero, so that the memory adds zero. values: the rows that are summed; projection: the output projection; "
        "none: nothing, to train from scratch",
    )
    addressing: Addressing = option("content", ADDRESSING_HELP)

    @property
    def group(self) -> int:
        """G, the number of value tables that each layer reads."""
        return int(self.share.removeprefix("ring:")) if self.share.startswith("ring:") else 1

    @property
    def keys(self) -> int:
        """Number of row keys, and of column keys: the root of the rows that a layer reads, rounded down."""
        return math.isqrt(self.group * self.n**2)

    @property
    def side(self) -> int:
        """Number of rows, and of columns, that the first stage keeps."""
        return min(self.k, _MAX_SIDE, self.keys)

    @property
    def num_rows(self) -> int:
        """Number of rows of value tables that a layer reads, the slots that a head chooses among."""
        return self.keys**2

    def first_row(self, index: int, table_rows: int) -> int:
        """Return the first row that a layer, by its index, reads of a stored table; the rows form a ring.

        A layer that reads G tables leaves out the last few rows unless G is a square; other layers of the ring read these.
        """
        return (index - (self.group - 1) // 2) * self.n**2 % table_rows

    def width(self, name: str, sizes: ModelSizes) -> int:
        """Return the number of features by `key_width`, `value_width` or `pre_value_width`, or refuse it."""
        setting, least = getattr(self, name), 0 if name == "pre_value_width" else 1
        try:
            width = setting if isinstance(setting, int) else Fraction(setting) * sizes.hidden_size
        except (ValueError, ZeroDivisionError):
            raise RequestError(
                f"{name} is {setting!r}; expected a number, or a fraction of the hidden size such as 3/16."
            ) from None
        if isinstance(setting, int) and width < least:
            raise RequestError(f"{name} is {setting}; expected {least} or more.")
        width_limit = width if isinstance(setting, int) else sizes.hidden_size
        if not least <= width <= width_limit or width != int(width):
            raise RequestError(
                f"{name} is {setting} of hidden_size = {sizes.hidden_size}, which is {float(width):g}; expected a whole number "
                f"from {least} to the hidden size. Give the number itself."
            )
        return int(width)

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        hidden, key_width = sizes.hidden_size, self.width("key_width", sizes)
        value_width, pre_width = self.width("value_width", sizes), self.width("pre_value_width", sizes)
        linear_initial = Normal(math.sqrt(2 / (5 * hidden)))

        def projection(outputs: int, inputs: int) -> DeclaredTensor:
            return DeclaredTensor((outputs, inputs), "projection", linear_initial)

        # The dimensions of one element are those of checkpoints.
        cores = (self.heads, 1, 1, self.rank)
        keys = DeclaredTensor((self.heads, 1, self.keys, self.rank, key_width), "key", Normal(key_width**-0.5))
        gain = DeclaredTensor((key_width,), "norm", LateInitial(gain_of_norms, (key_width, *self._first_choice)))
        vector = DeclaredTensor(cores, "buffer", Constant(self.rank**-0.5))
        tensors = {
            "query_projection.weight": projection(2 * self.heads * self.rank * key_width, hidden),
            "row_keys": keys,
            "column_keys": keys,
            "query_norm_weight": gain,
            "key_norm_weight": gain,
            "core": DeclaredTensor((*cores, self.rank), "transform", UniformCores()),
            "row_vector": vector,
            "column_vector": vector,
        }
        if pre_width:
            tensors["pre_projection.weight"] = projection(pre_width, hidden)
        output = ZEROS if self.zero == "projection" else linear_initial
        shape = (hidden, value_width)
        tensors["value_projection.weight"] = DeclaredTensor(shape, "projection", output)
        return {**tensors, **(self._value_tables(sizes, 1) if self.share == "none" else {})}

    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple[SharedTables, ...]:
        if self.share == "none":
            return ()
        if self.group > len(layers):
            raise RequestError(
                f"share is {self.share!r}, but {len(layers)} layers have the memory; expected a group of at most that many tables."
            )
        return (SharedTables(layers, self._value_tables(sizes, 1 if self.share == "all" else len(layers))),)

    @property
    def _first_choice(self) -> tuple[int, int, int, int]:
        """Arguments of `best_scores`."""
        return self.keys, self.rank, self.side, self.k

    def _value_tables(self, sizes: ModelSizes, tables: int) -> dict[str, DeclaredTensor]:
        """Declare a number of tables that are stored as one."""
        rows, hidden = tables * self.n**2, sizes.hidden_size
        width, pre_width = self.width("value_width", sizes), self.width("pre_value_width", sizes)
        inner = (sizes.intermediate_size or 4 * hidden) / hidden
        arguments = (self.k * self.heads, width, pre_width, max(1, sizes.num_layers), inner, hidden)
        drawn = LateInitial(values_of_scores, (*arguments, *self._first_choice))
        initial: Initial = ZEROS if self.zero == "values" else drawn
        values = {"value_table": DeclaredTensor((rows, width), "value", initial)}
        if pre_width:
            values["pre_value_table"] = DeclaredTensor((rows, pre_width), "value", drawn)
        return values

    def check(self) -> None:
        for name in ("n", "rank", "k", "heads"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; expected 1 or more.")
        if not re.fullmatch(r"none|all|ring:[1-9]\d*", self.share):
            raise RequestError(f"share is {self.share!r}; expected none, all or ring:G, such as ring:4.")
        if self.num_rows > _MAX_SLOTS:
            raise RequestError(
                f"n is {self.n} and share {self.share!r}, which make {self.num_rows:,} slots; expected at most "
                f"{_MAX_SLOTS:,}. Lower n."
            )
        if self.k > self.side**2:
            raise RequestError(
                f"k is {self.k}; expected at most {self.side**2}, the pairs of {self.side} rows and {self.side} columns "
                "that the first stage keeps. Lower k, or raise n."
            )

    def check_fit(self, sizes: ModelSizes) -> None:
        key_width = self.width("key_width", sizes)
        for name in ("value_width", "pre_value_width"):
            self.width(name, sizes)
        if self.rank > key_width:
            raise RequestError(
                f"rank is {self.rank}, more than the {key_width} features of a key; expected fewer. Lower rank."
            )

    @package_only
    def values_read(self, sizes: ModelSizes) -> int:
        widths = self.width("value_width", sizes) + self.width("pre_value_width", sizes)
        return self.heads * self.k * widths

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Count the operations; keys are normalised once per pass, and singular vectors of cores do not count."""
        rows, hidden, key_width = batch * tokens, sizes.hidden_size, self.width("key_width", sizes)
        value_width, pre_width = self.width("value_width", sizes), self.width("pre_value_width", sizes)
        queries, vectors, slots = rows * self.heads, self.heads * self.rank, rows * self.heads * self.k
        grid = self.side**2
        first = 2 * top_k(queries, self.keys, self.side) + 4 * queries * self.rank * self.keys
        second = queries * (2 * self.side * self.rank**2 + 2 * grid * self.rank)
        return {
            "queries": linear(rows, hidden, 2 * vectors * key_width)
            + rms_norm(2 * vectors * (rows + self.keys), key_width),
            "scores": 2 * linear(rows * vectors, key_width, self.keys),
            "choice": first + second + top_k(queries, grid, self.k),
            "pre-values": (linear(rows, hidden, pre_width) + slots * (2 * pre_width + 1)) if pre_width else 0,
            "values": 2 * slots * value_width,
            "output projection": linear(rows, value_width, hidden),
            "residual adds": rows * hidden,
        }

"""UltraMemV2: Tucker-decomposed retrieval from a large value table, in parallel to every feed-forward network."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from midus_hf.config.declared_tensors import (
    ZEROS,
    Constant,
    DeclaredTensor,
    Initial,
    LateInitial,
    ModelSizes,
    Normal,
)
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.options import MemoryOptions, SharedTables
from midus_hf.memories.registry import register_memory
from midus_hf.memories.retrieval.options import (
    ADDRESSING_HELP,
    RANDOM_SLOTS,
    Addressing,
)
from midus_hf.memories.ultramem_v2.statistics import UniformCores, gain_of_norms, values_of_scores

Zero = Literal["values", "projection", "none"]

# Most rows, and columns, that the first stage keeps: with more, the grid of their scores becomes too large (section 4.1).
_MOST_ON_A_SIDE = 128
_MOST_SLOTS = 2**31 - 1


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
        return min(self.k, _MOST_ON_A_SIDE, self.keys)

    @property
    def num_rows(self) -> int:
        """Number of rows of value tables that a layer reads, the slots that a head chooses among."""
        return self.keys**2

    def first_row(self, index: int, table_rows: int) -> int:
        """Return the first row that a layer reads of a stored table. After the last row comes the first again.

        Row keys and column keys are equally many, so a layer that reads G tables leaves out the last few rows unless G is a
        square; other layers of the ring read these.

        Args:
            index: Number of the layer, from 0 among the layers that have the memory.
            table_rows: Rows of the stored table, which has `n * n` for each layer of a ring.
        """
        own = self.n**2
        return (index - (self.group - 1) // 2) * own % table_rows

    def width(self, name: str, sizes: ModelSizes) -> int:
        """Return the number of features given by `key_width`, `value_width` or `pre_value_width`.

        Raises:
            RequestError: If the option gives no whole number of features in its range.
        """
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
        if self.num_rows > _MOST_SLOTS:
            raise RequestError(
                f"n is {self.n} and share {self.share!r}, which make {self.num_rows:,} slots; expected at most "
                f"{_MOST_SLOTS:,}. Lower n."
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

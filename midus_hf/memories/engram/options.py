"""N-gram memory: rows of a table chosen by the last tokens of a text, as in Engram."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, ModelSizes, Normal
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.flops import ACTIVATIONS, SIGMOID, linear, rms_norm
from midus_hf.memories.options import MemoryOptions, SharedTables, definition_in, package_only
from midus_hf.memories.registry import register_memory

# Above all numbers of tokens, so that n-grams of `MAX_ORDER` tokens have numbers below 2^63.
TOKEN_NUMBER_LIMIT = 2**21
MAX_ORDER = 3


@register_memory("engram", default_name="ngram")
@dataclass(kw_only=True)
class EngramOptions(MemoryOptions):
    """Size and addressing of the table (Engram, arXiv 2601.07372, section 2).

    A token reads the rows of the n-grams that end at it, one or several per order, side by side: E features. Rows start at zero and
    projections do not, so that the memory adds zero and the first step's gradients reach all rows it read.
    """

    sites = ("beside-ffn", "behind-attention", "behind-layer")
    controls = {"one-row": {"rows": 1}, "random-slots": {"addressing": "random"}}

    table: Literal["hashed", "exact"] = option(
        "hashed",
        "hashed: n-grams share rows by hash; exact: a row per corpus n-gram, and none for others",
    )
    min_order: int = option(2, f"tokens of the shortest n-grams, from 1 to {MAX_ORDER}")
    max_order: int = option(3, f"tokens of the longest n-grams, from 1 to {MAX_ORDER}")
    match: Literal["every", "longest"] = option(
        "every", "rows of every order, or only of the longest known n-gram; longest is for table exact"
    )
    row_dropout: float = option(0.0, "share of the rows read that are left out at random in training")
    width: int = option(256, "features of the rows of one order")
    hash_heads: int = option(8, "rows per order, by different hashes, which share its width; not for table exact")
    rows: int = option(
        65536, "rows per order and hash head; 1 gives all known n-grams of table exact one row: a control"
    )
    kernel: int = option(
        4, "taps of the convolution over earlier tokens, as many tokens apart as the longest n-gram has; 0: none"
    )
    addressing: Literal["content", "random"] = option(
        "content",
        "content: rows by n-gram; random: fresh random rows per token and pass, a control",
    )
    known_tokens: int = option(
        0, "entries of the table that gives tokens of like text one number; 0: tokens are numbered by their ids"
    )
    known_ngrams: int = option(0, "n-grams that have a row, if the table is exact")

    @property
    def orders(self) -> range:
        """Numbers of tokens per n-gram, ascending."""
        return range(self.min_order, self.max_order + 1)

    @property
    def num_slots(self) -> int:
        """Number of rows of the table."""
        if self.table == "exact":
            return 1 + (min(1, self.known_ngrams) if self.rows == 1 else self.known_ngrams)
        return len(self.orders) * self.hash_heads * self.rows

    @property
    def num_read(self) -> int:
        """Number of rows that a token reads."""
        return len(self.orders) * (1 if self.table == "exact" else self.hash_heads)

    @property
    def row_width(self) -> int:
        """Number of features of a row."""
        return self.width if self.table == "exact" else self.width // self.hash_heads

    @property
    def moduli(self) -> tuple[int, ...]:
        """Numbers of rows that hashes choose among: the largest primes up to `rows`, descending."""
        count, primes = len(self.orders) * self.hash_heads, list[int]()
        for number in range(self.rows, 1, -1):
            if len(primes) == count:
                break
            if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
                primes.append(number)
        return tuple(primes) if self.rows > 1 else (1,) * count

    def multipliers(self, index: int) -> tuple[int, ...]:
        """Return an odd multiplier for each place of an n-gram, whose products with tokens are below 2^63.

        `index` is the layer's among the layers that have the memory, which hash differently.
        """
        state, drawn = index, []
        for _ in range(self.max_order):
            # The generator PCG's multiplier and increment; the upper half of its 128 bits is well mixed.
            state = (state * 0x2360ED051FC65DA44385DF649FCCF645 + 0x5851F42D4C957F2D14057B7EF767814F) % 2**128
            drawn.append((state >> 64) % (2**62 // TOKEN_NUMBER_LIMIT) * 2 + 1)
        return tuple(drawn)

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        hidden, read = sizes.hidden_size, self.num_read * self.row_width
        projection = DeclaredTensor((hidden, read), "projection", Normal(1.0 / math.sqrt(read)))
        gain = DeclaredTensor((hidden,), "norm", ONES)
        tensors = {
            "key_projection.weight": projection,
            "value_projection.weight": projection,
            "query_norm_weight": gain,
            "key_norm_weight": gain,
            "value_table": DeclaredTensor((self.num_slots, self.row_width), "value", ZEROS),
        }
        if self.kernel:
            tensors["convolution_norm_weight"] = gain
            tensors["convolution"] = DeclaredTensor((self.kernel, hidden), "transform", ZEROS)
        return tensors

    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple[SharedTables, ...]:
        """Declare the tables of known tokens and n-grams, which all layers share."""
        known = {"token_numbers": self.known_tokens, "ngrams": self.known_ngrams if self.table == "exact" else 0}
        tensors = {
            key: DeclaredTensor((count,), "buffer", ZEROS, dtype="int64") for key, count in known.items() if count
        }
        return (SharedTables(layers, tensors),) if tensors else ()

    def check(self) -> None:
        counts = {"width": "feature per order", "hash_heads": "row per order", "rows": "row per hash head"}
        for name, counted in counts.items():
            if getattr(self, name) < 1:
                raise RequestError(f"{name} is {getattr(self, name)}; expected at least one {counted}.")
        if not 1 <= self.min_order <= self.max_order <= MAX_ORDER:
            raise RequestError(
                f"min_order is {self.min_order} and max_order {self.max_order}; expected numbers of tokens from 1 to {MAX_ORDER}, "
                "the smaller one first."
            )
        if not 0 <= self.row_dropout < 1:
            raise RequestError(f"row_dropout is {self.row_dropout}; expected a share from 0 to below 1.")
        if self.kernel < 0:
            raise RequestError(f"kernel is {self.kernel}; expected a number of taps, or 0 for no convolution.")
        if min(self.known_tokens, self.known_ngrams) < 0:
            raise RequestError(
                f"known_tokens is {self.known_tokens} and known_ngrams {self.known_ngrams}; expected 0 or more."
            )
        if self.table == "exact":
            if self.hash_heads != EngramOptions.hash_heads or self.rows not in (1, EngramOptions.rows):
                raise RequestError(
                    f"table is 'exact', hash_heads {self.hash_heads} and rows {self.rows}; expected neither, since the corpus says "
                    "how many rows there are. Leave both out."
                )
            return
        if self.match == "longest":
            raise RequestError(
                "match is 'longest' and table 'hashed', where all n-grams have rows; expected table exact, or match every."
            )
        if self.known_ngrams:
            raise RequestError(
                f"table is 'hashed' and known_ngrams {self.known_ngrams}; expected 0, since all n-grams have rows."
            )
        if self.width % self.hash_heads:
            raise RequestError(
                f"width is {self.width}; expected a multiple of hash_heads = {self.hash_heads}, whose rows share the features of "
                "an order."
            )
        heads = len(self.orders) * self.hash_heads
        if len(self.moduli) < heads:
            raise RequestError(
                f"rows is {self.rows}; expected 1, or a number with {heads} primes up to it, one for each hash. Choose 100 or more."
            )

    @package_only
    def values_read(self, sizes: ModelSizes) -> int:
        return self.num_read * self.row_width

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Count the operations as `flops` does. Addresses are integers and do not count."""
        rows, hidden = batch * tokens, sizes.hidden_size
        taps = rows * hidden * (2 * self.kernel + ACTIVATIONS["silu"]) + rms_norm(rows, hidden)
        return {
            "projections": 2 * linear(rows, self.num_read * self.row_width, hidden),
            "gate": 2 * rms_norm(rows, hidden) + linear(rows, hidden, 1) + rows * (SIGMOID + hidden),
            "convolution": taps + rows * hidden if self.kernel else 0,
            "residual adds": rows * hidden,
        }

    @classmethod
    @package_only
    def paged_layer(cls) -> Any:
        return definition_in("midus_hf.memories.engram.layer", "PagedEngramMemory")

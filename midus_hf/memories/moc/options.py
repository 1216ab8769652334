"""Mixture of Chapters: latent memory tokens in chapters, some of which a router opens (section 5)."""

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, ModelSizes, Normal
from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.memories.flops import (
    SOFTMAX,
    attention_products,
    attention_weights,
    linear,
    rms_norm,
    router_losses,
    top_k,
)
from midus_hf.memories.options import RANDOM_SLOTS, Addressing, MemoryOptions, SharedTables, package_only
from midus_hf.memories.registry import register_memory

RoutingKind = Literal["chunk", "token", "sequence"]
Balance = Literal["routed", "released"]

PAPER = {
    "memory_tokens": 262208,
    "chapters": 4097,
    "shared_chapters": 1,
    "k": 64,
    "routing": "sequence",
    "routed_scale": 2.5,
    "share": "all",
}
_CHAPTER_STD = 0.02
_FIRST_CHUNK = 8


@register_memory("moc", default_name="chapters")
@dataclass(kw_only=True)
class MocOptions(MemoryOptions):
    """Size of the bank, choice of chapters, and attention to memory tokens.

    The output projection starts at zero, so that the memory adds zero; all other tensors start as in the release, whose router also
    has logits for shared chapters. They enter its losses only if `balance` is `released`.
    """

    sites = ("behind-attention", "behind-layer")
    controls = {"one-row": {"memory_tokens": 1, "chapters": 1, "shared_chapters": 0, "k": 1}, **RANDOM_SLOTS}
    # The output projection starts at zero and must train, or the memory never adds anything; its role covers other projections too.
    value_roles = ("value", "projection")
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": PAPER}

    memory_tokens: int = option(4096, "N_m, the rows of the bank")
    chapters: int = option(64, "C, equal parts of the bank, shared ones included")
    shared_chapters: int = option(1, "S, the first chapters, which every token reads")
    k: int = option(4, "chapters the router selects, shared ones excluded")
    routing: RoutingKind = option(
        "chunk",
        "what is pooled to choose chapters. chunk: for each segment of chunk_size tokens, the tokens before it; token: every token "
        "chooses for itself; sequence: all tokens, later ones included, so not causal",
    )
    chunk_size: int = option(
        64,
        "tokens that read the same chapters where routing is chunk; no earlier token chooses for the first "
        f"{_FIRST_CHUNK} of a document",
    )
    routed_scale: float = option(
        2.5, "weight of all routed chapters together, where each shared one weighs 1; weights scale memory tokens"
    )
    share: str = option(
        "all", "which layers share a bank: all, none, or every:K for K neighbours", "all | none | every:K"
    )
    router_aux_loss_coef: float = option(0.01, "coefficient of the load-balance loss, which is added in training")
    router_z_loss_coef: float = option(0.001, "coefficient of the mean squared log-sum-exp of router logits")
    balance: Balance = option(
        "routed",
        "the logits of the router's losses. routed: those of routed chapters, so that the load-balance loss of an even choice is k; "
        "released: all, as the release has it, where probability on shared chapters hides that few routed ones are chosen",
    )
    addressing: Addressing = option(
        "content",
        "how routers choose chapters. content: by the pooled hidden states; random: by a vector that is drawn anew for every choice "
        "and pass, as long as the pooled one, so that it says nothing of the text: a control",
    )

    @property
    @package_only
    def reads_ahead(self) -> bool:
        return self.routing == "sequence"

    @property
    def routed_chapters(self) -> int:
        """Number of chapters that the router chooses among."""
        return self.chapters - self.shared_chapters

    @property
    def first_tokens(self) -> int:
        """Number of tokens in the first segment of a document, for routing by chunk."""
        return min(_FIRST_CHUNK, self.chunk_size)

    @property
    def chapter_tokens(self) -> int:
        """T, the number of memory tokens per chapter."""
        return self.memory_tokens // self.chapters

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        hidden = sizes.hidden_size
        projection = DeclaredTensor((hidden, hidden), "projection", Normal(_CHAPTER_STD))
        tensors = {
            "norm_weight": DeclaredTensor((hidden,), "norm", ONES),
            "router_weight": DeclaredTensor((self.chapters, hidden), "router", Normal(_CHAPTER_STD)),
            "router_bias": DeclaredTensor((self.chapters,), "router", ZEROS),
            **{f"{name}_projection.weight": projection for name in ("query", "key", "value")},
            "output_projection.weight": DeclaredTensor((hidden, hidden), "projection", ZEROS),
        }
        return {**tensors, **self.bank(sizes)} if self.share == "none" else tensors

    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple[SharedTables, ...]:
        if self.share == "none":
            return ()
        together = self.neighbours() or len(layers)
        groups = [layers[first : first + together] for first in range(0, len(layers), together)]
        return tuple(SharedTables(group, self.bank(sizes)) for group in groups)

    def bank(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return the tensor that holds the memory tokens, by its name."""
        return {"bank": DeclaredTensor((self.memory_tokens, sizes.hidden_size), "value", Normal(_CHAPTER_STD))}

    def neighbours(self) -> int | None:
        """Return K of `every:K`; None for other values of `share`."""
        every = re.fullmatch(r"every:([1-9]\d*)", self.share)
        return int(every[1]) if every else None

    def check(self) -> None:
        positive = dict.fromkeys(("memory_tokens", "chapters"), 1) | {"chunk_size": 2}
        not_negative = dict.fromkeys(("shared_chapters", "router_aux_loss_coef", "router_z_loss_coef"), 0)
        for name, least in (positive | not_negative).items():
            if getattr(self, name) < least:
                raise RequestError(f"{name} is {getattr(self, name)}; expected {least} or more.")
        if self.memory_tokens % self.chapters:
            raise RequestError(
                f"chapters is {self.chapters}, which does not divide memory_tokens = {self.memory_tokens}; expected chapters of "
                "equal size. Choose a divisor."
            )
        if self.routed_chapters < 1:
            raise RequestError(
                f"shared_chapters is {self.shared_chapters}; expected fewer than chapters = {self.chapters}, so that some are left "
                "for the router. Lower it or raise chapters."
            )
        if not 1 <= self.k <= self.routed_chapters:
            raise RequestError(
                f"k is {self.k}; expected 1 <= k <= {self.routed_chapters}, the chapters = {self.chapters} less "
                f"shared_chapters = {self.shared_chapters}. Lower k or raise chapters."
            )
        if not (math.isfinite(self.routed_scale) and self.routed_scale > 0):
            raise RequestError(f"routed_scale is {self.routed_scale!r}; expected a number above 0.")
        if self.share not in ("all", "none") and self.neighbours() is None:
            raise RequestError(f"share is {self.share!r}; expected all, none, or every:K such as every:2.")

    def check_fit(self, sizes: ModelSizes) -> None:
        if sizes.hidden_size % sizes.num_heads:
            raise RequestError(
                f"hidden_size is {sizes.hidden_size}; expected a multiple of the {sizes.num_heads} attention heads, as many as read "
                "the bank. This model needs another memory."
            )

    @package_only
    def values_read(self, sizes: ModelSizes) -> int:
        return (self.shared_chapters + self.k) * self.chapter_tokens * sizes.hidden_size

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Count the operations.

        For routing `sequence` the count is the paper's: memory tokens are weighted, normalised and projected per sequence. With
        `chunk` and `token`, choices overlap: each memory token that is read is normalised and projected once, at most the whole
        bank, and weights scale scores and weighted sums. Chunks are pooled by a running sum, divided once per chunk. The router's
        losses count as in the paper; turning its probabilities into weights does not count.
        """
        hidden, heads, rows = sizes.hidden_size, sizes.num_heads, batch * tokens
        chunks = math.ceil(tokens / self.chunk_size) + (self.first_tokens < min(tokens, self.chunk_size))
        segments = {"chunk": chunks, "token": tokens}.get(self.routing, 1)
        choices, selected = batch * segments, (self.shared_chapters + self.k) * self.chapter_tokens
        read = choices * selected if segments == 1 else min(choices * selected, self.memory_tokens)
        scores = heads * rows * selected
        pooling = 0 if self.routing == "token" else batch * hidden * (tokens - 1) + choices * hidden
        weighting = read * hidden if segments == 1 else 2 * scores
        return {
            "router": pooling
            + linear(choices, hidden, self.chapters)
            + choices * self.chapters * SOFTMAX
            + top_k(choices, self.chapters, self.k),
            "router losses": router_losses(choices, self.chapters, self.k),
            "memory tokens": weighting + rms_norm(read, hidden),
            "attention": 2 * linear(rows, hidden, hidden)
            + 2 * linear(read, hidden, hidden)
            + attention_products(batch, tokens, selected, hidden)
            + attention_weights(batch, heads, tokens, selected),
            "norms": rms_norm(rows, hidden),
            "residual adds": rows * hidden,
        }

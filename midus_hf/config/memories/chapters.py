"""Mixture of Chapters: a bank of latent memory tokens in chapters, some of which a router opens (section 5)."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from midus_hf.config.declared_tensors import ONES, ZEROS, DeclaredTensor, Normal
from midus_hf.config.memories.retrieval import RANDOM_SLOTS, Addressing
from midus_hf.config.memory_types import MemoryOptions, SharedTables, register_memory_type
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option

Routing = Literal["chunk", "prompt", "token", "sequence"]
Weighting = Literal["released", "logit_bias", "paper"]
Balance = Literal["routed", "per-choice", "released"]

# Options of the paper's table 5.
PAPER = {
    "memory_tokens": 262208,
    "chapters": 4097,
    "shared_chapters": 1,
    "k": 64,
    "routing": "sequence",
    "weighting": "released",
    "routed_scale": 2.5,
    "normalise": True,
    "share": "all",
}


_STD = 0.02
_FIRST_CHUNK = 8


@register_memory_type("chapters")
@dataclass(kw_only=True)
class ChaptersOptions(MemoryOptions):
    """Size of the bank, choice of chapters, and attention to memory tokens.

    The output projection starts at zero, so that the memory adds zero; all other tensors start as in the release. As in
    the release, the router also has logits for shared chapters. They enter its losses only if `balance` is `released`.
    """

    sites = ("behind-attention", "behind-layer")
    controls = {
        "one-row": {"memory_tokens": 1, "chapters": 1, "shared_chapters": 0, "k": 1},
        **RANDOM_SLOTS,
    }
    # The output projection starts at zero and must train, or nothing is ever added; its role covers the other projections too.
    value_roles = ("value", "transform", "projection")
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": PAPER,
        "released-adapter": {
            "memory_tokens": 2048,
            "chapters": 8,
            "shared_chapters": 0,
            "k": 2,
            "routing": "sequence",
            "routed_scale": 1.0,
            "normalise": False,  # the release normalises only if there are shared chapters
            "bank_rank": 256,
            "router_z_loss_coef": 0.0,
        },
    }

    memory_tokens: int = option(4096, "N_m, the rows of the bank")
    chapters: int = option(64, "C, equal parts of the bank, shared ones included")
    shared_chapters: int = option(1, "S, the first chapters, which every token reads")
    k: int = option(4, "chapters that the router chooses beside the shared ones")
    routing: Routing = option(
        "chunk",
        "what is pooled to choose chapters. chunk: for each stretch of chunk_size tokens, the tokens before it; prompt: the prompt; "
        "token: every token chooses for itself; sequence: all tokens, later ones included, so not causal",
    )
    chunk_size: int = option(64, "tokens that read the same chapters where routing is chunk")
    first_chunk: int | None = option(
        None,
        "tokens of the first stretch of a document, for which no earlier token chooses chapters; the tokens from there to chunk_size "
        "are a second stretch, so that short texts too choose chapters. null: 8, or chunk_size if that is less",
    )
    weighting: Weighting = option(
        "released",
        "what chapter weights do. released: they scale memory tokens; logit_bias: their logarithm is added to attention logits; "
        "paper: nothing, as in equations 2 to 4, so the router learns from its losses alone",
    )
    routed_scale: float = option(2.5, "weight of all routed chapters together, where each shared one weighs 1")
    normalise: bool = option(True, "whether memory tokens are divided by their root mean square before they are read")
    heads: int | None = option(None, "query heads; null: as many as the model's attention has")
    kv_heads: int | None = option(None, "key and value heads; null: as many as query heads")
    share: str = option(
        "all", "which layers have one bank: all, none, or every:K for K neighbours", "all | none | every:K"
    )
    bank_rank: int | None = option(
        None, "rank of the bank, which is then the product of two factors; null: the bank is one matrix"
    )
    bank_width: int | None = option(
        None, "width of memory tokens, and of the attention that reads them; null: the model's hidden size"
    )
    bank_bits: Literal[8, 4] | None = option(
        None,
        "bits per element of a bank that no longer trains, whose rows are integers with a scale each; null: the bank trains",
    )
    router_aux_loss_coef: float = option(0.01, "coefficient of the load-balance loss, which is added in training")
    router_z_loss_coef: float = option(0.001, "coefficient of the mean squared log-sum-exp of router logits")
    balance: Balance = option(
        "routed",
        "the logits and the scale of the router's losses. routed: over the logits of routed chapters alone, so that the load-balance "
        "loss is k where chapters are chosen evenly; per-choice: the same with the load-balance loss divided by k, so 1; released: "
        "over all logits, as the release has it, where probability on shared chapters hides that few routed ones are chosen",
    )
    addressing: Addressing = option(
        "content",
        "how routers choose chapters. content: by the pooled hidden states; random: by a vector that is drawn anew for every choice "
        "and pass, as long as the pooled one, so that it says nothing of the text: a control",
    )

    @property
    def reads_ahead(self) -> bool:
        return self.routing == "sequence"

    @property
    def reads_prompts(self) -> bool:
        return self.routing == "prompt"

    @property
    def routed_chapters(self) -> int:
        """Number of chapters that the router chooses among."""
        return self.chapters - self.shared_chapters

    @property
    def first_tokens(self) -> int:
        """Number of tokens in the first stretch of a document, for routing by chunk."""
        return min(_FIRST_CHUNK, self.chunk_size) if self.first_chunk is None else self.first_chunk

    @property
    def chapter_tokens(self) -> int:
        """T, the number of memory tokens per chapter."""
        return self.memory_tokens // self.chapters

    def width(self, sizes: ModelSizes) -> int:
        """Return the width of memory tokens, which is also the width of the attention that reads them."""
        return self.bank_width or sizes.hidden_size

    def row_width(self, sizes: ModelSizes) -> int:
        """Return the number of elements per row of the bank."""
        return self.bank_rank or self.width(sizes)

    def num_heads(self, sizes: ModelSizes) -> int:
        """Return the number of query heads."""
        return self.heads or sizes.num_heads

    def num_kv_heads(self, sizes: ModelSizes) -> int:
        """Return the number of key and value heads."""
        return self.kv_heads or self.num_heads(sizes)

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = self.width(sizes)
        read_width = width // self.num_heads(sizes) * self.num_kv_heads(sizes)

        def projection(outputs: int, inputs: int) -> DeclaredTensor:
            return DeclaredTensor((outputs, inputs), "projection", Normal(_STD))

        tensors = {
            "norm_weight": DeclaredTensor((sizes.hidden_size,), "norm", ONES),
            "router_weight": DeclaredTensor((self.chapters, sizes.hidden_size), "router", Normal(_STD)),
            "router_bias": DeclaredTensor((self.chapters,), "router", ZEROS),
            "query_projection.weight": projection(width, sizes.hidden_size),
            "key_projection.weight": projection(read_width, width),
            "value_projection.weight": projection(read_width, width),
            "output_projection.weight": DeclaredTensor((sizes.hidden_size, width), "projection", ZEROS),
        }
        return {**tensors, **self.bank(sizes)} if self.share == "none" else tensors

    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple[SharedTables, ...]:
        if self.share == "none":
            return ()
        together = self.neighbours() or len(layers)
        groups = [layers[first : first + together] for first in range(0, len(layers), together)]
        return tuple(SharedTables(group, self.bank(sizes)) for group in groups)

    def bank(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return the tensors that hold the memory tokens."""
        row_width = self.row_width(sizes)
        tensors = {"bank": DeclaredTensor((self.memory_tokens, row_width), "value", Normal(_STD))}
        if self.bank_bits is not None:
            scales = DeclaredTensor((self.memory_tokens,), "buffer", ONES)
            if self.bank_bits == 8:
                integers = DeclaredTensor((self.memory_tokens, row_width), "buffer", ZEROS, dtype="int8")
            else:
                integers = DeclaredTensor((self.memory_tokens, row_width // 2), "buffer", ZEROS, dtype="uint8")
            tensors = {"bank_integers": integers, "bank_scales": scales}
        if self.bank_rank is not None:
            shape, initial = (sizes.hidden_size, self.bank_rank), Normal(self.bank_rank**-0.5)
            tensors["bank_transform"] = DeclaredTensor(shape, "transform", initial)
        return tensors

    def neighbours(self) -> int | None:
        """Return K of `every:K`; None for other values of `share`."""
        every = re.fullmatch(r"every:([1-9]\d*)", self.share)
        return int(every[1]) if every else None

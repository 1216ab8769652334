"""A memory for every site, in one file outside the package: a low-rank map, at first to zero."""

from dataclasses import dataclass

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Normal
from midus_hf.config.options import option
from midus_hf.memories.hosting.services import Tables
from midus_hf.memories.hosting.sites import (
    AttentionAdapters,
    AttentionHeads,
    BehindAttention,
    BehindLayer,
    BesideFeedForward,
    InsideFeedForward,
    Skip,
)
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.options import InsertedOptions, MemoryOptions, SharedTables
from midus_hf.memories.registry import layer_of, register_memory


@register_memory("toy")
@dataclass(kw_only=True)
class ToyOptions(InsertedOptions):
    """A map `up(down(x))`; every `share` layers have the same `up`, which is then a table at the model."""

    sites = ("beside-ffn", "behind-attention", "behind-layer", "skip", "inserted")
    output_projection = True

    rank: int = option(2, "width of the map")
    share: int = option(1, "layers that have the same table")

    def check(self):
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; expected 1 or more.")

    def tensors(self, sizes):
        down = DeclaredTensor((self.rank, sizes.hidden_size), "key", Normal(1.0))
        return {"down": down} if self.share > 1 else {"down": down, **self._up(sizes)}

    def tables(self, sizes, layers):
        groups = [layers[first : first + self.share] for first in range(0, len(layers), self.share)]
        return tuple(SharedTables(group, self._up(sizes)) for group in groups) if self.share > 1 else ()

    def _up(self, sizes):
        return {"up": DeclaredTensor((self.rank, sizes.hidden_size), "value", ZEROS)}


@layer_of(ToyOptions)
class Toy(MemoryModule):
    """Adds `scale * up(down(x))`; `toy_scale` `[B]` is an argument of the model's forward pass, 1 if it is not given."""

    sites = (BesideFeedForward, BehindAttention, BehindLayer, Skip)
    services = (Tables,)
    forward_arguments = ("toy_scale",)

    def forward(self, hidden_states, residual=None, *, tables=None, toy_scale=None):
        up = self.up if tables is None else tables["up"]
        added = hidden_states @ self.down.T @ up
        if toy_scale is not None:
            added = added * toy_scale.to(added.dtype)[:, None, None]
        return added if residual is None else residual + added


class _AdapterOptions(MemoryOptions):
    """A low-rank map beside projections."""

    # Role, and what the projection reads and gives.
    widths: tuple[tuple[str, str, str], ...]

    def tensors(self, sizes):
        width = {
            "D": sizes.hidden_size,
            "F": sizes.intermediate_size,
            "Q": sizes.num_heads * sizes.head_dim,
            "K": sizes.num_key_value_heads * sizes.head_dim,
        }
        tensors = {}
        for role, read, arguments in self.widths:
            tensors[f"{role}_down"] = DeclaredTensor((2, width[read]), "key", Normal(1.0))
            tensors[f"{role}_up"] = DeclaredTensor((2, width[arguments]), "value", ZEROS)
        return tensors


@register_memory("toy-attention")
@dataclass(kw_only=True)
class ToyAttentionOptions(_AdapterOptions):
    """Adapters on the projections of attention."""

    sites = ("inside-attention",)
    widths = (("query", "D", "Q"), ("key", "D", "K"), ("value", "D", "K"), ("output_projection", "Q", "D"))


@register_memory("toy-ffn")
@dataclass(kw_only=True)
class ToyFfnOptions(_AdapterOptions):
    """Adapters on the projections of a feed-forward network."""

    sites = ("inside-ffn",)
    widths = (("gate", "D", "F"), ("up", "D", "F"), ("down", "F", "D"))


class _Adapter(MemoryModule):
    forward_arguments = ("toy_scale",)

    def forward(self, read, arguments, *, projection, toy_scale=None):
        added = read @ getattr(self, f"{projection}_down").T @ getattr(self, f"{projection}_up")
        return arguments + (added if toy_scale is None else added * toy_scale.to(added.dtype)[:, None, None])


@layer_of(ToyAttentionOptions)
class ToyAttention(_Adapter):
    """Adapters on the projections of attention."""

    sites = (AttentionAdapters,)
    projections = ("query", "key", "value", "output_projection")


@layer_of(ToyFfnOptions)
class ToyFfn(_Adapter):
    """Adapters on the projections of a feed-forward network."""

    sites = (InsideFeedForward,)
    projections = ("gate", "up", "down")


@register_memory("toy-heads")
@dataclass(kw_only=True)
class ToyHeadsOptions(MemoryOptions):
    """A map of each head's query, added to what the head gives, at first zero."""

    sites = ("inside-attention",)

    def tensors(self, sizes):
        return {"table": DeclaredTensor((sizes.num_heads, sizes.head_dim, sizes.head_dim), "value", ZEROS)}


@layer_of(ToyHeadsOptions)
class ToyHeads(MemoryModule):
    """Adds a map of each head's query to what the head gives."""

    forward_arguments = ("toy_scale",)
    sites = (AttentionHeads,)

    def forward(self, query, key, value, output, *, toy_scale=None):
        added = (query @ self.table).transpose(1, 2)
        return output + (added if toy_scale is None else added * toy_scale.to(added.dtype)[:, None, None, None])

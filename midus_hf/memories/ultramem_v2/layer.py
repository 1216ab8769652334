"""The memory layer of UltraMemV2, with the pre-values of PEER."""

from collections.abc import Mapping

import torch
from torch import nn

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.decode_cache import MAX_CACHED, DecodeCache
from midus_hf.memories.hosting.service import ScaledInitialisation, Tables
from midus_hf.memories.hosting.sites import BesideFeedForward, Skip
from midus_hf.memories.module import MemoryModule, random_directions
from midus_hf.memories.options import package_only
from midus_hf.memories.registry import register_layer
from midus_hf.memories.ultramem_v2.options import UltraMemV2Options
from midus_hf.ops.dispatch.calling import without_autocast
from midus_hf.ops.dispatch.private_torch import is_in_backward
from midus_hf.ops.gather.op import gathered_products, weighted_gather
from midus_hf.ops.ultramem_v2 import leading_vectors, tucker_topk

_QUERY_EPS = 1e-6


@register_layer(UltraMemV2Options)
class UltraMemV2Memory(MemoryModule):
    """Slots of a large table, retrieved by Tucker-decomposed scores, and summed (section 3, equation 15)."""

    sites = (BesideFeedForward, Skip)
    services = (Tables, ScaledInitialisation)

    options: UltraMemV2Options
    query_projection: nn.Linear
    row_keys: torch.Tensor
    column_keys: torch.Tensor
    query_norm_weight: torch.Tensor
    key_norm_weight: torch.Tensor
    core: torch.Tensor
    row_vector: torch.Tensor
    column_vector: torch.Tensor
    pre_projection: nn.Linear
    value_projection: nn.Linear
    value_table: torch.Tensor
    pre_value_table: torch.Tensor

    def __init__(self, options: UltraMemV2Options, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.num_heads, self.num_slots = options.heads, options.num_rows
        self.key_width = options.width("key_width", sizes)
        self.has_pre_values = options.width("pre_value_width", sizes) > 0
        self.sparse_gradient = False

    def forward(
        self, hidden_states: torch.Tensor, *, tables: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Return what is added for each token, `[B, T, D]`, from tables that layers share, or the layer's own."""
        if hidden_states.numel() == 0:
            return hidden_states * 0
        tables = tables or {}
        weights, slots = self._select(hidden_states)
        weights, slots = weights.flatten(-2), slots.flatten(-2)  # [B, T, H * k]
        value_table = self._stored("value_table", tables)
        rows = self._rows(slots, len(value_table))
        if self.has_pre_values:
            pre_values, read = self._stored("pre_value_table", tables), self.pre_projection(hidden_states)
            products = gathered_products(read, pre_values, rows, sparse_gradient=self.sparse_gradient)
            weights = weights * products.to(weights.dtype)
        values = weighted_gather(value_table, rows, weights, sparse_gradient=self.sparse_gradient)  # [B, T, D_v]
        return self.value_projection(values.to(hidden_states.dtype))

    def retrieve(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, float32, and rows within those that this layer reads, int64, `[B, T, H, k]` both."""
        return self._select(hidden_states, keep_vectors=False)

    def _select(self, hidden_states: torch.Tensor, keep_vectors: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores, float32 at least, and the slots, both `[B, T, H, k]`."""
        options = self.options
        query = self.query_projection(hidden_states)
        query = query.unflatten(-1, (2, options.heads, options.rank, self.key_width))  # [B, T, 2, H, r, D_k]
        if options.addressing == "random":
            query = random_directions(query)
        wide = torch.promote_types(query.dtype, torch.float32)
        with without_autocast(hidden_states.device.type):
            query = _normalised_query(query.to(wide), self.query_norm_weight.to(wide))
            keys, row_vector, column_vector = self._keys_and_vectors(query, keep_vectors and self.training)
            row_scores, column_scores = _scores(query, keys)
            # In checkpoints, cores and their vectors are [H, 1, 1, ...].
            core, row_vector, column_vector = (part[:, 0, 0] for part in (self.core, row_vector, column_vector))
            return tucker_topk(row_scores, column_scores, core, row_vector, column_vector, options.k, options.side)

    def _keys_and_vectors(self, query: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `keys_and_vectors`, in the dtype of `query`; `keep` stores vectors, so signs do not flip."""
        stored = (self.row_keys, self.column_keys, self.key_norm_weight, self.core, self.row_vector)
        derived: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if self.decode_cache is not None and not keep:
            derived = self.decode_cache.read(self, query)
        derived = derived or keys_and_vectors(*stored, wide=query.dtype)
        keys, row_vector, column_vector = derived
        if keep and not is_in_backward():
            with torch.no_grad():
                self.row_vector.copy_(row_vector)
                self.column_vector.copy_(column_vector)
        return keys, row_vector, column_vector

    def _stored(self, name: str, tables: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return tables[name] if name in tables else getattr(self, name)

    def _rows(self, slots: torch.Tensor, table_rows: int) -> torch.Tensor:
        first = self.options.first_row(self.index, table_rows)
        return (slots + first) % table_rows if first else slots

    @package_only
    def make_decode_cache(self) -> DecodeCache | None:
        """Return a cache for keys and vectors; None for many keys."""
        if 2 * self.row_keys.numel() > MAX_CACHED:
            return None
        names = ("row_keys", "column_keys", "key_norm_weight", "core", "row_vector")
        return DecodeCache(names, keys_and_vectors, as_stored=True)


def keys_and_vectors(
    row_keys: torch.Tensor,
    column_keys: torch.Tensor,
    key_norm_weight: torch.Tensor,
    core: torch.Tensor,
    row_vector: torch.Tensor,
    wide: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return normalised keys, `[2 * H * r, n, D_k]`, and both singular vectors of cores, `[H, 1, 1, r]`."""
    wide = wide or torch.promote_types(row_keys.dtype, torch.float32)
    with without_autocast(row_keys.device.type):  # for kept tensors too: tokens must read the same rows, kept or not
        gain = key_norm_weight.to(wide)
        # [H, 1, n, r, D_k] each
        normalised = (_normalised_query(keys.to(wide), gain) for keys in (row_keys, column_keys))
        keys = torch.stack([side_keys.permute(0, 3, 1, 2, 4) for side_keys in normalised]).flatten(0, 2).flatten(1, 2)
        with torch.no_grad():
            return keys, *leading_vectors(core.to(wide), row_vector)


def _scores(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores of row and column keys, `[B, T, H, n, r]` each, for queries `[B, T, 2, H, r, D_k]`."""
    batch, tokens, _, heads, rank, _ = query.shape
    by_rank = query.flatten(2, 4).flatten(0, 1).transpose(0, 1)  # [2 * H * r, S, D_k]
    scores = (by_rank @ keys.transpose(1, 2)).view(2, heads, rank, batch, tokens, -1)
    rows, columns = scores.permute(0, 3, 4, 1, 5, 2)
    return rows, columns


def _normalised_query(states: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + _QUERY_EPS) * gain

"""Flat retrieval: the k best of N keys, all of which are scored."""

import torch

from midus_hf.ops.dispatch.choices import resolve
from midus_hf.ops.product_key import reference


def flat_key_topk(
    query: torch.Tensor, keys: torch.Tensor, k: int, *, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find, for every head, the `k` keys that score highest against its query, as `reference.flat_key_topk` does.

    Args:
        query: `[..., H, d]`, floating point.
        keys: `[H, N, d]`, cast to the dtype of `query`.
        k: Slots retrieved per head, `1 <= k <= N`.
        backend: Choice of `OpChoices`; every backend scores by the same matrix products. Default: `"auto"`.

    Returns:
        Scores `[..., H, k]`, descending, float32 (float64 for a float64 query), and slots `[..., H, k]`, int64.

    Raises:
        ValueError: If the shapes disagree, or `k` lies outside `1..N`.
    """
    resolve(backend, query)
    return reference.flat_key_topk(query, keys, k)

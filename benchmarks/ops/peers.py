"""Other packages that compute the same, compared if they are installed; none is a dependency.

- `product_key_memory` (Phil Wang): the layer from queries on, without its projection and its norm.
- `PEER_pytorch` (Phil Wang): the product-key selection, without its projection.

Two more were considered: `ultra_mem` scores by a Tucker decomposition, which no op here measures, and
flash-linear-attention has no retrieval from a table.
"""

import torch

from benchmarks.ops import operations  # noqa: F401 - enters the ops first
from benchmarks.ops.registry import Call, Inputs, Unavailable, provider
from benchmarks.ops.shapes import Case


@provider("product_key_memory", "product_key_memory")
def _lucidrains_memory(case: Case, inputs: Inputs) -> Call:
    try:
        from product_key_memory import PKM
    except ImportError as error:
        raise Unavailable(str(error)) from None
    query, row_keys, column_keys, bank = inputs.values()
    shape = case.shape
    with torch.device("meta"):
        layer = PKM(shape.width, heads=shape.heads, num_keys=shape.n, topk=shape.k, dim_head=shape.head_dim // 2)
    del layer.keys, layer.values.weight
    layer.to_queries, layer.norm = torch.nn.Identity(), torch.nn.Identity()

    def run() -> torch.Tensor:
        layer.keys = torch.stack((row_keys, column_keys), dim=2)  # [H, n, 2, d / 2]
        layer.values.weight = bank
        halves = query.unflatten(-1, (2, -1)).transpose(1, 2)  # [S, 2, H, d / 2]
        return layer(halves.flatten(1).unsqueeze(0)).squeeze(0)

    return run


@provider("product_key_topk", "PEER_pytorch")
def _lucidrains_selection(case: Case, inputs: Inputs) -> Call:
    try:
        from PEER_pytorch.PK import PK
    except ImportError as error:
        raise Unavailable(str(error)) from None
    if case.dtype not in ("float32", "float64"):
        raise Unavailable(f"it ranks scores that were rounded to {case.dtype}, which changes their order")
    query, row_keys, column_keys = inputs.values()
    shape = case.shape
    with torch.device("meta"):
        layer = PK(shape.width, heads=shape.heads, dim_key=shape.head_dim // 2, num_keys=shape.n, final_topk=shape.k)
    del layer.keys
    layer.to_queries = torch.nn.Identity()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        # The package numbers slots by its first key in steps of 1 and by its second in steps of n: columns come first.
        layer.keys = torch.stack((column_keys, row_keys)).transpose(1, 2)  # [2, n, H, d / 2]
        halves = query.unflatten(-1, (2, -1)).unbind(-2)  # 2 x [S, H, d / 2]
        scores, slots = layer(torch.stack(halves[::-1]).unsqueeze(1))  # [1, S, H, k]
        return scores.squeeze(0), slots.squeeze(0)

    return run

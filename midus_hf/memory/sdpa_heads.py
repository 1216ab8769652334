"""Attention to the depth that is joined within torch's own attention to the sequence, by the kernels of this package."""

from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from midus_hf.memory.sequence_heads import JOINED
from midus_hf.ops.depth.joining import Depth, joined_attention
from midus_hf.ops.depth.sequence_kernels import Call


class InPlaceOfSdpa(TorchFunctionMode):
    """Mode in which torch's `scaled_dot_product_attention` is joined with attention to the depth.

    So the code of transformers before and after that call runs unchanged, in every version.
    """

    def __init__(self, depth: Depth):
        super().__init__()
        self._depth = depth

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return joined_attention(Call(*args, **(kwargs or {})), self._depth)
        return function(*args, **(kwargs or {}))


JOINED["sdpa"] = InPlaceOfSdpa

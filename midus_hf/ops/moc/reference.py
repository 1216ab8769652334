"""The contract of cross-attention from tokens to the chapters that are chosen for them."""

import math

import torch
from torch import Tensor

from midus_hf.ops.dispatch.calling import without_autocast


def chapter_attention(query: Tensor, keys: Tensor, values: Tensor, chapters: Tensor, scales: Tensor) -> Tensor:
    """Attend to the memory tokens of chosen chapters in one softmax (Mixture of Chapters, equation 4).

    Shapes: query and result `[S, Q, H, d]`, keys and values `[C, M, H, d]`, chapters and scales `[S, n]`.
    """
    if query.numel() == 0:
        return query * 1
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device.type):
        keys, values = (
            tensor.to(query.dtype).to(score_dtype)[chapters] for tensor in (keys, values)
        )  # [S, n, M, H, d]; widened before indexing, so that gradients of segments with the same chapter are summed in float32
        scale = scales.to(score_dtype)[:, :, None, None, None]
        keys, values = keys * scale, values * scale
        scores = torch.einsum("sqhd,snmhd->shqnm", query.to(score_dtype), keys) / math.sqrt(query.shape[-1])
        weights = scores.flatten(-2).softmax(dim=-1).unflatten(-1, scores.shape[-2:])
        output = torch.einsum("shqnm,snmhd->sqhd", weights, values)
    return output.to(query.dtype)

"""Weights in FP8 and MXFP4: copied as they are stored, and dequantised when they are read.

In FP8, a module `m` has `m.weight` and `m.weight_scale_inv`, one scale per block of the weight, or one for the weight. The
config gives the block size; blocks at the end of a row or a column may be partial. In MXFP4, experts have `w_blocks`, two
numbers of 4 bits per byte, and `w_scales`, one exponent per 32 numbers, for a weight `w`. The product of numbers and scales in the
dtype of the config is what transformers computes with on a machine
without kernels for these formats, and what new tensors are made from.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from midus_hf.config.errors import RequestError
from upscalers.architecture.layer_tensors import Config
from upscalers.architecture.supported_bases import fp8_block, quantised_form
from upscalers.checkpoint.computed_tensor import FP8_NAMES, ComputedTensor, read_tensor
from upscalers.checkpoint.safetensors_format import SAFETENSORS_NAMES, TORCH_NAMES, StoredTensor

if TYPE_CHECKING:
    import torch

SUFFIX = "_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
# Numbers of 4 bits with a sign, two bits of exponent and one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_EXPONENT_OF_ONE = 127


@dataclass(frozen=True)
class ScaledTensor(ComputedTensor):
    """A weight in FP8, read as its product with `scales`, one per `block` of rows and columns, or a single one without blocks."""

    scales: StoredTensor | None = None
    block: tuple[int, int] | None = None

    @property
    def as_stored(self) -> StoredTensor:
        return self.in_file

    def read(self) -> "torch.Tensor":
        """Read the weight, multiply every block by its scale in float32, and round to the dtype of this tensor."""
        assert self.scales is not None
        product, scales = read_tensor(self.in_file).float(), read_tensor(self.scales).float()
        if self.block is None:
            product *= scales.view(1, 1)
        else:
            rows, columns = self.block
            scales = scales.repeat_interleave(columns, 1)[:, : self.shape[1]]
            for values, scale in zip(product.split(rows), scales, strict=True):
                values *= scale
        return product.to(_torch_dtype(self))


@dataclass(frozen=True)
class PackedTensor(ComputedTensor):
    """Matrices of experts `[experts, inputs, outputs]` in MXFP4, whose parts are stored under separate names."""

    scales: StoredTensor | None = None

    def read(self) -> "torch.Tensor":
        """Read the numbers and multiply every 32 of them by their power of two, which is exact in every float dtype."""
        import torch

        assert self.scales is not None
        dtype = _torch_dtype(self)
        numbers, table = read_tensor(self.in_file), torch.tensor(_FP4, dtype=dtype)
        exponents = read_tensor(self.scales).int() - _EXPONENT_OF_ONE
        pairs = torch.stack([table[(numbers & 15).long()], table[(numbers >> 4).long()]], dim=-1)
        product = torch.ldexp(pairs.flatten(-2), exponents[..., None]).flatten(-2)  # [experts, outputs, inputs]
        return product.to(dtype).transpose(1, 2).contiguous()


def with_products(
    stored: Mapping[str, StoredTensor], config: Config
) -> tuple[dict[str, StoredTensor], frozenset[str], frozenset[str]]:
    """Return the tensors of a checkpoint with quantised weights as they are read, and which of them are stored differently."""
    if quantised_form(config) == "mxfp4":
        packed = _packed(stored, config)
        return (
            {**stored, **packed},
            frozenset(name + part for name in packed for part in (_BLOCKS, _EXPONENTS)),
            frozenset(packed),
        )
    tensors, parts = dict(stored), set()
    dtype, block = _dtype(config), fp8_block(config)
    for name, weight in stored.items():
        if weight.dtype not in FP8_NAMES:
            continue
        scales = stored.get(name + SUFFIX)
        held = None if scales is None else scales.shape
        if block is None:
            wanted = "one scale"
            fits = held is not None and math.prod(held) == 1
        else:
            grid = tuple(-(-size // length) for size, length in zip(weight.shape, block, strict=False))
            wanted = f"scales {list(grid)}, one for each of its blocks of {block[0]} x {block[1]} (weight_block_size)"
            fits = held == grid
        if scales is None or scales.dtype not in TORCH_NAMES or len(weight.shape) != 2 or not fits:
            raise RequestError(
                f"{name} is {list(weight.shape)} in {weight.dtype} with {'no scales' if held is None else f'scales {list(held)}'}; "
                f"expected {name}{SUFFIX} with {wanted}. Start from the unquantised checkpoint."
            )
        tensors[name] = ScaledTensor(dtype, weight.shape, None, 0, weight, scales, block)
        parts.add(name + SUFFIX)
    return tensors, frozenset(parts), frozenset()


def _packed(stored: Mapping[str, StoredTensor], config: Config) -> dict[str, StoredTensor]:
    packed: dict[str, StoredTensor] = {}
    for part, numbers in stored.items():
        if not part.endswith(_BLOCKS):
            continue
        name = part.removesuffix(_BLOCKS)
        scales = stored.get(name + _EXPONENTS)
        shape = () if scales is None else scales.shape
        if numbers.dtype != "U8" or len(shape) != 3 or scales is None or numbers.shape != (*shape, 16):
            raise RequestError(
                f"{part} is {list(numbers.shape)} with scales {list(shape)}; expected {name}{_EXPONENTS} with an exponent for each "
                "16 bytes. Start from the unquantised checkpoint."
            )
        experts, outputs, blocks = shape
        packed[name] = PackedTensor(_dtype(config), (experts, 32 * blocks, outputs), None, 0, numbers, scales)
    return packed


def _torch_dtype(tensor: StoredTensor) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
    return dtype


def _dtype(config: Config) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return SAFETENSORS_NAMES.get(name, "BF16")

"""What single layers of a checkpoint hold."""

import torch

from tests.upscalers.checkpoints import read_tensors, write_tensors

Tensors = dict[str, torch.Tensor]


def layer(tensors: Tensors, index: int) -> Tensors:
    """The tensors of a layer by their name within it."""
    prefix = f"model.layers.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def coarsen(folder) -> None:
    """Round the weights of a base to multiples of 2**-9: means of two are exact in float32, so that a formula in float64 has to
    give the same bits.
    """
    tensors = {name: (tensor.double() * 512).round() / 512 for name, tensor in read_tensors(folder).items()}
    dtypes = {name: tensor.dtype for name, tensor in read_tensors(folder).items()}
    write_tensors(folder, {name: tensor.to(dtypes[name]) for name, tensor in tensors.items()})
    assert all(tensor.any() for tensor in tensors.values())

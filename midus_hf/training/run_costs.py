"""What a run costs beside time: parameters that train, and memory."""

import resource
import sys

import torch
from torch import nn

from midus_hf.training.cut_parameters import whole_numel


def trained_parameters(model: nn.Module) -> int:
    """Parameters that train; a sharded one counts whole.

    Args:
        model: As a run has it.
    """
    return sum(whole_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)


def peak_memory_bytes() -> int:
    """The most memory of this process so far: of its GPU what PyTorch allocated there, without one what was resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

"""How the compiled bodies are run, and what they ask of tensors."""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from midus_hf.ops.backend import NATIVE_DTYPES
from midus_hf.ops.native_library import native_library

_FEWEST_SHARED = 512
"""Tokens times heads for which threads are started: it takes as long as computing some hundreds."""

_OUTSIDE = 2
"""What C returns of slots that a table does not have."""


def run(name: str, call: bytes) -> None:
    """Call a function of the library.

    Raises:
        MemoryError: If there is none for its scratch.
        IndexError: If slots reach outside of their table.
    """
    library: Any = native_library()
    assert library is not None
    status = getattr(library, name)(call)
    if status == _OUTSIDE:
        raise IndexError("slots reach outside of the bank; expected 0 <= slot < its rows. Look for what made them.")
    if status:
        raise MemoryError(f"{name} found no memory for its scratch; free some, or choose backend 'torch'.")


def refuse_places(tensors: Mapping[str, torch.Tensor | None]) -> NoReturn:
    """Refuse tensors of which some have no memory that C can read: it would end the process."""
    name, place = next(
        (name, tensor.device) for name, tensor in tensors.items() if tensor is not None and not tensor.is_cpu
    )
    raise ValueError(
        f"{name} is on {place}, and others are on cpu; expected one device. Move or load the whole model there."
    )


def address(tensor: torch.Tensor | None) -> int:
    """Where C finds its numbers; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension in one piece; the others may lie as they do."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def gradient_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The same in a dtype that C reads."""
    return with_rows(gradient if gradient.dtype in NATIVE_DTYPES else gradient.float())


def threads_for(rows: int) -> int:
    """How many work on so many tokens times heads."""
    return 1 if rows < _FEWEST_SHARED else torch.get_num_threads()

"""The choice between the bodies of an op."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import torch

from midus_hf.ops.triton_import import HAS_TRITON

BACKENDS = ("auto", "reference", "torch", "triton")
SELECTIONS = ("auto", "two-stage", "cartesian")
BACKWARDS = ("auto", "sorted", "atomic", "dedup")
JOININGS = ("auto", "merged", "fused", "measured")


@dataclasses.dataclass(frozen=True)
class OpChoices:
    """What ops do where their caller leaves it to `"auto"`.

    Args:
        backend: `"reference"`, the contract, written to be read; `"torch"`, vectorised; `"triton"`, kernels for CUDA
            tensors. Default: `"auto"`, kernels on GPUs from compute capability 8.0 on, else `"torch"`.
        selection: How product keys are selected: in `"two-stage"`s, or by one selection over the `"cartesian"` grid of
            all `n * n` slots (MIDUS, appendix C.1). Default: `"auto"`, two stages.
        backward: How the gradient of a table is summed: `"sorted"`, in a fixed order; `"atomic"`, in any order, which may
            differ from run to run on CUDA; or `"dedup"`, by MIDUS's Algorithm 1 (appendix C.3), which waits for the
            device. Default: `"auto"`, sorted.
        joining: How heads that read sequence and depth do: `"merged"`, by the model's own attention and a kernel for the depth;
            `"fused"`, by one kernel for both where there is one for the call, which reads sequences of the same length as queries
            without mask, cap or dropout; or `"measured"`, by whichever of these took less time when a shape was first met, which
            another process may find otherwise. A graph of `torch.compile` cannot measure and is merged. Default: `"auto"`, merged.
    """

    backend: str = "auto"
    selection: str = "auto"
    backward: str = "auto"
    joining: str = "auto"

    def __post_init__(self) -> None:
        every = {"backend": BACKENDS, "selection": SELECTIONS, "backward": BACKWARDS, "joining": JOININGS}
        for name, choices in every.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


_standing = OpChoices()


@contextlib.contextmanager
def op_choices(**changes: str) -> Iterator[None]:
    """Choose for all ops called within, where their caller leaves it to `"auto"`; for the whole process, not one thread.

    What a gradient does is chosen when the forward pass runs.

    Args:
        changes: Fields of `OpChoices`.

    Raises:
        ValueError: If there is no such choice.
    """
    global _standing
    before = _standing
    _standing = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        _standing = before


def resolve(
    backend: str, selection: str, backward: str, tensor: torch.Tensor, refusal: str | None = None
) -> OpChoices:
    """Name the bodies that an op runs.

    Args:
        backend: As in `OpChoices`.
        selection: As in `OpChoices`.
        backward: As in `OpChoices`.
        tensor: One of the op's, for its device and dtype. Kernels do not compute in float64.
        refusal: What kernels cannot take of this call's sizes, and what they expect. Default: they take it.

    Returns:
        Choices without `"auto"`.

    Raises:
        ValueError: If there is no such choice, or kernels are asked for where they cannot run.
    """
    asked = OpChoices(backend, selection, backward)
    body = _standing.backend if asked.backend == "auto" else asked.backend
    if body == "auto":
        takes = HAS_TRITON and tensor.is_cuda and refusal is None
        body = "triton" if takes and _multiplies(tensor) else "torch"
    if body == "triton":
        if not HAS_TRITON:
            raise ValueError("backend is 'triton', but triton is not installed; install it, or choose 'torch'.")
        if not (tensor.is_cuda or interprets_kernels()):
            raise ValueError(
                f"backend is 'triton', but the tensors are on {tensor.device.type}; expected cuda, or choose 'torch'."
            )
        if tensor.dtype == torch.float64:
            raise ValueError(
                "backend is 'triton', but the tensors are float64; expected float32 or less, or choose 'torch'."
            )
        if refusal is not None:
            raise ValueError(f"backend is 'triton', but {refusal}, or choose 'torch'.")
    way = _standing.selection if asked.selection == "auto" else asked.selection
    order = _standing.backward if asked.backward == "auto" else asked.backward
    return OpChoices(body, "two-stage" if way == "auto" else way, "sorted" if order == "auto" else order)


def chosen_joining() -> str:
    """How heads that read sequence and depth do: `"merged"`, `"fused"` or `"measured"`."""
    return "merged" if _standing.joining == "auto" else _standing.joining


def _multiplies(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU has what kernels multiply with: bfloat16 and TF32, from compute capability 8.0 on."""
    capable = torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return capable and tensor.dtype != torch.float64


def interprets_kernels() -> bool:
    """Whether triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"

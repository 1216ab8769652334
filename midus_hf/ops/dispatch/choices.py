"""The choice between the bodies of an op."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from midus_hf.ops.dispatch.native.library import native_library, why_missing
from midus_hf.ops.dispatch.triton import HAS_TRITON, interprets_kernels

BACKENDS = ("auto", "reference", "torch", "native", "triton")

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""What compiled C computes with."""

NO_NATIVE_BODY = "the op has no body in C"


@dataclasses.dataclass(frozen=True)
class OpChoices:
    """What ops do where their caller leaves it to `"auto"`.

    Args:
        backend: `"reference"`, the contract, written to be read; `"torch"`, vectorised; `"native"`, compiled C for float32 and
            bfloat16 on a CPU where an op has it, else `"torch"`; `"triton"`, kernels for CUDA tensors. Default: `"auto"`, kernels on
            GPUs from compute capability 8.0 on, C on a CPU where a compiler built it, else `"torch"`.
        exact: Whether kernels that select product keys of half precision compare all 32 bits of their scores. Otherwise the last
            ceil(log2(n)) say which sub-key a score is of, for n up to 128 and k up to 8: sub-keys and slots whose scores are closer
            than that, for n = 64 within 2^-17 of their size, may be taken for each other. Default: false.
    """

    backend: str = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; expected one of {', '.join(map(repr, BACKENDS))}.")
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact is {self.exact!r}; expected True or False.")


_standing = OpChoices()


@contextlib.contextmanager
def op_choices(**changes: Any) -> Iterator[None]:
    """Choose for all ops called within, where their caller leaves it to `"auto"`; for the whole process, not one thread.

    What a gradient does is chosen when the forward pass runs. Gradients of tables are summed in a fixed order by every backend.

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
    backend: str, tensor: torch.Tensor, refusal: str | None = None, native_refusal: str | None = NO_NATIVE_BODY
) -> str:
    """Return the name of the body that an op runs: `"reference"`, `"torch"`, `"native"` or `"triton"`.

    While a graph is traced nothing is built, and `"native"` is what the op runs if it can then.

    Args:
        backend: As in `OpChoices`.
        tensor: One of the op's, for its device and dtype. Kernels do not compute in float64.
        refusal: What kernels cannot take of this call's sizes, and what they expect. Default: they take it.
        native_refusal: What compiled C cannot take of them, likewise; None where it takes them. Default: the op has none, and
            `"torch"` stands in for it.

    Raises:
        ValueError: If there is no such choice, or kernels or C are asked for where they cannot run.
    """
    if backend not in BACKENDS:
        OpChoices(backend)  # raises
    body = _standing.backend if backend == "auto" else backend
    if body == "auto":
        return _fastest(tensor, refusal, native_refusal)
    if body == "triton":
        _check_kernels(tensor, refusal)
    elif body == "native":
        _check_native(tensor, native_refusal)
        return "torch" if native_refusal == NO_NATIVE_BODY else "native"
    return body


def _fastest(tensor: torch.Tensor, refusal: str | None, native_refusal: str | None) -> str:
    if tensor.is_cuda:
        return "triton" if HAS_TRITON and refusal is None and _multiplies(tensor) else "torch"
    takes = tensor.device.type == "cpu" and tensor.dtype in NATIVE_DTYPES and native_refusal is None
    return "native" if takes and (torch.compiler.is_compiling() or native_library() is not None) else "torch"


def _check_kernels(tensor: torch.Tensor, refusal: str | None) -> None:
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


def _check_native(tensor: torch.Tensor, refusal: str | None) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"backend is 'native', but the tensors are on {tensor.device.type}; expected cpu, or choose 'torch'."
        )
    if tensor.dtype not in NATIVE_DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"backend is 'native', but the tensors are {dtype}; expected float32 or bfloat16, or choose 'torch'."
        )
    if refusal is not None and refusal != NO_NATIVE_BODY:
        raise ValueError(f"backend is 'native', but {refusal}, or choose 'torch'.")
    if not torch.compiler.is_compiling() and native_library() is None:
        raise ValueError(f"backend is 'native', but {why_missing()}, or choose 'torch'.")


def chosen_exact() -> bool:
    """Whether kernels that select product keys of half precision compare all 32 bits of their scores."""
    return _standing.exact


def _multiplies(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU has what kernels multiply with: bfloat16 and TF32, from compute capability 8.0 on."""
    capable = torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return capable and tensor.dtype != torch.float64

"""The choice between the implementations (bodies) of an op."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.config.wording import one_of
from midus_hf.ops.dispatch.native.library import NATIVE_DTYPES, native_library, why_missing
from midus_hf.ops.dispatch.triton import HAS_TRITON, interprets_kernels

BACKENDS = ("auto", "reference", "torch", "native", "triton")

NO_NATIVE_BODY = "the op has no body in C"


@dataclasses.dataclass(frozen=True)
class OpChoices:
    """Choices that an op follows if its caller leaves them to `"auto"`.

    Args:
        backend: The body that an op runs. `"reference"` is the contract, written to be read; `"torch"` is vectorised;
            `"native"` is compiled C for float32 and bfloat16 on a CPU, and `"torch"` for ops without a body in C;
            `"triton"` runs kernels for CUDA tensors. Default: `"auto"`: kernels on GPUs from compute capability 8.0 on,
            C on a CPU for which a compiler built it, `"torch"` elsewhere.
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise RequestError(f"backend is {self.backend!r}; expected one of {', '.join(map(repr, BACKENDS))}.")


_standing = OpChoices()

# Names of bodies by op, backend, device, dtype and shapes, for calls that were checked before. Empty after each change
# of choices.
RESOLVED: dict[tuple[Any, ...], str] = {}


@contextlib.contextmanager
def op_choices(**changes: Any) -> Iterator[None]:
    """Change the choices of all ops whose callers leave them to `"auto"`, within the `with` block.

    The change holds for the whole process, not for one thread. The gradient of a call follows the choices of its
    forward pass. Every backend sums gradients of tables in a fixed order.

    Args:
        changes: Fields of `OpChoices` and their new values.

    Raises:
        RequestError: If `OpChoices` has no field of a name, or a field cannot have its new value.
    """
    global _standing
    before = _standing
    fields = [field.name for field in dataclasses.fields(OpChoices)]
    for name in changes:
        if name not in fields:
            raise RequestError(f"op_choices has no option {name!r}. {one_of(fields)}")
    _standing = dataclasses.replace(before, **changes)
    RESOLVED.clear()
    try:
        yield
    finally:
        _standing = before
        RESOLVED.clear()


def resolve(
    backend: str, tensor: torch.Tensor, refusal: str | None = None, native_refusal: str | None = NO_NATIVE_BODY
) -> str:
    """Return the name of the body that an op runs: `"reference"`, `"torch"`, `"native"` or `"triton"`.

    While a graph is traced, the C library is not built: `"native"` then means an op that uses the library if there
    is one when the graph runs.

    Args:
        backend: The choice of the op's caller, one of `BACKENDS`.
        tensor: An argument of the op, whose device and dtype decide. Kernels do not compute in float64.
        refusal: Why kernels do not support the sizes of this call, and which they expect. Default: None, they do.
        native_refusal: Why compiled C does not support the sizes; None if it does. Default: the op has no body in C, and
            `"torch"` runs instead of `"native"`.

    Raises:
        RequestError: If `backend` is not one of `BACKENDS`, or names kernels or C for a call that they cannot run.
    """
    if backend not in BACKENDS:
        OpChoices(backend)  # raises
    body = _standing.backend if backend == "auto" else backend
    if body == "auto" and tensor.is_cuda:
        return "triton" if HAS_TRITON and refusal is None and _multiplies(tensor) else "torch"
    if body == "auto":
        takes = tensor.device.type == "cpu" and tensor.dtype in NATIVE_DTYPES and native_refusal is None
        return "native" if takes and (torch.compiler.is_compiling() or native_library() is not None) else "torch"
    if body == "triton":
        _check_kernels(tensor, refusal)
    elif body == "native":
        _check_native(tensor, native_refusal)
        return "torch" if native_refusal == NO_NATIVE_BODY else "native"
    return body


def _check_kernels(tensor: torch.Tensor, refusal: str | None) -> None:
    if not HAS_TRITON:
        raise RequestError("backend is 'triton', but triton is not installed; install it, or choose 'torch'.")
    if not (tensor.is_cuda or interprets_kernels()):
        raise RequestError(
            f"backend is 'triton', but the tensors are on {tensor.device.type}; expected cuda, or choose 'torch'."
        )
    if tensor.dtype == torch.float64:
        raise RequestError(
            "backend is 'triton', but the tensors are float64; expected float32 or less, or choose 'torch'."
        )
    if refusal is not None:
        raise RequestError(f"backend is 'triton', but {refusal}, or choose 'torch'.")


def _check_native(tensor: torch.Tensor, refusal: str | None) -> None:
    if tensor.device.type != "cpu":
        raise RequestError(
            f"backend is 'native', but the tensors are on {tensor.device.type}; expected cpu, or choose 'torch'."
        )
    if tensor.dtype not in NATIVE_DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise RequestError(
            f"backend is 'native', but the tensors are {dtype}; expected float32 or bfloat16, or choose 'torch'."
        )
    if refusal is not None and refusal != NO_NATIVE_BODY:
        raise RequestError(f"backend is 'native', but {refusal}, or choose 'torch'.")
    if not torch.compiler.is_compiling() and native_library() is None:
        raise RequestError(f"backend is 'native', but {why_missing()}, or choose 'torch'.")


def _multiplies(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's GPU multiplies bfloat16 and TF32, as it does from compute capability 8.0 on."""
    capable = torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return capable and tensor.dtype != torch.float64

"""The choice between the bodies of an op."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch

from midus_hf.ops.native.library import native_library, why_missing
from midus_hf.ops.triton_import import HAS_TRITON

BACKENDS = ("auto", "reference", "torch", "native", "triton")
SELECTIONS = ("auto", "two-stage", "cartesian")
BACKWARDS = ("auto", "sorted", "atomic", "dedup")
DEPTH_PATHS = ("auto", "merged", "fused", "measured")
GATHERINGS = ("auto", "rows", "product")


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
        selection: How product keys are selected: in `"two-stage"`s, or by one selection over the `"cartesian"` grid of
            all `n * n` slots (MIDUS, appendix C.1). Default: `"auto"`, two stages.
        backward: How the gradient of a table is summed: `"sorted"`, in a fixed order; `"atomic"`, in any order, which may
            differ from run to run on CUDA; or `"dedup"`, by MIDUS's Algorithm 1 (appendix C.3), which waits for the
            device. Default: `"auto"`, sorted.
        depth_path: How heads that read sequence and depth do: `"merged"`, by the model's own attention and a kernel for the depth;
            `"fused"`, by one kernel for both where there is one for the call, which reads sequences of the same length as queries
            without mask, cap or dropout; or `"measured"`, by whichever of these took less time when a shape was first met, which
            another process may find otherwise. A graph of `torch.compile` cannot measure and is merged. Default: `"auto"`, merged.
        gathering: How rows of one bank for all heads are weighed and summed: `"rows"`, as they are read; or by a `"product"` of the
            whole bank with a matrix of all weights, whose sums are rounded to the dtype of the bank before: beyond the range of
            float16 a token is no number, and every token is none where a row is none. It has no sparse gradient, and one way of
            summing gradients, in place of `"sorted"`. Default: `"auto"`, the product in bfloat16 on a GPU of NVIDIA's where kernels
            run and it is expected to take less.
        exact: Whether kernels that select product keys of half precision compare all 32 bits of their scores. Otherwise the last
            ceil(log2(n)) say which sub-key a score is of, for n up to 128 and k up to 8: sub-keys and slots whose scores are closer
            than that, for n = 64 within 2^-17 of their size, may be taken for each other. Default: false.
    """

    backend: str = "auto"
    selection: str = "auto"
    backward: str = "auto"
    depth_path: str = "auto"
    gathering: str = "auto"
    exact: bool = False

    def __post_init__(self) -> None:
        every = {
            "backend": BACKENDS,
            "selection": SELECTIONS,
            "backward": BACKWARDS,
            "depth_path": DEPTH_PATHS,
            "gathering": GATHERINGS,
        }
        for name, choices in every.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")
        if not isinstance(self.exact, bool):
            raise ValueError(f"exact is {self.exact!r}; expected True or False.")


_standing = OpChoices()

_KNOWN = {
    (body, way, order, exact): OpChoices(body, way, order, exact=exact)
    for body, way, order, exact in itertools.product(BACKENDS, SELECTIONS, BACKWARDS, (False, True))
}
"""All that `resolve` may be asked and answer: making them anew would take a fifth of a decoding step's lookup."""


@contextlib.contextmanager
def op_choices(**changes: Any) -> Iterator[None]:
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
    backend: str,
    selection: str,
    backward: str,
    tensor: torch.Tensor,
    refusal: str | None = None,
    native_refusal: str | None = NO_NATIVE_BODY,
) -> OpChoices:
    """Name the bodies that an op runs.

    Args:
        backend: As in `OpChoices`.
        selection: As in `OpChoices`.
        backward: As in `OpChoices`.
        tensor: One of the op's, for its device and dtype. Kernels do not compute in float64.
        refusal: What kernels cannot take of this call's sizes, and what they expect. Default: they take it.
        native_refusal: What compiled C cannot take of them, likewise; None where it takes them. Default: the op has none, and
            `"torch"` stands in for it.

    Returns:
        Choices of these three without `"auto"`, and whether selection is to be exact. While a graph is traced nothing is built, and
        `"native"` is what the op runs if it can then.

    Raises:
        ValueError: If there is no such choice, or kernels or C are asked for where they cannot run.
    """
    if (backend, selection, backward, False) not in _KNOWN:
        OpChoices(backend, selection, backward)  # raises
    body = _standing.backend if backend == "auto" else backend
    way = _standing.selection if selection == "auto" else selection
    order = _standing.backward if backward == "auto" else backward
    way, order = "two-stage" if way == "auto" else way, "sorted" if order == "auto" else order
    if body == "auto":
        body = _chosen(tensor, (way, order), refusal, native_refusal)
    elif body == "triton":
        _check_kernels(tensor, refusal)
    elif body == "native":
        _check_native(tensor, native_refusal)
        body = "torch" if native_refusal == NO_NATIVE_BODY else "native"
    return _KNOWN[body, way, order, _standing.exact]


def _chosen(tensor: torch.Tensor, ways: tuple[str, str], refusal: str | None, native_refusal: str | None) -> str:
    """What is fastest where nobody chose."""
    if tensor.is_cuda:
        return "triton" if HAS_TRITON and refusal is None and _multiplies(tensor) else "torch"
    takes = tensor.device.type == "cpu" and tensor.dtype in NATIVE_DTYPES and native_refusal is None
    is_ours = takes and ways == ("two-stage", "sorted")
    return "native" if is_ours and (torch.compiler.is_compiling() or native_library() is not None) else "torch"


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


def chosen_depth_path() -> str:
    """How heads that read sequence and depth do: `"merged"`, `"fused"` or `"measured"`."""
    return "merged" if _standing.depth_path == "auto" else _standing.depth_path


def chosen_gathering() -> str:
    """How rows of one bank for all heads are weighed and summed: `"auto"`, `"rows"` or `"product"`."""
    return _standing.gathering


def _multiplies(tensor: torch.Tensor) -> bool:
    """Whether the tensor's GPU has what kernels multiply with: bfloat16 and TF32, from compute capability 8.0 on."""
    capable = torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return capable and tensor.dtype != torch.float64


def interprets_kernels() -> bool:
    """Whether triton's interpreter runs kernels on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"

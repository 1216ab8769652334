"""How an op is called: the choice of its implementation (body), registration with torch, and dtypes."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from midus_hf.config.errors import RequestError, one_of
from midus_hf.ops.dispatch.library import NATIVE_DTYPES, why_missing
from midus_hf.ops.dispatch.triton import HAS_TRITON, interprets_kernels

BACKENDS = ("auto", "reference", "torch", "native", "triton")
NO_NATIVE_BODY = "the op has no body in C"


@dataclasses.dataclass(frozen=True)
class OpChoices:
    """Choices that an op follows if its caller leaves them to `"auto"`.

    Args:
        backend: The body that an op runs. `"reference"` is the contract, written to be read; `"torch"` is vectorised; `"native"` is
            compiled C for float32 and bfloat16 on a CPU, and `"torch"` for ops without a body in C; `"triton"` runs kernels for CUDA
            tensors. Default: `"auto"`: kernels on GPUs from compute capability 8.0 on, C on a CPU for which a compiler built it,
            `"torch"` elsewhere.
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise RequestError(f"backend is {self.backend!r}; expected one of {', '.join(map(repr, BACKENDS))}.")


_standing = OpChoices()
# Bodies of calls that were checked before, by op, backend, device, dtype and shapes. Cleared whenever choices change.
RESOLVED: dict[tuple[Any, ...], str] = {}


@contextlib.contextmanager
def op_choices(**changes: Any) -> Iterator[None]:
    """Change the choices of all ops whose callers leave them to `"auto"`, within the `with` block.

    The change holds for the whole process. The gradient of a call follows the choices of its forward pass. Every backend sums
    gradients of tables in a fixed order.

    Args:
        changes: Fields of `OpChoices` and their new values.

    Raises:
        RequestError: If `OpChoices` has no field of a name, or a field cannot have its new value.
    """
    global _standing
    before = _standing
    unknown = changes.keys() - {"backend"}
    if unknown:
        raise RequestError(f"op_choices has no option {min(unknown)!r}. {one_of(['backend'])}")
    _standing = dataclasses.replace(before, **changes)
    RESOLVED.clear()
    try:
        yield
    finally:
        _standing = before
        RESOLVED.clear()


def resolve(
    backend: str, tensor: Tensor, refusal: str | None = None, native_refusal: str | None = NO_NATIVE_BODY
) -> str:
    """Return the name of the body that an op runs: `"reference"`, `"torch"`, `"native"` or `"triton"`.

    While a graph is traced, `"native"` means an op that uses the C library if there is one when the graph runs.

    Args:
        backend: The choice of the op's caller, one of `BACKENDS`.
        tensor: An argument of the op, whose device and dtype decide. Kernels do not compute in float64.
        refusal: Why kernels do not support the sizes of this call, and which they expect. Default: None, they do.
        native_refusal: The same of compiled C. Default: the op has no body in C, and `"torch"` runs instead of `"native"`.

    Raises:
        RequestError: If `backend` is not one of `BACKENDS`, or names kernels or C for a call that they cannot run.
    """
    if backend not in BACKENDS:
        OpChoices(backend)  # raises
    body = _standing.backend if backend == "auto" else backend
    if body == "auto" and tensor.is_cuda:
        return "triton" if HAS_TRITON and refusal is None and _multiplies(tensor) else "torch"
    if body == "auto":
        return "native" if native_refusal is None and _native_obstacle(tensor) is None else "torch"
    obstacle, has_body = None, native_refusal != NO_NATIVE_BODY
    if body == "triton":
        obstacle = _kernel_obstacle(tensor) or refusal
    elif body == "native":
        obstacle = _native_obstacle(tensor, native_refusal if has_body else None)
    if obstacle is not None:
        raise RequestError(f"backend is {body!r}, but {obstacle}, or choose 'torch'.")
    return body if body != "native" or has_body else "torch"


def _kernel_obstacle(tensor: Tensor) -> str | None:
    if not HAS_TRITON:
        return "triton is not installed; install it"
    if not (tensor.is_cuda or interprets_kernels()):
        return f"the tensors are on {tensor.device.type}; expected cuda"
    return "the tensors are float64; expected float32 or less" if tensor.dtype == torch.float64 else None


def _native_obstacle(tensor: Tensor, refusal: str | None = None) -> str | None:
    """Return why compiled C cannot compute with a tensor, or `refusal`, which is about sizes."""
    if tensor.device.type != "cpu":
        return f"the tensors are on {tensor.device.type}; expected cpu"
    if tensor.dtype not in NATIVE_DTYPES:
        return f"the tensors are {str(tensor.dtype).removeprefix('torch.')}; expected float32 or bfloat16"
    if refusal:
        return refusal
    return None if torch.compiler.is_compiling() else why_missing()


def _multiplies(tensor: Tensor) -> bool:
    """Return whether the tensor's GPU multiplies bfloat16 and TF32 (compute capability 8.0 or more)."""
    capable = torch.version.hip is not None or torch.cuda.get_device_capability(tensor.device) >= (8, 0)
    return capable and tensor.dtype != torch.float64


# Name of the package of this module: `midus_hf`, or that of a copy, whose ops are registered in addition to those of `midus_hf`.
_NAMESPACE = __name__.partition(".")[0]


def differentiable_op(
    name: str,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    gradients: tuple[str, ...],
    outputs: tuple[str, ...] = ("output",),
    summand: str | None = None,
    like: Callable[[Tensor], Tensor] = lambda tensor: tensor.new_empty(tensor.shape),
) -> Any:
    """Register `midus_hf::name` and `midus_hf::name_backward`, each one node of a compiled graph.

    `backward` names what it needs by its parameters: inputs of `forward`, outputs, `wants` (which of `gradients` are needed, a list
    of bools), `gradient` (of the first output), and `<output>_gradient` (of others). Other outputs are not differentiable.

    Args:
        name: Name of the op.
        forward: Computes a tensor or a tuple of tensors. Its parameters are annotated as `torch.library.custom_op` expects.
        backward: Computes a gradient for each of `gradients`, a tensor or a list of tensors, or None if it is not needed.
        shapes: Returns empty outputs, with the arguments of `forward`.
        gradients: Names of inputs, tensors or lists of tensors.
        outputs: Names of the outputs.
        summand: Name of an input that is added to the first output, and may be None. Default: there is none.
        like: Makes an empty gradient of a tensor. Default: a contiguous one.
    """
    taken, named = (list(inspect.signature(function).parameters) for function in (forward, backward))
    upstream = ["gradient", *(f"{output}_gradient" for output in outputs[1:])]
    op = torch.library.custom_op(f"{_NAMESPACE}::{name}", forward, mutates_args=())
    op.register_fake(shapes)

    @functools.wraps(backward)
    def derivative(*arguments: Any) -> list[Tensor]:
        wants = arguments[named.index("wants")]
        results = zip(backward(*arguments), wants, strict=True)
        return [tensor for result, wanted in results if wanted for tensor in _listed(result)]

    signature = inspect.signature(backward).replace(return_annotation=list[Tensor])
    derivative.__signature__ = signature  # type: ignore[attr-defined]
    backward_op = torch.library.custom_op(f"{_NAMESPACE}::{name}_backward", derivative, mutates_args=())

    @backward_op.register_fake
    def _(*arguments: Any) -> list[Tensor]:
        given = dict(zip(named, arguments, strict=True))
        wanted = itertools.compress(gradients, given["wants"])
        return [like(tensor) for each in wanted for tensor in _listed(given[each])]

    def save(ctx: Any, inputs: tuple, output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        given = dict(zip(taken, inputs, strict=True)) | dict(zip(outputs, results, strict=True))
        needed = {each: given[each] for each in named if each in given}
        tensors = {each: value for each, value in needed.items() if isinstance(value, (Tensor, list, tuple))}
        ctx.others = {each: value for each, value in needed.items() if each not in tensors}
        ctx.counts = {each: None if isinstance(value, Tensor) else len(value) for each, value in tensors.items()}
        ctx.save_for_backward(*itertools.chain(*map(_listed, tensors.values())))
        ctx.mark_non_differentiable(
            *(result for result, each in zip(results, upstream, strict=True) if each not in named)
        )

    def differentiate(ctx: Any, *of_outputs: Tensor) -> tuple:
        def taken_from(tensors: Iterator[Tensor], each: str) -> Any:
            count = ctx.counts[each]
            return next(tensors) if count is None else list(itertools.islice(tensors, count))

        needs = dict(zip(taken, ctx.needs_input_grad, strict=True))
        wants = [any(_listed(needs[each])) for each in gradients]
        saved = iter(ctx.saved_tensors)
        given = (
            {each: taken_from(saved, each) for each in ctx.counts}
            | ctx.others
            | dict(zip(upstream, of_outputs, strict=True))
        )
        results = iter(backward_op(*((given | {"wants": wants})[each] for each in named)) if any(wants) else ())
        found = {each: taken_from(results, each) for each in itertools.compress(gradients, wants)}
        if summand is not None and needs[summand]:
            found[summand] = of_outputs[0]
        results_of_inputs = []
        for each in taken:
            count = ctx.counts.get(each)  # of tensors in a list, whose gradient is a list, too
            nothing = [None] * count if count else None
            results_of_inputs.append(found.get(each, nothing))
        return tuple(results_of_inputs)

    op.register_autograd(differentiate, setup_context=save)
    return op


def _listed(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


_NOTHING = contextlib.nullcontext()


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Return a context without the lower precision of `torch.autocast` on this type of device."""
    # A meta tensor has no autocast to disable. Dynamo of torch 2.11 cannot trace `torch.amp.is_autocast_available`.
    if device_type == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device_type)):
        return _NOTHING  # entering an autocast context takes as long as some ten operations on a GPU
    return torch.autocast(device_type, enabled=False)


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which sums over elements of a tensor are computed: float32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def narrowest_integer(bound: int) -> torch.dtype:
    """Return the narrowest of int16, int32 and int64 that holds `bound`, to save space and sort faster."""
    return next(dtype for dtype in (torch.int16, torch.int32, torch.int64) if bound <= torch.iinfo(dtype).max)

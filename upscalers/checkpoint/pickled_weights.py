"""PyTorch's own weight files (`.bin`): positions of their tensors, read without running what the files pickle.

A file is a zip archive that holds a pickle, which describes tensors, and their bytes uncompressed. So tensors can be read by
position, as from safetensors. The pickle is read by `torch.load` with `weights_only`, which calls nothing that a file chooses,
into tensors without data.
"""

import pickle
from pathlib import Path
from typing import Any

from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.request.errors import RequestError, one_line

_ARCHIVE_SIGNATURE = b"PK\x03\x04"
_REFUSED = "Trying to load unsupported "
# What a file may hold beside tensors, such as a count of steps.
_BESIDE_TENSORS = (int, float, str, bytes, type(None))
# Names of dtypes in safetensors, by torch's names.
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16",
    "uint32": "U32", "uint64": "U64",
}  # fmt: skip


def read_pickled(file: Path) -> dict[str, StoredTensor]:
    """Return the dtype, shape and position of each tensor of a `.bin` file, without running code that the file names.

    Tensors that share their bytes have the same position. Numbers and texts beside the tensors are left out
    (`names_beside_tensors`): transformers does not load them either.

    Raises:
        RequestError: If the pickle asks for code to be run, holds anything but tensors by name, or is not sound, if the file
            is from before PyTorch 1.6, or if the elements of a tensor do not lie one after another.
    """
    held = _read(file)
    tensors = {name: value for name, value in held.items() if not isinstance(value, _BESIDE_TENSORS)}
    for name, value in tensors.items() if tensors else held.items():
        if not isinstance(name, str) or not hasattr(value, "untyped_storage"):
            raise _unsound(file, f"{name!r} is {_kind(value)} instead of a tensor")
    starts = sorted({tensor.untyped_storage()._checkpoint_offset for tensor in tensors.values()})
    ends = dict(zip(starts, [*starts[1:], file.stat().st_size], strict=True))
    return {name: _stored(name, tensor, ends, file) for name, tensor in tensors.items()}


def names_beside_tensors(file: Path) -> list[str]:
    """Return the names of the numbers and texts that a `.bin` file, which `read_pickled` reads, holds beside its tensors."""
    return [str(name) for name, value in _read(file).items() if isinstance(value, _BESIDE_TENSORS)]


def _read(file: Path) -> dict[Any, Any]:
    """Return what a file holds by name, with tensors that have no data."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with file.open("rb") as stream:
        if stream.read(len(_ARCHIVE_SIGNATURE)) != _ARCHIVE_SIGNATURE:
            raise _unsound(file, "it is no archive, as torch.save has written since PyTorch 1.6")
    try:
        with FakeTensorMode():
            state = torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        _, refused, wanted = str(error).partition(_REFUSED)
        if not refused:
            raise _unsound(file, one_line(error)) from None
        raise RequestError(
            f"{file.name} asks for {wanted.removeprefix('GLOBAL ').split()[0]} when it is unpickled, which is never run; expected "
            "tensors alone. Do not load the file by other means; give a checkpoint in safetensors."
        ) from None
    except Exception as error:  # torch raises whatever its reader of archives raises
        raise _unsound(file, one_line(error)) from None
    if not isinstance(state, dict):
        raise _unsound(file, f"it holds {_kind(state)} instead of tensors by name")
    return dict(state)


def _stored(name: str, tensor: Any, ends: dict[int, int], file: Path) -> StoredTensor:
    """Return the position of a tensor, after checking that all its bytes are there."""
    if not tensor.is_contiguous():
        raise RequestError(
            f"{name} is stored in {file.name} with strides {list(tensor.stride())}; expected its elements one after another. "
            "Load the model with transformers and save it again, as safetensors."
        )
    dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise _unsound(file, f"{name!r} is of {tensor.dtype}")
    storage = tensor.untyped_storage()._checkpoint_offset
    start = storage + tensor.storage_offset() * tensor.element_size()
    if start + tensor.numel() * tensor.element_size() > ends[storage]:
        raise _unsound(file, f"{name!r} reaches beyond its storage")
    return StoredTensor(dtype, tuple(tensor.shape), file, start)


def _kind(value: object) -> str:
    return f"{'an' if type(value).__name__[0] in 'aeiou' else 'a'} {type(value).__name__}"


def _unsound(file: Path, reason: str) -> RequestError:
    return RequestError(f"{file.name} is not a sound file of PyTorch weights: {reason}. Download or save it again.")

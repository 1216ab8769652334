"""GGUF files as bases, read tensor by tensor."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.wording import first_few, install_extra
from upscalers.architecture.families import family_of
from upscalers.checkpoint.computed_tensor import ComputedTensor
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.request.errors import RequestError, one_line

if TYPE_CHECKING:
    import torch

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT_COUNT = "split.count"


def open_gguf(path: Path, folder: Path) -> dict[str, StoredTensor]:
    """Return the weights of a GGUF file, which are dequantised to float32 whenever they are read, and write all else to a folder.

    Args:
        path: The `.gguf` file, or the first of the files that it was split into.
        folder: An existing folder that config and tokenizer are written to.

    Returns:
        Every tensor by the name that transformers gives it.

    Raises:
        RequestError: If the gguf package, a part or a tensor is missing, a tensor of the model is not made from one tensor of the
            file, as in mixtures of experts, or transformers cannot read the file.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise RequestError(
            f"base {path.name} is a GGUF file, which needs the gguf package; {install_extra('gguf')}."
        ) from None
    from transformers import AutoConfig, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with _readable(path), _as_one_file(path) as tensors_of_file:
        config = AutoConfig.from_pretrained(**source)
        values = config.to_dict()
        if family_of(values).layout(values).is_converted:
            raise _put_together(path, f"transformers converts tensors of {values['model_type']!r} when it loads them")
        described = _Described.of(config, path)
        described.check_tensors(tensors_of_file)
        held = described.held
        tensors: dict[str, StoredTensor] = {}
        for part, stored in tensors_of_file:
            name = described.names.get(stored.name)
            if name in held:
                in_file = StoredTensor("U8", (int(stored.n_bytes),), part, int(stored.data_offset))
                dequantise = _dequantiser(stored, described)
                tensors[name] = GgufTensor("F32", tuple(held[name].shape), None, 0, in_file, dequantise)
        covered = {id(held[name]) for name in tensors}
        others = [name for name, tensor in held.items() if id(tensor) not in covered]
        if others:
            raise _put_together(path, f"no tensor of the file alone is {first_few(others, 3)}")
        model = described.model
        model.config.architectures = [type(model).__name__]
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return {name: tensors[name] for name in held if name in tensors}


def _put_together(path: Path, reason: str) -> RequestError:
    return RequestError(
        f"{path.name} cannot be read tensor by tensor: {reason}. Give the safetensors checkpoint it was made from."
    )


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Say of any failure inside the block that the file cannot be read."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        raise RequestError(
            f"transformers cannot read {path.name} ({type(error).__name__}: {one_line(error)}). Download it again, or give the "
            "safetensors checkpoint it was made from."
        ) from None


def parts_of(path: Path) -> list[Path]:
    """Return the files that a GGUF file was split into, by the name of the first; the file itself if it was not split.

    Raises:
        RequestError: If another part than the first is named, or a part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    parts = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{match['count']}.gguf")
        for number in range(1, int(match["count"]) + 1)
    ]
    if path != parts[0]:
        raise RequestError(f"base {path.name} is a part of a GGUF file; expected the first part: --base {parts[0]}.")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise RequestError(
            f"base {path.name} is the first of {len(parts)} parts, and {first_few(missing, 3)} is not beside it; expected all parts. "
            "Download the rest."
        )
    return parts


@contextlib.contextmanager
def _as_one_file(path: Path) -> "Iterator[list[tuple[Path, Any]]]":
    """Let transformers read all parts of a split file as one, and yield its tensors, each with the part that holds it."""
    import gguf

    parts, reader_class = parts_of(path), gguf.GGUFReader
    readers = [reader_class(part) for part in parts]
    whole = readers[0]
    split = whole.get_field(_SPLIT_COUNT)
    count = 1 if split is None else int(split.contents())
    if max(count, 1) != len(parts):
        raise RequestError(
            f"the header of {path.name} speaks of {count} parts, and its name of {len(parts)}; expected the names that "
            "llama-gguf-split gives, such as model-00001-of-00002.gguf. Rename the files."
        )
    tensors = [(part, tensor) for part, reader in zip(parts, readers, strict=True) for tensor in reader.tensors]
    whole.tensors = [tensor for _, tensor in tensors]

    def read(*arguments: Any, **options: Any) -> Any:
        return whole

    # transformers looks the class up whenever it reads, and knows nothing of parts
    gguf.GGUFReader = read  # type: ignore[assignment, misc]
    try:
        yield tensors
    finally:
        gguf.GGUFReader = reader_class  # type: ignore[misc]


@dataclass(frozen=True)
class _Described:
    """The model that the header of a GGUF file describes.

    Args:
        path: The file, or the first of the files that it was split into.
        model: The model, on the meta device.
        names: Name of a tensor in the model by its name in the file.
        parsed: The header as transformers parses it.
        processor: What transformers does to tensors of the architecture.
    """

    path: Path
    model: Any
    names: dict[str, str]
    parsed: dict[str, Any]
    processor: Any

    @classmethod
    def of(cls, config: Any, path: Path) -> "_Described":
        """Return the model of a config that was read from a file, which `_as_one_file` must have opened."""
        import torch
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
            load_gguf_checkpoint,
            read_field,
        )

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        parsed = load_gguf_checkpoint(path)
        architecture = read_field(GGUFReader(path), "general.architecture")[0]
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=parsed["config"])
        return cls(path, model, get_gguf_hf_weights_map(model, processor), parsed, processor)

    @property
    def held(self) -> dict[str, Any]:
        """Tensors of the model, on the meta device."""
        return self.model.state_dict(keep_vars=True)

    @property
    def tied(self) -> set[str]:
        """Names of tensors that only repeat others."""
        first = {id(tensor): name for name, tensor in reversed(self.held.items())}
        return {name for name, tensor in self.held.items() if first[id(tensor)] != name}

    def check_tensors(self, tensors: list[tuple[Path, Any]]) -> None:
        """Check that the file holds every tensor of the model that names of the file stand for, with its size.

        Raises:
            RequestError: If the file lacks a tensor.
            ValueError: If tensors of the file have other sizes than the header implies.
        """
        stored = {tensor.name: tensor for _, tensor in tensors}
        lacking, held, tied = [], self.held, self.tied
        for name_in_file, name in self.names.items():
            if name not in held:
                continue
            if name_in_file not in stored:
                lacking += [] if name in tied else [f"{name_in_file} ({name})"]
            elif int(stored[name_in_file].n_elements) != math.prod(held[name].shape):
                raise ValueError(
                    f"{name_in_file} has {stored[name_in_file].n_elements} elements where the header asks for "
                    f"{list(held[name].shape)}"
                )
        if lacking:
            raise RequestError(
                f"{self.path.name} lacks {first_few(lacking, 3)}; expected every tensor of the model that its header describes. "
                "Download it again, or give the safetensors checkpoint it was made from."
            )


@dataclass(frozen=True)
class GgufTensor(ComputedTensor):
    """A tensor of a GGUF file, which is dequantised to float32 when it is read.

    Args:
        dequantise: Function that returns the array as transformers' loader makes it.
    """

    dequantise: "Callable[[], Any] | None" = None

    def read(self) -> "torch.Tensor":
        import torch

        assert self.dequantise is not None
        values = torch.from_numpy(self.dequantise().copy())
        assert tuple(values.shape) == self.shape, (values.shape, self.shape)
        return torch.empty(self.shape).copy_(values)


def _dequantiser(stored: Any, described: _Described) -> Callable[[], Any]:
    """Return the function that makes a tensor of the model from a tensor of the file, as transformers' loader does."""

    def dequantise() -> Any:
        from gguf import dequantize

        made = described.processor.process(
            weights=dequantize(stored.data, stored.tensor_type),
            name=stored.name,
            tensor_key_mapping=described.names,
            parsed_parameters=described.parsed,
        )
        assert made.name == stored.name, (made.name, stored.name)
        return made.weights

    return dequantise

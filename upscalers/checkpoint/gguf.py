"""GGUF files as bases: read tensor by tensor, or converted to checkpoints."""

import contextlib
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.wording import install_extra
from upscalers.architecture.families import family_of
from upscalers.checkpoint.computed_tensor import ComputedTensor
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.request.errors import RequestError, one_line

if TYPE_CHECKING:
    import torch


# Names that llama.cpp gives to the files of a split model.
_PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@contextlib.contextmanager
def whole_gguf(path: Path) -> Iterator[Path]:
    """Give the GGUF file of a model: the file itself, or a temporary one with the tensors of all parts if the model is split.

    Args:
        path: A `.gguf` file; of a split model, its first part, beside which the other parts lie.

    Raises:
        RequestError: If the gguf package is missing, the file is unreadable, or is a part of a split model but not the first, or
            if a part is missing.
    """
    _check_package(path)
    try:
        count = _count_parts(path)
    except Exception as error:
        raise _unreadable(path, error) from None
    if count <= 1:
        yield path
        return
    parts = _parts(path, count)
    with tempfile.TemporaryDirectory(prefix="upscale-gguf-") as temporary:
        joined = Path(temporary, f"{path.stem}.gguf")
        try:
            _join(parts, joined)
        except Exception as error:
            raise _unreadable(path, error) from None
        yield joined


def _count_parts(path: Path) -> int:
    """Return the number of files that a GGUF model is split over, by its header or by its name."""
    from gguf import GGUFReader

    field = GGUFReader(path).fields.get("split.count")
    named = _PART.fullmatch(path.name)
    return max(int(field.contents()) if field else 1, int(named["count"]) if named else 1)


def _parts(path: Path, count: int) -> list[Path]:
    """Return the files of a split model, in order."""
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise RequestError(
            f"{path.name} is one of {count} files of a split model; expected its name to be NAME-00001-of-{count:05d}.gguf, by which "
            "the others are found. Give the files the names that they were published with."
        )
    names = [f"{named['model']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if int(named["number"]) != 1:
        raise RequestError(f"{path.name} is part {int(named['number'])} of {count}; expected the first, {names[0]}.")
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise RequestError(
            f"{path.name} is one of {count} parts, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not beside it; "
            "expected all parts in one folder. Download them."
        )
    return [path.parent / name for name in names]


def _join(parts: list[Path], joined: Path) -> None:
    """Write the header of the first part and the tensors of all parts to one file, tensor by tensor."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    readers = [GGUFReader(part) for part in parts]
    writer = GGUFWriter(joined, str(readers[0].fields["general.architecture"].contents()))
    for name, field in readers[0].fields.items():
        if name.startswith(("GGUF.", "split.")) or name == "general.architecture":
            continue
        kind, *elements = field.types
        element = elements[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, element)
    for reader in readers:
        for tensor in reader.tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path, folder: Path) -> dict[str, StoredTensor] | None:
    """Return the weights of a GGUF file, which are dequantised to float32 whenever they are read, and write all else to a folder.

    Where a tensor of the model is not made from one tensor of the file, the whole checkpoint is written, as by
    `convert_gguf`.

    Args:
        path: The `.gguf` file.
        folder: An existing folder that config and tokenizer are written to.

    Returns:
        Every tensor by the name that transformers gives it; None if the weights are in the folder.

    Raises:
        RequestError: If the gguf package is missing, or transformers cannot read the file.
    """
    _check_package(path)
    try:
        tensors = open_gguf(path, folder)
    except Exception as error:
        raise _unreadable(path, error) from None
    if tensors is None:
        convert_gguf(path, folder)
    return tensors


def convert_gguf(path: Path, folder: Path, config_only: bool = False) -> None:
    """Dequantise a GGUF file to a float32 checkpoint with its tokenizer, through transformers' loader.

    Args:
        path: The `.gguf` file.
        folder: An existing folder that the checkpoint is written to.
        config_only: Whether to write only `config.json`, from the file's header. Default: False.

    Raises:
        RequestError: If the gguf package is missing, transformers cannot read the file, or the file lacks a tensor of the model.
    """
    _check_package(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        if config_only:
            AutoConfig.from_pretrained(**source).save_pretrained(folder)
            return
        model, loading = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:
        raise _unreadable(path, error) from None
    if missing := sorted(loading["missing_keys"]):  # which transformers has drawn at random
        raise RequestError(
            f"{path.name} has no tensor for {missing[0]}{f' and {len(missing) - 1} others' if missing[1:] else ''} of the model in "
            "its header; expected all of them. Download it again, with all of its parts."
        )
    # The loader leaves its quantiser on the dequantised model, and a model with a quantiser refuses to be saved.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_package(path: Path) -> None:
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise RequestError(
            f"base {path.name} is a GGUF file, which needs the gguf package; {install_extra('gguf')}."
        ) from None


def _unreadable(path: Path, error: Exception) -> RequestError:
    return RequestError(
        f"transformers cannot read {path.name} ({type(error).__name__}: {one_line(error)}). Download it again, or give the "
        "safetensors checkpoint it was made from."
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


def open_gguf(path: Path, folder: Path) -> dict[str, StoredTensor] | None:
    """Return the tensors of a GGUF file, and write config and tokenizer of the model to a folder.

    Args:
        path: The `.gguf` file.
        folder: An existing folder.

    Returns:
        Every tensor by the name that transformers gives it; None, and nothing written, if a tensor of the model is not made
        from one tensor of the file, as in
        mixtures of experts, or transformers converts tensors of the type when it loads them.

    Raises:
        Exception: If transformers or the gguf package cannot read the file.
    """
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
        load_gguf_checkpoint,
        read_field,
    )

    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**source)
    try:
        if family_of(config.to_dict()).is_converted(config.to_dict()):
            return None
    except RequestError:
        return None  # whoever opens the base says why
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reader = GGUFReader(path)
    parsed = load_gguf_checkpoint(path)
    architecture = read_field(reader, "general.architecture")[0]
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=parsed["config"])
    names = get_gguf_hf_weights_map(model, processor)
    held = model.state_dict(keep_vars=True)
    tensors: dict[str, StoredTensor] = {}
    for stored in reader.tensors:
        name = names.get(stored.name)
        if name not in held:
            continue

        def dequantise(stored: Any = stored) -> Any:
            made = processor.process(
                weights=dequantize(stored.data, stored.tensor_type),
                name=stored.name,
                tensor_key_mapping=names,
                parsed_parameters=parsed,
            )
            assert made.name == stored.name, (made.name, stored.name)
            return made.weights

        if math.prod(held[name].shape) != int(stored.n_elements):
            raise ValueError(
                f"{stored.name} has {int(stored.n_elements)} elements where the header asks for {list(held[name].shape)}"
            )
        in_file = StoredTensor("U8", (int(stored.n_bytes),), path, int(stored.data_offset))
        tensors[name] = GgufTensor("F32", tuple(held[name].shape), None, 0, in_file, dequantise)
    covered = {id(held[name]) for name in tensors}
    if any(id(tensor) not in covered for tensor in held.values()):
        return None
    model.config.architectures = [type(model).__name__]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    return {name: tensors[name] for name in held if name in tensors}

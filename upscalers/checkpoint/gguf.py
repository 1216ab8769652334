"""GGUF files as bases: read tensor by tensor, or converted to checkpoints."""

import math
from collections.abc import Callable
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
        RequestError: If the gguf package is missing, or transformers cannot read the file.
    """
    _check_package(path)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    try:
        if config_only:
            AutoConfig.from_pretrained(**source).save_pretrained(folder)
            return
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:
        raise _unreadable(path, error) from None
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

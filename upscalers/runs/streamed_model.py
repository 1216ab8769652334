"""A model that runs with the weights of one module in memory, reading them from the files when the module is called."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import midus_hf  # noqa: F401 - registers the classes
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.saved_models import auto_class_of
from upscalers.checkpoint.safetensors_format import StoredTensor, read_tensor
from upscalers.request.errors import VerificationError

_NAMED = 3


class RunningModel:
    """A checkpoint's language model, complete and exact, in eval mode; memories that fetch blocks fetch those of `path`."""

    def __init__(self, model: Any, path: tuple[int, ...] | None):
        self._model, self._path = model, path
        self._stack = decoder_of(model)
        self.vocab_size: int = model.config.get_text_config().vocab_size

    def logits(
        self,
        tokens: torch.Tensor,
        see: Callable[[int, torch.Tensor], None],
        entering: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits `[B, T, V]`; `see` gets 0 and the stream before the layers, then i and that after the i-th, from 1."""
        layers = self._stack.layers
        # Llama 4 moves ids to its embedding's device, which is the meta device until the embedding is called.
        handles = [
            self._model.get_input_embeddings().register_forward_pre_hook(
                lambda _, inputs: (tokens,) if inputs[0].is_meta else None
            ),
            layers[0].register_forward_pre_hook(lambda _, inputs: see(0, inputs[0])),
        ]
        for index, stream in (entering or {}).items():
            handles.append(
                layers[index].register_forward_pre_hook(lambda _, inputs, stream=stream: (stream, *inputs[1:]))
            )
        for number, layer in enumerate(layers, 1):
            handles.append(layer.register_forward_hook(lambda *call, number=number: see(number, _stream(call[-1]))))
        try:
            with torch.no_grad():
                fetched = {} if self._path is None else {"memory_ids": torch.tensor([self._path] * len(tokens))}
                return self._model(tokens, use_cache=False, **fetched).logits
        finally:
            for handle in handles:
                handle.remove()


class LoadedModel(RunningModel):
    """A language model with all weights in memory, for types whose tensors transformers converts when it loads them."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loading: Any = auto_class_of(config).from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        model, loaded = loading
        wrong = [*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]
        if wrong:
            raise VerificationError(
                f"the model loads without {', '.join(sorted(wrong)[:_NAMED])}; expected every tensor in its place."
            )
        super().__init__(model.eval(), path_of_last_leaf(model.config.get_text_config()))


class StreamedModel(RunningModel):
    """A language model that has the weights of one module in memory at a time; of a composite model, only the language model runs."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype):
        config = language_config_in(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        _fill_buffers_outside_checkpoints(model)
        super().__init__(model.eval(), path_of_last_leaf(config))
        for service in getattr(self._model.base_model, "services", {}).values():
            if not getattr(service, "runs_passes", False):
                service.after_loading(folder, {})
        attach_align_device_hook(
            self._model,
            execution_device=torch.device("cpu"),
            offload=True,
            offload_buffers=True,
            weights_map=_StoredWeights(_places(model, tensors)),
        )


def language_config_in(folder: Path) -> Any:
    """Return the config of a checkpoint as transformers reads it; of a composite model, that of the language model within it."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    language_config = config.get_text_config()
    if language_config is not config:
        language_config.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return language_config


def _stream(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the residual stream after a layer; some layers return it with values that they pass to later layers."""
    return output if isinstance(output, torch.Tensor) else output[0]


def path_of_last_leaf(config: Any) -> tuple[int, ...] | None:
    """Return the path to the last leaf of the tree of blocks that memories fetch; None if no memory fetches blocks."""
    banks = block_layouts(config.memories()) if getattr(config, "memory", None) else {}
    for layout in banks.values():
        return layout.blocks.path(layout.blocks.nodes(layout.num_levels) - 1)
    return None


class _StoredWeights(dict[str, StoredTensor]):
    """Tensors by their names in the model, read again at each access."""

    def __getitem__(self, name: str) -> Any:
        return read_tensor(super().__getitem__(name))


def _places(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensor of each parameter and buffer of the model."""
    held = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names_of.setdefault(id(tensor), []).append(name)
    places, wrong = {}, []
    for name, tensor in held.items():
        tied = (name, *names_of[id(tensor)])
        spellings = (each for other in tied for each in (other, other.removeprefix(f"{model.base_model_prefix}.")))
        stored = next((tensors[other] for other in spellings if other in tensors), None)
        if stored is None:
            wrong.append(name)
        elif stored.shape != tuple(tensor.shape):
            wrong.append(f"{name} as {list(tensor.shape)}, which is {list(stored.shape)}")
        else:
            places[name] = stored
    if wrong:
        raise VerificationError(
            f"the model loads without {', '.join(wrong[:_NAMED])}; expected every tensor in its place."
        )
    return places


def _fill_buffers_outside_checkpoints(model: Any) -> None:
    """Fill buffers that checkpoints do not hold, such as rotary frequencies, by the family's initialiser, as transformers does."""
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if names:
            model._init_weights(module)
    for stack in model.modules():  # some families fill buffers of their parts from the stack
        if isinstance(stack, PreTrainedModel):
            model._init_weights(stack)

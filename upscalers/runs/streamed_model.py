"""A model that runs with the weights of one module in memory, read from the checkpoint's files when the module is called."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import attach_align_device_hook
from transformers import AutoConfig, AutoModelForCausalLM

import midus_hf  # noqa: F401 - registers the classes
from upscalers.checkpoint.safetensors_format import INTEGER_NAMES, TORCH_NAMES, StoredTensor
from upscalers.request.errors import VerificationError

_NAMED = 3


class StreamedModel:
    """A checkpoint's language model, whole and exact, that never holds more weights than one module has.

    Everything it computes is the family's own forward pass; accelerate gives each module its weights and takes them away.

    Args:
        folder: The checkpoint's, for its config.
        tensors: Its tensors, by full name, as their files hold them.
        dtype: To run in.

    Raises:
        VerificationError: If a tensor that the class has is not among them, or has another shape.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        _fill_buffers_outside_checkpoints(model)
        self._model: Any = model.eval()
        self._path = path_of_last_leaf(config)
        if self._path is not None:
            self._model.open_banks(folder)
        self.vocab_size: int = config.vocab_size
        attach_align_device_hook(
            self._model,
            execution_device=torch.device("cpu"),
            offload=True,
            offload_buffers=True,
            weights_map=_StoredWeights(_places(model, tensors)),
        )

    def logits(self, tokens: torch.Tensor, see: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        """Run the model.

        Args:
            tokens: `[B, T]`.
            see: Called with 0 and the residual stream `[B, T, D]` in front of the first layer, then with i and what it is
                behind the i-th.

        Returns:
            `[B, T, V]`.
        """
        layers = self._model.model.layers
        handles = [layers[0].register_forward_pre_hook(lambda _, inputs: see(0, inputs[0]))]
        for number, layer in enumerate(layers, 1):
            handles.append(layer.register_forward_hook(lambda *call, number=number: see(number, _stream(call[-1]))))
        try:
            with torch.no_grad():
                asked = inputs_of_memories(self._model.model, self._path, tokens)
                return self._model(tokens, use_cache=False, **asked).logits
        finally:
            for handle in handles:
                handle.remove()


def _stream(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The residual stream behind a layer, which some layers give with what they carry to later ones."""
    return output if isinstance(output, torch.Tensor) else output[0]


def path_of_last_leaf(config: Any) -> tuple[int, ...] | None:
    """The path of the last leaf of the tree that memories fetch blocks by; None where none do."""
    banks = config.memories().banks if getattr(config, "memory", None) else {}
    for layout in banks.values():
        return layout.blocks.path(layout.blocks.nodes(layout.num_levels) - 1)
    return None


def inputs_of_memories(stack: Any, path: tuple[int, ...] | None, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What memories of a model ask of a pass beside its tokens; nothing where there are none that ask.

    Args:
        stack: The model's stack of layers.
        path: Whose blocks all rows fetch; None where nothing is fetched.
        tokens: `[B, T, ...]`, ids or hidden states, of which the first half is taken for a prompt.
    """
    batch, length = tokens.shape[:2]
    asked = {} if path is None else {"memory_ids": torch.tensor([path] * batch)}
    if "prompt_mask" in getattr(stack, "memory_input_names", ()):
        asked["prompt_mask"] = (torch.arange(length) < length // 2).expand(batch, -1)  # [B, T]
    return asked


class _StoredWeights(Mapping[str, torch.Tensor]):
    """Tensors by the names that the model has for them, read anew each time they are asked for."""

    def __init__(self, places: dict[str, StoredTensor]):
        self._places = places

    def __getitem__(self, name: str) -> torch.Tensor:
        return read_tensor(self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_tensor(place: StoredTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Read a stored tensor; what is stored as integers stays so.

    Args:
        place: Where it is.
        dtype: To cast it to. Default: that which it is stored in.

    It is read, not mapped: a mapping takes address space for a whole file, and a product may round otherwise where its
    factors lie at another alignment.

    Raises:
        OSError: If the file ends early.
    """
    assert place.file is not None
    names = TORCH_NAMES | INTEGER_NAMES
    tensor = torch.empty(place.shape, dtype=getattr(torch, names[place.dtype]))
    unread = tensor.view(-1).view(torch.uint8).numpy().data
    with place.file.open("rb", buffering=0) as file:
        file.seek(place.start)
        while unread:
            num_bytes = file.readinto(unread)
            if not num_bytes:
                raise OSError(f"{place.file.name} ended {len(unread)} bytes early")
            unread = unread[num_bytes:]
    return tensor if dtype is None or place.dtype in INTEGER_NAMES else tensor.to(dtype)


def _places(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Where each parameter and buffer of the model is stored: by its name, without the stack's prefix, or as what it is tied to."""
    held = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names_of.setdefault(id(tensor), []).append(name)
    places, wrong = {}, []
    for name, tensor in held.items():
        tied = (name, *names_of[id(tensor)])
        known = (known for other in tied for known in (other, other.removeprefix(f"{model.base_model_prefix}.")))
        place = next((tensors[other] for other in known if other in tensors), None)
        if place is None:
            wrong.append(name)
        elif place.shape != tuple(tensor.shape):
            wrong.append(f"{name} as {list(tensor.shape)}, which is {list(place.shape)}")
        else:
            places[name] = place
    if wrong:
        raise VerificationError(
            f"the model loads without {', '.join(wrong[:_NAMED])}; expected every tensor in its place."
        )
    return places


def _fill_buffers_outside_checkpoints(model: Any) -> None:
    """Give rotary frequencies and the like their values as transformers does when it loads: by the family's own initialiser."""
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if names:
            model._init_weights(module)

"""Whether an upscaled model computes the same as its base, with one module's weights in memory."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.hooks import attach_align_device_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import midus_hf  # noqa: F401 - registers the classes
from midus_hf.anatomy.types import MAIN_TYPES
from midus_hf.config.errors import RequestError, first_few
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.memories.hosting.layer import get_hidden_states
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.saved_models import auto_class_of
from midus_hf.models.view import temporary_hooks
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor, read_tensor
from upscalers.plan import Base, Plan
from upscalers.record.provenance import Identity
from upscalers.request import Progress, VerificationError, one_line

_BATCH, _TOKENS = 2, 64
_ROWS_AT_ONCE = 16


class RunningModel:
    """A checkpoint's language model in eval mode; memories that fetch blocks fetch those of `path`."""

    def __init__(self, model: Any, path: tuple[int, ...] | None):
        self._model = model
        self._path = path
        self._stack = decoder_of(model)
        self.vocab_size: int = model.config.get_text_config().vocab_size

    def logits(
        self,
        tokens: torch.Tensor,
        see: Callable[[int, torch.Tensor], None],
        entering: Mapping[int, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits `[B, T, V]`; `see` gets i and the stream after the i-th layer, 0 before all."""
        layers = self._stack.layers
        embedding = self._model.get_input_embeddings()
        with temporary_hooks() as hold, torch.no_grad():
            # Llama 4 moves ids to its embedding's device, the meta device until the embedding is called.
            hold(embedding.register_forward_pre_hook(lambda _, inputs: (tokens,) if inputs[0].is_meta else None))
            hold(layers[0].register_forward_pre_hook(lambda _, inputs: see(0, inputs[0])))
            for index, stream in (entering or {}).items():
                hold(layers[index].register_forward_pre_hook(lambda _, inputs, stream=stream: (stream, *inputs[1:])))
            for number, layer in enumerate(layers, 1):
                hold(
                    layer.register_forward_hook(lambda *call, number=number: see(number, get_hidden_states(call[-1])))
                )
            fetched = {} if self._path is None else {"memory_ids": torch.tensor([self._path] * len(tokens))}
            return self._model(tokens, use_cache=False, **fetched).logits


class LoadedModel(RunningModel):
    """A language model with all weights in memory, for types whose tensors transformers converts."""

    def __init__(self, folder: Path, dtype: torch.dtype):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        loading: Any = auto_class_of(config).from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
        )
        model, loaded = loading
        _check_complete(sorted([*loaded["missing_keys"], *(name for name, *_ in loaded["mismatched_keys"])]))
        super().__init__(model.eval(), _path_of_last_leaf(model.config.get_text_config()))


class StreamedModel(RunningModel):
    """A language model, perhaps of a composite model, with the weights of one module in memory."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype):
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = whole.get_text_config()
        if config is not whole:
            config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        _fill_buffers_outside_checkpoints(model)
        super().__init__(model.eval(), _path_of_last_leaf(config))
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


def _path_of_last_leaf(config: Any) -> tuple[int, ...] | None:
    banks = block_layouts(config.memories()) if getattr(config, "memory", None) else {}
    layout = next(iter(banks.values()), None)
    return None if layout is None else layout.blocks.path(layout.blocks.nodes(layout.num_levels) - 1)


class _StoredWeights(dict[str, StoredTensor]):
    """Tensors by their names in the model, read again at each access."""

    def __getitem__(self, name: str) -> Any:
        return read_tensor(super().__getitem__(name))


def _places(model: Any, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the stored tensor for each name in a model's state; refuse missing and misshapen ones."""
    held = model.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names_of.setdefault(id(tensor), []).append(name)
    places = {}
    wrong = []
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
    _check_complete(wrong)
    return places


def _check_complete(wrong: list[str]) -> None:
    if wrong:
        raise VerificationError(f"the model loads without {first_few(wrong)}; expected every tensor in its place.")


def _fill_buffers_outside_checkpoints(model: Any) -> None:
    """Fill buffers that no checkpoint has, such as rotary frequencies, by the family's initialiser."""
    for module in model.modules():
        names = [name for name in module._non_persistent_buffers_set if module._buffers[name] is not None]
        for name in names:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if names:
            model._init_weights(module)
    for stack in model.modules():  # some families fill buffers of their parts from the stack
        if isinstance(stack, PreTrainedModel):
            model._init_weights(stack)


class _Mismatch(NamedTuple):
    """The first hidden state that differs: before layer `number`, or after the last; and by how much."""

    number: int
    difference: float


def compare_models(
    base: BaseCheckpoint,
    folder: Path,
    tensors: Mapping[str, StoredTensor],
    plan: Plan,
    dtype: str,
    identity: bool,
    progress: Progress,
) -> tuple[Identity, float | None]:
    """Run both models on a fixed batch, and compare their logits, and hidden states if promised."""
    torch_dtype = getattr(torch, TORCH_NAMES[dtype])
    replays = [] if identity or base.family.model_type in MAIN_TYPES else _replays(plan)
    steps = base.num_layers * (1 + len(replays)) + plan.num_layers + 2
    progress.stage("comparing with the base", steps, "layers and heads")
    tokens, base_logits, hidden_states = _run_base(base, torch_dtype, identity, progress)
    progress.advance()
    base_is_finite = all(bool(values.isfinite().all()) for values in (*hidden_states, base_logits))
    expected = hidden_states if identity and base_is_finite else None
    running = partial(_running, base, folder, tensors, torch_dtype)
    new_logits, mismatch, new_streams = _run_result(running, tokens, plan, expected, bool(replays), progress)
    equal = _are_same(base_logits, new_logits)
    if identity and (mismatch is not None or not equal):
        raise _not_identical(base_logits, new_logits, mismatch, plan)
    broken = ~base_logits.isfinite()
    if (~new_logits.isfinite() & ~broken).any():
        raise VerificationError(
            "the upscaled model's logits are NaN or infinite where the base's are finite; expected finite ones. Choose another "
            "--dtype or method."
        )
    divergence = 0.0 if equal else _divergence(base_logits, new_logits)
    base_logits, new_logits = base_logits.masked_fill_(broken, 0), new_logits.masked_fill_(broken, 0)
    largest = 0.0 if equal else _largest_difference(base_logits, new_logits)
    progress.advance()
    if replays:
        again = _running(base, base.folder, base.tensors, torch_dtype)
        for replay in replays:
            _compare_layers(again, tokens, replay, new_streams, plan, progress)
    if broken.all():
        progress.warn("every logit of the base is NaN or infinite, so nothing was compared.")
        return Identity(None, None), None
    stored = TORCH_NAMES[base.dtype]
    run_in = TORCH_NAMES[dtype]
    sides = f"base and result in {stored}"
    if stored != run_in:
        sides = f"base rounded from {stored} to {run_in}, result in {run_in}"
    return Identity("logits", largest, sides), divergence


def _run_base(
    base: BaseCheckpoint, dtype: torch.dtype, keeps_states: bool, progress: Progress
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Run the base on random tokens; return tokens, logits, and hidden states if they are kept."""
    hidden_states: list[torch.Tensor] = []

    def remember(number: int, hidden: torch.Tensor) -> None:
        if keeps_states:
            hidden_states.append(hidden)
        if number:
            progress.advance()

    try:
        model = _running(base, base.folder, base.tensors, dtype)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.vocab_size, (_BATCH, _TOKENS), generator=generator)
        return tokens, model.logits(tokens, remember).flatten(0, 1), hidden_states
    except Exception as error:
        raise RequestError(
            f"transformers cannot run the base ({type(error).__name__}: {one_line(error)}). Repair it or download it again; if "
            "it just does not fit in memory, pass --no-verify."
        ) from None


def _run_result(
    running: Callable[[], RunningModel],
    tokens: torch.Tensor,
    plan: Plan,
    expected: list[torch.Tensor] | None,
    keeps_streams: bool,
    progress: Progress,
) -> tuple[torch.Tensor, _Mismatch | None, list[torch.Tensor]]:
    """Run the result; return logits, the first layer that differs from the base, and kept streams."""
    streams: list[torch.Tensor] = []
    mismatches: list[_Mismatch] = []
    base_depths = [0]  # how many base layers the residual stream has passed before each layer, and after the last
    for layer in plan.layers:
        base_depths.append(layer.index + 1 if isinstance(layer, Base) else base_depths[-1])

    def follow(number: int, hidden: torch.Tensor) -> None:
        # NaN and infinite values spread to later tokens, and sooner by new layers: only predictions can be compared then.
        if expected is not None and not mismatches:
            wanted = expected[base_depths[number]]
            if not _are_same(wanted, hidden):
                mismatches.append(_Mismatch(number, _largest_difference(wanted, hidden)))
        if keeps_streams:
            streams.append(hidden)
        if number:
            progress.advance()

    try:
        logits = running().logits(tokens, follow).flatten(0, 1)
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(
            f"transformers cannot run the upscaled model ({type(error).__name__}: {one_line(error)}). If it just does not fit in "
            "memory, pass --no-verify."
        ) from None
    return logits, next(iter(mismatches), None), streams


def _not_identical(
    base_logits: torch.Tensor, new_logits: torch.Tensor, mismatch: _Mismatch | None, plan: Plan
) -> VerificationError:
    if mismatch is not None and _are_same(base_logits, new_logits):
        compared = "hidden states"
        difference = mismatch.difference
    else:
        compared = "logits"
        difference = _largest_difference(base_logits, new_logits)
    position = "after the last layer" if mismatch is None else "in the embedding"
    if mismatch is not None and mismatch.number:
        position = f"in layer {mismatch.number - 1} ({plan.describe(mismatch.number - 1)})"
    return VerificationError(
        f"the upscaled model's {compared} differ from the base's by up to {difference:g}; expected a difference of exactly 0. "
        f"They first differ {position}."
    )


def _replays(plan: Plan) -> list[dict[int, int]]:
    """Return maps of base layers to copies in the result, as many as a layer has copies."""
    passes: list[dict[int, int]] = []
    for index, layer in enumerate(plan.layers):
        if isinstance(layer, Base):
            replay = next((each for each in passes if layer.index not in each), None)
            if replay is None:
                passes.append(replay := {})
            replay[layer.index] = index
    return passes


def _compare_layers(
    model: RunningModel,
    tokens: torch.Tensor,
    replay: Mapping[int, int],
    streams: list[torch.Tensor],
    plan: Plan,
    progress: Progress,
) -> None:
    """Refuse a base layer that computes differently at its place in the result from the same input."""

    def compare(number: int, hidden: torch.Tensor) -> None:
        if number == 0:
            return
        progress.advance()
        index = replay.get(number - 1)
        if index is not None and not _are_same(streams[index + 1], hidden):
            raise VerificationError(
                f"layer {index} ({plan.describe(index)}) computes differently than base layer {number - 1}, by up to "
                f"{_largest_difference(streams[index + 1], hidden):g}; expected the same bits for the same input. The layers of this "
                "type cannot move; choose a method that adds no layer."
            )

    model.logits(tokens, compare, {layer: streams[index] for layer, index in replay.items()})


def _running(
    base: BaseCheckpoint, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype
) -> RunningModel:
    """Return a running model of the base's family, streamed unless transformers converts its tensors."""
    if base.layout.is_converted:
        return LoadedModel(folder, dtype)
    return StreamedModel(folder, tensors, dtype)


def _are_same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    chunks = [(first.double() - second.double()).abs().max() for first, second in _rows(left, right)]
    return torch.stack(chunks).max().item()


def _divergence(left: torch.Tensor, right: torch.Tensor) -> float | None:

    def of_rows(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        finite = first.isfinite().all(-1) & second.isfinite().all(-1)
        first, second = first[finite].double().log_softmax(-1), second[finite].double().log_softmax(-1)
        return (first.exp() * (first - second)).sum(-1)

    divergences = torch.cat([of_rows(*rows) for rows in _rows(left, right)])
    return divergences.mean().item() if len(divergences) else None


def _rows(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(left.flatten(0, -2).split(_ROWS_AT_ONCE), right.flatten(0, -2).split(_ROWS_AT_ONCE), strict=True)

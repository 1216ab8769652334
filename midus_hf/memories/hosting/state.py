"""State that a memory keeps of a sequence between forward passes, in the cache of the model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from midus_hf.config.errors import RequestError
from midus_hf.memories.module import MemoryModule
from midus_hf.ops.dispatch.private_torch import keep_address

# Function that returns a state's tensors without so many last tokens, or None if they do not reach back so far.
Rollback = Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor] | None]

# Tokens that assisted decoding may take back at once, for which a state keeps earlier tokens.
SPARE_TOKENS = 64


def without_last(kept: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor] | None:
    """Return a state's tensors `[B, tokens, ...]` without the last tokens; None if they are too few.

    Among the tensors `kept` is also `spare`, `[B]`, int64: how many tokens can be taken back.
    """
    if count > int(kept["spare"].min()):
        return None
    after = {"spare": kept["spare"] - count}
    for name in kept.keys() - after.keys():
        after[name] = torch.cat([torch.zeros_like(kept[name][:, :count]), kept[name][:, :-count]], 1)
    return after


def text_order(real: torch.Tensor | None, continues: bool) -> torch.Tensor | None:
    """Return indices of tokens as they follow one another, `[B, T]`, padding last; None for no change.

    Args:
        real: `[B, T]`, bool, false for padding. None: no padding.
        continues: Whether there are tokens before the pass.
    """
    if real is None or real.shape[1] == 1:
        return None
    order = real.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
    if torch.compiler.is_compiling():
        return order
    is_split = real[:, 1:] > real[:, :-1]  # a token after padding
    if not continues:
        is_split = is_split & (real[:, :-1].cumsum(1) > 0)
    return order if bool(is_split.any()) else None


def reordered(each: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return what tokens have, `[B, T, ...]`, by indices `[B, T]` of each row; None changes nothing."""
    return each if order is None else each[torch.arange(len(each), device=each.device)[:, None], order]


def latest_tokens(kept: torch.Tensor, is_real: torch.Tensor, count: int) -> torch.Tensor:
    """Return what is kept of the last `count` tokens that are no padding, or zeros where there are fewer.

    `kept` is `[B, S, ...]`, and `is_real`, bool, `[B, S]`.
    """
    up_to = is_real.long().cumsum(1)  # [B, S]
    numbers = up_to[:, -1:] + torch.arange(1 - count, 1, device=kept.device)
    found = reordered(kept, torch.searchsorted(up_to, numbers))
    return found * (numbers > 0).view(*numbers.shape, *(1,) * (kept.dim() - 2))


class MemoryState:
    """A memory's tensors in a layer, for a batch of sequences, in a cache after its `layers` of tokens.

    If it is croppable, `rollback` takes the last tokens out of the tensors; by default they do not depend on these.
    """

    # These keep transformers from treating it as a layer of tokens.
    is_compileable = True
    is_initialized = True
    supports_early_init = False
    keys = values = None

    def __init__(
        self, name: str, layer: int, is_croppable: bool, layers: Sequence[Any] = (), rollback: Rollback | None = None
    ):
        self.name, self.layer, self.is_croppable = name, layer, is_croppable
        # transformers makes a mask from the first layer of each kind, sliding or full: the state must not be the first of its kind.
        self.is_sliding = any(getattr(layer, "is_sliding", False) for layer in layers)
        self._first_layer, self._rollback = layers[0] if layers else None, rollback
        self._tensors: dict[str, torch.Tensor] = {}
        self._is_empty = True
        # Why tokens could not be taken back, after which the state is not to be read.
        self._refusal: str | None = None
        # What rows share, such as keys and values of texts that several have open.
        self.shared: dict[str, Any] = {}
        #: How often rows were selected or repeated, tokens taken back, or everything forgotten.
        self.changes = 0

    @property
    def kept(self) -> Mapping[str, torch.Tensor]:
        """The kept tensors by name, `[B, ...]`; empty at first. Refused if tokens cannot be taken back."""
        if self._refusal is not None:
            raise RequestError(self._refusal)
        return {} if self._is_empty else self._tensors

    def keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace kept tensors by name, equal shapes in place, since compiled steps need a fixed address."""
        for name, tensor in tensors.items():
            tensor = tensor.detach()
            there = self._tensors.get(name)
            if there is not None and there.shape == tensor.shape and there.dtype == tensor.dtype:
                there.copy_(tensor)
            else:
                self._tensors[name] = tensor.clone()
                if tensor.is_cuda and not torch.compiler.is_compiling():
                    keep_address(self._tensors[name])
        self._is_empty = self._is_empty and not tensors

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def reset(self) -> None:
        """Forget everything, so that another sequence can begin."""
        self._is_empty, self._refusal = True, None
        self.shared.clear()
        self.changes += 1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change_rows(lambda tensor: tensor.index_select(0, indices.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.changes += 1
        if not self._is_empty:
            self._tensors.update({name: change(tensor) for name, tensor in self._tensors.items()})

    def crop(self, tokens: int) -> None:
        """Take back the last tokens, or raise a `RequestError` if the state cannot be cropped."""
        if tokens != 0 and not self.is_croppable:
            error = crop_error(self.name)
            self._refusal = str(error)
            raise error
        if self._rollback is not None and tokens and not self._is_empty:
            left = self._rollback(self._tensors, abs(tokens))
            if left is None:
                self._refusal = (
                    f"{abs(tokens)} tokens are taken back, more than the memory {self.name!r} keeps for it; expected fewer. Draft "
                    "fewer tokens at a time (num_assistant_tokens)."
                )
                raise RequestError(self._refusal)
            self.changes += 1
            self.keep(left)  # in place, since compiled steps need fixed addresses

    def offload(self, *args: Any, **kwargs: Any) -> None:
        """Stay on the device, since the state is small."""

    def prefetch(self, *args: Any, **kwargs: Any) -> None:
        """Fetch the cache's first layer, which an offloading cache needs after its last."""
        if self._first_layer is not None:
            self._first_layer.prefetch(*args, **kwargs)


def crop_error(name: str) -> RequestError:
    """Return the error for cropping a state."""
    return RequestError(
        f"the memory {name!r} routes by all tokens before, and cannot take tokens back; expected decoding without "
        "an assistant or prompt lookup. Or upscale with routing = 'token'."
    )


def refuse_one_row(stateful: Iterable[tuple[str, int]], engine: str, instead: str) -> None:
    """Refuse memories with states in an engine with several requests in a row and no cache for states."""
    name = next((name for name, _ in stateful), "")
    if name:
        raise RequestError(
            f"{engine} lays the tokens of several requests in one row and keeps nothing for the memory {name!r}, which reads the "
            f"tokens before; expected {instead}, a memory that reads one token (moc with routing = 'token'), or a method without it."
        )


def starts_in_mask(
    shown: torch.Tensor, real: torch.Tensor | None, first: int, reaches_back: bool, name: str
) -> torch.Tensor | None:
    """Return where documents begin, `[B, T]`, by what tokens see, `[B, T, S]`; refuse branches."""
    # Column `first` is the pass's first token, which sees the last one in the cache if it `reaches_back`.
    at = torch.arange(shown.shape[1], device=shown.device)
    latest = at.expand(len(shown), -1) if real is None else torch.where(real, at, -1).cummax(1).values
    before = F.pad(latest[:, :-1], (1, 0), value=-1)  # the token before each, -1 for none in the pass
    follows = shown.gather(2, (first + before).clamp(min=0).unsqueeze(2)).squeeze(2)
    starts = ((before >= 0) | reaches_back) & ~follows & (True if real is None else real)
    if not bool(starts.any()):
        return None
    sees_any = (shown & (torch.arange(shown.shape[2], device=shown.device) < first + at[:, None])).any(2)
    if bool((starts & (sees_any | (before < 0))).any()):
        raise RequestError(
            f"attention_mask hides from a token the one before it and shows earlier ones, but the memory {name!r} reads the tokens "
            "before each; expected one text per row. Give each continuation its own row, and padding as token_mask."
        )
    return starts


def states_in(
    cache: Any, wanted: Mapping[tuple[str, int], MemoryModule], num_layers: int
) -> dict[tuple[str, int], MemoryState]:
    """Return wanted states in a transformers cache, by memory and layer; refuse a cache of another model."""
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list):
        raise RequestError(
            f"the cache is a {type(cache).__name__}, which cannot hold memory states; "
            "expected a cache of layers, such as DynamicCache or StaticCache."
        )
    states = {(state.name, state.layer): state for state in layers if isinstance(state, MemoryState)}
    if wanted.keys() <= states.keys():
        return states
    if cache.get_seq_length() > 0:
        raise RequestError(
            "the cache holds tokens, but not what the memories of this model keep of them; expected a cache that this model "
            "filled, or an empty one. Prefix tuning fills a cache of its own: tune a prompt instead (PEFT's PromptTuningConfig)."
        )
    while len(layers) < num_layers:  # a cache that adds each layer at the layer's first call
        layers.append(cache.layer_class_to_replicate())
    holding = layers[:num_layers]
    for (name, layer), memory in wanted.items():
        states[name, layer] = MemoryState(name, layer, memory.is_croppable, holding, memory.rollback)
        layers.append(states[name, layer])
    return states

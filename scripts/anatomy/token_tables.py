"""Tables with a row for each token, read from what a tiny model of a type does with the ids of tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from midus_hf.anatomy.types import TokenTables, UnknownType
from scripts.anatomy.tiny import tiny_model

_LENGTH, _CHANGE = 8, 4


def tables_read(model_type: str) -> TokenTables:
    """Return the tables of a type that ids index, and the config's keys for their sizes.

    Raises:
        UnknownType: If no tiny model of the type can be built or run.
    """
    model = tiny_model(model_type)
    sizes, tokens = _sizes(model), model.config.vocab_size
    keys = [
        key
        for key, value in vars(model.config).items()
        if "vocab_size" in key
        and (value is None or value == tokens)
        and _sizes(tiny_model(model_type, **{key: tokens + (_CHANGE if value else -_CHANGE)})) != sizes
    ]
    return TokenTables(tuple(keys), tuple(name for name in sizes if name))


def _sizes(model: Any) -> dict[str, int]:
    """Return the number of rows of each parameter that a pass reads by ids, by its name, and the width of the logits, by ""."""
    tokens = torch.randperm(model.config.vocab_size // 2, generator=torch.Generator().manual_seed(0))[None, :_LENGTH]
    try:
        with torch.no_grad(), _TablesRead(model, tokens) as read:
            logits = model(input_ids=tokens, use_cache=False).logits
    except Exception as error:  # models raise whatever their parts raise
        raise UnknownType(
            f"a pass through a tiny model of {model.config.model_type!r} fails ({type(error).__name__}: {error})."
        ) from None
    return {**read.rows, "": logits.shape[-1]}


class _TablesRead(TorchFunctionMode):
    """Records the parameters of a model that are given to a function together with the ids of tokens."""

    def __init__(self, model: Any, tokens: torch.Tensor):
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._tokens = tokens.flatten()
        #: Rows of each parameter by its name.
        self.rows: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(_tensors((*args, *(kwargs or {}).values())))
        named = [each for each in tensors if id(each) in self._names]
        if named and any(each.dtype == torch.int64 and torch.equal(each.flatten(), self._tokens) for each in tensors):
            self.rows |= {self._names[id(each)]: len(each) for each in named}
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)

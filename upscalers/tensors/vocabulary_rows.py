"""Tables with a row for each token: the rows of new tokens, and the tables as the base had them."""

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from midus_hf.anatomy.record import UpscaleRecord
from midus_hf.config.errors import RequestError
from upscalers.architecture.layer_tensors import Layout, Shape
from upscalers.architecture.layout import layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.computed_tensor import ComputedTensor, read_tensor
from upscalers.checkpoint.safetensors_format import TORCH_NAMES, StoredTensor
from upscalers.plan.plan import Plan
from upscalers.tensors.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from upscalers.tensors.recipes import ReadTensor

    ReadRows = Callable[[list[int]], torch.Tensor]


@dataclass(frozen=True)
class NewRows(Recipe):
    """Recipe that takes over the rows of the base tensor `source`, with new ones from the row `first` on.

    Each new row is the mean of the source's rows that its entry of `pieces` lists.
    """

    source: str
    first: int
    pieces: tuple[tuple[int, ...], ...]

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def rows(self, read: "ReadRows") -> "torch.Tensor":
        """Return the new rows, in float32; `read` reads rows of the source by their indices."""
        import torch

        return torch.stack([read(list(pieces)).float().mean(0) for pieces in self.pieces])

    def build(self, read: "ReadTensor") -> "torch.Tensor":
        raise AssertionError("the writer copies the source, and writes the new rows over it")


def new_rows_of(shape: Shape, name: str, ids: range, pieces: tuple[tuple[int, ...], ...]) -> NewRows:
    """Return the recipe of a table of the base with rows for new ids; each of their `pieces` names rows to take the mean of.

    A table that is shorter than the ids reach gets the row of the id 0 in between, as of the pieces that it has no row of.
    """
    held = shape[0]
    between = ((0,),) * max(0, ids.start - held)
    within = tuple(tuple(each if each < held else 0 for each in of_token) for of_token in pieces)
    return NewRows((max(held, ids.stop), *shape[1:]), name, min(held, ids.start), between + within)


def token_sizes(model: BaseCheckpoint) -> dict[str, int]:
    """Return the keys of a config by which tables have a row for each token, with their values."""
    values = {key: model.config.get(key, model.layout.values.get(key)) for key in model.family.tables.keys}
    return {key: value for key, value in values.items() if value is not None}


def rows_by_token(model: BaseCheckpoint) -> list[str]:
    """Return the full names of the tensors that have a row for each token.

    These are the tables that the model reads by ids, the head, also one that is tied and stored too, and tables that are stored for
    layers that predict further tokens, which Transformers does not load.

    Raises:
        RequestError: If such a tensor cannot grow by rows.
    """
    sizes = token_sizes(model)
    grown = layout_of({**model.config, **{key: size + 1 for key, size in sizes.items()}})
    before, after = _outer_shapes(model, model.layout), _outer_shapes(model, grown)
    found = [name for name, shape in before.items() if name in model.tensors and after[name] != shape]
    for name in found:
        shape = before[name]
        if shape[0] not in sizes.values() or after[name][1:] != shape[1:] or name in model.packed:
            listed = " and ".join(f"{key} = {size}" for key, size in sizes.items())
            raise RequestError(
                f"{name} is {list(shape)} in the base, with {listed}; expected a row of weights for each token, and no other, not "
                "quantised. Choose another base."
            )
    for name in (_own_name(model, full) for full in model.family.tables.inputs):
        if name not in found:
            raise RequestError(
                f"models of the type {model.family.model_type!r} read {name} by the ids of tokens, and no key of the config says how "
                "many rows it has; expected tables that can grow. Choose another base."
            )
    return found + _predicting_tables(model, found)


def _predicting_tables(model: BaseCheckpoint, found: list[str]) -> list[str]:
    """Return the stored tables by token that are not in the model's layout; refuse ones that are quantised."""
    names = [
        name
        for name in model.unexpected
        if model.tensors[name].shape in {model.tensors[other].shape for other in found}
    ]
    packed = [name for name in names if name in model.packed or model.tensors[name].dtype not in TORCH_NAMES]
    if packed:
        raise RequestError(
            f"{packed[0]} is stored as {model.tensors[packed[0]].dtype}, with a row for each token; expected rows of weights, not "
            "quantised. Choose another base."
        )
    return names


def _outer_shapes(model: BaseCheckpoint, layout: Layout) -> dict[str, Shape]:
    """Return the shapes of the tensors outside the layers in a layout, by the full names that they have in a model."""
    return {_own_name(model, full): shape for full, shape in (layout.outer | layout.tied).items()}


def _own_name(model: BaseCheckpoint, full: str) -> str:
    return full if model.prefix else full.removeprefix("model.")


def replaced_rows(base: BaseCheckpoint, plan: Plan, names: list[str]) -> dict[str, list[str]]:
    """Return the rows of the base that new tokens replace, `[dtype, bytes]` by the name of their tensor; compressed, in base 64."""
    import torch

    kept = {}
    for name in names:
        if plan.new_rows.start < base.tensors[name].shape[0]:
            rows = read_tensor(base.tensors[name])[plan.new_rows.start : plan.new_rows.stop].contiguous()
            data = zlib.compress(rows.view(-1).view(torch.uint8).numpy().tobytes())
            kept[name] = [base.tensors[name].dtype, base64.b64encode(data).decode("ascii")]
    return kept


@dataclass(frozen=True)
class _RowsOfBase(ComputedTensor):
    """The first rows of a stored tensor, with some of them as they were."""

    first: int = 0
    replaced: bytes = b""
    replaced_dtype: str = "F32"

    def read(self) -> "torch.Tensor":
        import torch

        rows = read_tensor(self.in_file)[: self.shape[0]].clone()
        dtype = getattr(torch, TORCH_NAMES[self.replaced_dtype])
        kept = torch.frombuffer(bytearray(self.replaced), dtype=dtype).view(-1, *self.shape[1:])
        rows[self.first : self.first + len(kept)] = kept.to(rows.dtype)
        return rows


def with_rows_of_base(model: BaseCheckpoint, plan: Plan, upscaled: UpscaleRecord) -> BaseCheckpoint:
    """Return a model, whose last upscaling added the tokens that the record names, with the base's rows alone."""
    if not plan.new_rows:
        return model
    replaced = upscaled.replaced_rows
    of_base = _outer_shapes(model, layout_of(dict(upscaled.base_config)))
    tensors: dict[str, StoredTensor] = dict(model.tensors)
    for name in rows_by_token(model):
        stored = tensors[name]
        size = of_base[name][0] if name in of_base else upscaled.base_config["vocab_size"]
        if stored.shape[0] < size:
            raise RequestError(
                f"the vocabulary was resized to {stored.shape[0]:,} tokens since it was upscaled, fewer than the base's {size:,}; "
                "expected its rows. Take the checkpoint from before."
            )
        shape = (size, *stored.shape[1:])
        if name not in replaced:
            tensors[name] = replace(stored, shape=shape)
            continue
        try:
            dtype, text = replaced[name]
            data = zlib.decompress(base64.b64decode(text))
            count = len(range(plan.new_rows.start, min(plan.new_rows.stop, size)))
            is_sound = dtype in TORCH_NAMES and len(data) == StoredTensor(dtype, (count, *shape[1:])).num_bytes
        except (ValueError, TypeError, LookupError, zlib.error):
            is_sound = False
        if not is_sound:
            raise RequestError(
                f"config.json has replaced_rows (in upscale) for {name} that are not what upscale wrote; expected these. Restore "
                "the config that it wrote."
            )
        tensors[name] = _RowsOfBase(
            stored.dtype, shape, weight=stored, first=plan.new_rows.start, replaced=data, replaced_dtype=dtype
        )
    return replace(model, tensors=tensors)

"""Rows of the embedding and the head for new tokens, and these tensors as the base had them."""

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from upscalers.architecture.family import Config
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

# Key of a config's entry: rows of the base that new tokens replaced, by the name of their tensor, with their dtype.
REPLACED_KEY = "replaced_rows"


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


def rows_by_token(model: BaseCheckpoint) -> list[str]:
    """Return the full names of the tensors that have a row for each token: embedding, head, and a tied head that is stored too."""
    resized = layout_of({**model.config, "vocab_size": model.config["vocab_size"] + 1})
    before, after = (layout.outer | layout.tied for layout in (model.layout, resized))
    found = []
    for full, shape in before.items():
        name = full if model.prefix else full.removeprefix("model.")
        if name not in model.tensors or after[full] == shape:
            continue
        if after[full][1:] != shape[1:] or name in model.packed:
            raise ValueError(
                f"{name} is {list(shape)} in the base; expected a row of weights for each token, not quantised. Choose another base."
            )
        found.append(name)
    return found


def replaced_rows(base: BaseCheckpoint, plan: Plan, names: list[str]) -> dict[str, list[str]]:
    """Return the rows of the base that new tokens replace, `[dtype, bytes]` by the name of their tensor; compressed, in base 64."""
    import torch

    kept = {}
    for name in names if plan.new_rows.start < base.config["vocab_size"] else ():
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


def with_rows_of_base(model: BaseCheckpoint, plan: Plan, entry: Config) -> BaseCheckpoint:
    """Return a model, whose last upscaling added the tokens that the config's `entry` names, with the base's rows alone."""
    if not plan.new_rows:
        return model
    size, replaced = entry["base_config"]["vocab_size"], entry.get(REPLACED_KEY) or {}
    if model.config["vocab_size"] < size:
        raise ValueError(
            f"the vocabulary was resized to {model.config['vocab_size']:,} tokens since it was upscaled, fewer than the base's "
            f"{size:,}; expected its rows. Take the checkpoint from before."
        )
    tensors: dict[str, StoredTensor] = dict(model.tensors)
    for name in rows_by_token(model):
        stored = tensors[name]
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
            raise ValueError(
                f"config.json has replaced_rows (in upscale) for {name} that are not what upscale wrote; expected these. Restore "
                "the config that it wrote."
            )
        tensors[name] = _RowsOfBase(
            stored.dtype, shape, weight=stored, first=plan.new_rows.start, replaced=data, replaced_dtype=dtype
        )
    return replace(model, tensors=tensors)

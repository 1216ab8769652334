"""What memories that read the depth are called with, told while a model reads."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.analysis.depth.readers import DepthReader, readers_of_depth
from midus_hf.memory.routing.token_places import token_places
from midus_hf.ops.depth.op import joint_shares
from midus_hf.ops.dispatch.private_torch import is_in_backward


class DepthCall(NamedTuple):
    """One attention to the sequence and the depth.

    Args:
        memory: That attends.
        query: `[B, H, T, d]`.
        given: What it is called with beside queries, by keyword.
        real: `[B, T]`, false for padding; None if no token is padding.
    """

    memory: Any
    query: torch.Tensor
    given: Mapping[str, Any]
    real: torch.Tensor | None

    def shares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what each slot gets, `[B, H, T, n]`, and what the sequence gets, `[B, H, T]`, as `joint_shares` does."""
        sequence, gate = self.given["sequence"], self.memory.gate
        return joint_shares(
            *(self.query, self.given["keys"], sequence.log_sum(), sequence.scaling, sequence.softcap),
            *(None if gate is None else gate[:, None], self.memory.is_added),
        )


Watcher = Callable[[DepthReader, DepthCall], None]


@contextlib.contextmanager
def watch_depth(model: nn.Module, memory: str | None, watcher: Watcher) -> Iterator[None]:
    """Call a function behind each attention to the depth, without gradients, while the context is open.

    Args:
        model: As for `readers_of_depth`. It has hooks more while the context is open.
        memory: Name of one of several memories that read the depth; None for all.
        watcher: What is called.

    Raises:
        ValueError: As `readers_of_depth`.
    """
    bare: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    real: list[torch.Tensor | None] = [None]

    def before(decoder: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        real[0] = _real_tokens(arguments, given)

    def behind_of(reader: DepthReader) -> Callable[..., None]:
        def behind(memory: Any, arguments: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            if "sequence" not in given or not arguments[0].numel() or is_in_backward():
                return
            with torch.no_grad():
                watcher(reader, DepthCall(memory, arguments[0], given, real[0]))

        return behind

    handles: list[Any] = []
    try:
        handles.append(bare.get_decoder().register_forward_pre_hook(before, with_kwargs=True))
        for reader in readers_of_depth(model, memory):
            for module in reader.modules:
                handles.append(module.register_forward_hook(behind_of(reader), with_kwargs=True))
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _real_tokens(arguments: tuple[Any, ...], given: Mapping[str, Any]) -> torch.Tensor | None:
    """`[B, T]`, which tokens of a pass are no padding; None if all are."""
    named = {**dict(zip(("input_ids", "attention_mask"), arguments, strict=False)), **given}
    tokens = named.get("input_ids")
    tokens = named["inputs_embeds"] if tokens is None else tokens
    mask = named.get("token_mask")
    mask = named.get("attention_mask") if mask is None else mask
    return token_places(mask, None, tokens.shape[1], may_hold_documents=False).real

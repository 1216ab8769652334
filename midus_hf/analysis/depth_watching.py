"""What memories that read the depth are called with, told while a model reads."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.analysis.depth_readers import DepthReader, readers_of_depth
from midus_hf.memory.retrieval import recomputing
from midus_hf.memory.token_places import token_places
from midus_hf.ops.depth_attention import depth_shares, joint_shares


class DepthCall(NamedTuple):
    """One attention to the sequence and the depth.

    Args:
        memory: That attends.
        query: `[B, H, T, d]`.
        given: What it is called with beside queries, by keyword.
        real: `[B, T]`, false for padding; None if no token is padding.
        numbers: `[B, T, n]`, which of the reader's slots each slot is, if tokens keep different ones.
    """

    memory: Any
    query: torch.Tensor
    given: Mapping[str, Any]
    real: torch.Tensor | None
    numbers: torch.Tensor | None

    def shares(self, reader: DepthReader) -> torch.Tensor:
        """What each of the reader's slots gets in one softmax with the sequence, `[B, H, T, m]`."""
        sequence, keys = self.given["sequence"], self.given["keys"]
        weight, mixing = (
            None if part is None else part[:, None] for part in (self.memory.weight, self.memory.mixing)
        )  # [H, 1]
        shares = joint_shares(self.query, keys, sequence.log_sum(), sequence.scaling, sequence.softcap, weight, mixing)
        return reader.by_slot(shares, self.numbers)

    def kept_numbers(self) -> torch.Tensor:
        """Which of the reader's slots are kept for the next layer, `[B, T, c]`: the memory chooses once more, among numbers."""
        assert self.numbers is not None, "a memory that keeps slots chooses among numbers"
        sequence = self.given["sequence"]
        shares = depth_shares(self.query, self.given["keys"], sequence.scaling, sequence.softcap)
        numbers = [number[:, None, :, None] for number in self.numbers.unbind(-1)]  # n of [B, 1, T, 1]
        kept, _, _ = self.memory.kept(numbers, numbers, shares, self.given["utilities"])
        return kept[:, 0, :, :, 0]


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
    kept: dict[str, torch.Tensor] = {}  # by memory, what its last layer kept: [B, T, c]

    def before(decoder: Any, arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        real[0] = _real_tokens(arguments, given)
        kept.clear()

    def behind_of(reader: DepthReader) -> Callable[..., None]:
        def behind(memory: Any, arguments: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            if "sequence" not in given or not arguments[0].numel() or recomputing():
                return
            with torch.no_grad():
                numbers = _numbers(reader, len(given["keys"]), kept.pop(reader.name, None), arguments[0])
                call = DepthCall(memory, arguments[0], given, real[0], numbers)
                watcher(reader, call)
                if given["keeps"]:
                    kept[reader.name] = call.kept_numbers()

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


def _numbers(
    reader: DepthReader, num_read: int, kept: torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """Which of the reader's slots those are that tokens read, `[B, T, n]`: kept ones, and behind them the newest."""
    if not reader.chooses:
        return None
    num_kept, total = 0 if kept is None else kept.shape[-1], len(reader.slots)
    newest = torch.arange(total - num_read + num_kept, total, device=query.device)
    newest = newest.expand(query.shape[0], query.shape[2], -1)
    return newest if kept is None else torch.cat([kept.to(query.device), newest], dim=-1)


def _real_tokens(arguments: tuple[Any, ...], given: Mapping[str, Any]) -> torch.Tensor | None:
    """`[B, T]`, which tokens of a pass are no padding; None if all are."""
    named = {**dict(zip(("input_ids", "attention_mask"), arguments, strict=False)), **given}
    tokens = named.get("input_ids")
    tokens = named["inputs_embeds"] if tokens is None else tokens
    mask = named.get("token_mask")
    mask = named.get("attention_mask") if mask is None else mask
    return token_places(mask, None, tokens.shape[1], may_hold_documents=False).real

"""What tokens of a pass of vLLM read of packs, and attention to packs and its cache: in compiled C, or by PyTorch."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from midus_hf.memories.hosting.vllm import block_table_of_pass, read_blocks
from midus_hf.memories.packs.placing import OpenPacks, PackPart
from midus_hf.ops.paged_attention.native import (
    BlockLayout,
    ExtraKeys,
    ExtraReads,
    PreparedReads,
    native_paged_attention,
)

_MAX_TOKENS_AT_ONCE = 256


class Group(NamedTuple):
    """Neighbouring tokens of requests that read packs, as many of each: N requests, T' tokens."""

    opened: OpenPacks  # with a row for each
    part: PackPart  # whose `reads` and `bias` are those of these tokens
    extra: ExtraKeys | None  # the same keys and values for C, of one request
    requests: Sequence[int]  # numbers of the requests
    first: Sequence[int]  # number of the first token of each in the row of the pass
    places: Sequence[int]  # position of the first token of each

    def next_to(self, first: Sequence[int]) -> torch.Tensor:
        """Return numbers of tokens from the first of each request on, `[N, T']`."""
        device = self.part.reads.device
        return torch.tensor(first, device=device)[:, None] + torch.arange(self.part.reads.shape[1], device=device)


class OpenedParts:
    """Packs that requests read, of one request with `attentions` of the layers, for which keys are put in place for C."""

    def __init__(self, opened: OpenPacks, attentions: Sequence[Any] | None):
        self._opened = opened
        self._extra: list[ExtraKeys | None] = [None for _ in opened.parts]
        if attentions is not None:
            read = [opened.by_layer(part, attentions) for part in opened.parts]
            self._extra = [ExtraKeys((keys[0], values[0]) for keys, values in heads) for heads in read]

    def groups(
        self, requests: Sequence[int], first: Sequence[int], places: Sequence[int], num_tokens: int
    ) -> Iterator[Group]:
        """Yield tokens that read packs, few enough to attend at once, from the first token of each request on."""
        for part, extra in zip(self._opened.parts, self._extra, strict=True):
            begin, stop, _ = part.tokens.indices(num_tokens)
            for at in range(begin, stop, _MAX_TOKENS_AT_ONCE):
                within = slice(at - begin, min(at + _MAX_TOKENS_AT_ONCE, stop) - begin)
                bias = None if part.bias is None else part.bias[:, within]
                of_some = part._replace(reads=part.reads[:, within], bias=bias)
                starts = ([each + at for each in numbers] for numbers in (first, places))
                yield Group(self._opened, of_some, extra, requests, *starts)


class TorchReads:
    """What tokens of a pass read, for PyTorch."""

    def __init__(self, groups: Sequence[Group]):
        self._groups = groups

    def attend(self, output: torch.Tensor, query: torch.Tensor, index: int, module: Any, layout: BlockLayout) -> None:
        """Overwrite rows of the tokens in attention's output `[T, H d]`, from queries `[H, T, d]`.

        Args:
            output: Attention to the sequence.
            query: The queries.
            index: Number of the layer among those with packs.
            module: The layer's attention.
            layout: How its cache is laid out.
        """
        for group in self._groups:
            _attend(output, query, group, index, module, layout)


class NativeReads:
    """What tokens of a pass read, of one request in each group, for compiled C."""

    def __init__(self, groups: Sequence[Group]):
        self._parts = []
        for _, part, extra, (request,), (first,), (place,) in groups:
            assert extra is not None
            bias = None if part.bias is None else part.bias[0]
            self._parts.append(ExtraReads(extra, part.reads[0], bias, request, first, place))
        # By the address of the table of blocks, which layers with a window do not share with others.
        self._prepared: dict[int, PreparedReads] = {}

    def attend(self, output: torch.Tensor, query: torch.Tensor, index: int, module: Any, layout: BlockLayout) -> None:
        """Do what `TorchReads` does."""
        attention = module.attn
        table = block_table_of_pass(attention.layer_name)
        prepared = self._prepared.get(table.data_ptr())
        if prepared is None:
            prepared = self._prepared[table.data_ptr()] = PreparedReads(self._parts, table)
        native_paged_attention(
            output,
            query,
            prepared,
            index,
            attention.kv_cache,
            layout,
            attention.impl.scale,
            attention.sliding_window,
        )


def _attend(
    output: torch.Tensor, query: torch.Tensor, group: Group, index: int, module: Any, layout: BlockLayout
) -> None:
    """Overwrite rows of the tokens of a group; S keys of requests, and S' of packs."""
    attention, block_size = module.attn, layout.sizes[0]
    num_blocks = -(-(max(group.places) + group.part.reads.shape[1]) // block_size)
    table = block_table_of_pass(attention.layer_name)
    blocks = table[torch.tensor(group.requests, device=table.device), :num_blocks].long()
    keys, values = read_blocks(attention.kv_cache, layout, blocks)  # [N, n, K, tokens, d]
    place = torch.arange(num_blocks * block_size, device=query.device)
    tokens, positions = group.next_to(group.first), group.next_to(group.places)[..., None]
    # What else lies in the last block may be no number.
    is_there = place <= positions[:, -1]  # [N, S]
    values = torch.where(is_there.view(*blocks.shape, 1, -1, 1), values, 0)
    is_read = place <= positions  # [N, T', S]
    if attention.sliding_window is not None:
        is_read = is_read & (place > positions - attention.sliding_window)
    pack_keys, pack_values = group.opened.of(index, group.part, module)
    asked = query[:, tokens].transpose(0, 1).unflatten(1, (pack_keys.shape[1], -1)).flatten(2, 3)  # [N, K, G T', d]
    of_sequence = (asked[:, None] @ keys.transpose(-1, -2)).permute(0, 2, 3, 1, 4).flatten(3)  # [N, K, G T', S]
    scores = torch.cat([asked @ pack_keys.transpose(-1, -2), of_sequence], -1).float() * attention.impl.scale
    scores = scores.unflatten(2, (-1, tokens.shape[1]))  # [N, K, G, T', S' + S]
    num_slots = pack_keys.shape[2]
    if group.part.bias is not None:
        scores[..., :num_slots] += group.part.bias[:, None, None]
    is_read = torch.cat([group.part.reads, is_read], -1)[:, None, None]
    shares = scores.masked_fill(~is_read, float("-inf")).softmax(-1).flatten(2, 3).to(values.dtype)
    of_packs, of_sequence = shares[..., :num_slots], shares[..., num_slots:]
    of_sequence = of_sequence.unflatten(-1, (num_blocks, block_size)).permute(0, 3, 1, 2, 4)  # [N, n, K, G T', tokens]
    read = of_packs @ pack_values + (of_sequence @ values).sum(1)  # [N, K, G T', d]
    read = read.unflatten(2, (-1, tokens.shape[1])).permute(0, 3, 1, 2, 4).flatten(2)  # [N, T', H d]
    reads = group.part.reads.any(-1)
    output[tokens[reads]] = read[reads].to(output.dtype)

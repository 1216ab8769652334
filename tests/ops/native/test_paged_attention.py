"""Attention in C to extra keys and to blocks of a cache, by a loop over tokens in float64."""

import itertools

import pytest
import torch

from midus_hf.ops.paged_attention.native import (
    BlockLayout,
    ExtraKeys,
    ExtraReads,
    PreparedReads,
    native_paged_attention,
    native_refusal,
)

pytestmark = pytest.mark.usefixtures("library")

SCALE = 0.3
# Tokens of each part and position of its first, heads with keys, group, width, tokens of a block, window.
SIZES = [
    ([(1, 0), (1, 70), (1, 31)], 3, 3, 64, 32, None),
    ([(40, 5), (1, 9), (2, 0)], 2, 2, 20, 5, None),
    ([(37, 20), (1, 63)], 1, 5, 16, 8, 11),
    ([(3, 4)], 1, 40, 7, 4, None),
]


class Case:
    """Parts of requests, of which one token reads nothing, and numbers that are none beyond each request's tokens."""

    def __init__(self, parts, heads, group, width, block, window, dtype):
        self.window, self.dtype = window, dtype
        requests, num_blocks = len(parts), max(first + tokens for tokens, first in parts) // block + 1
        self.table = torch.randperm(requests * num_blocks).int().view(requests, num_blocks)
        self.keys = torch.randn(requests, num_blocks * block, heads, width).to(dtype)
        self.values = torch.randn(self.keys.shape).to(dtype)
        for request, (tokens, first) in enumerate(parts):
            self.values[request, first + tokens :] = torch.nan
            self.keys[request, first + tokens :] = torch.nan
        half = width * block
        self.cache = torch.empty(requests * num_blocks, heads, 2 * half, dtype=dtype)
        blocks = self.cache[self.table]  # [R, n, K, 2 half]
        blocks[..., :half] = self.keys.unflatten(1, (-1, block)).permute(0, 1, 3, 4, 2).flatten(3)
        blocks[..., half:] = self.values.unflatten(1, (-1, block)).transpose(2, 3).flatten(3)
        self.cache[self.table] = blocks
        self.layout = BlockLayout((block, heads, width), (0, 1, 2 * half, block), (half, width, 2 * half, 1))
        count = sum(tokens for tokens, _ in parts)
        self.query = torch.randn(count, heads * group, width).to(dtype).transpose(0, 1)
        self.output = torch.randn(count, heads * group * width).to(dtype)
        self.extra, self.reads, at = [], [], 0
        for request, (tokens, first) in enumerate(parts):
            extra = [[torch.randn(heads, 5 + request, width).to(dtype) for _ in range(2)] for _ in range(2)]
            reads = torch.rand(tokens, 5 + request) < 0.6
            reads[0] = tokens == 1
            self.extra.append(extra)
            bias = torch.randn(reads.shape) if request else None
            self.reads.append(ExtraReads(ExtraKeys(extra), reads, bias, request, at, first))
            at += tokens

    def attend(self, layer, output=None):
        output = self.output.clone() if output is None else output
        prepared = PreparedReads(self.reads, self.table)
        native_paged_attention(output, self.query, prepared, layer, self.cache, self.layout, SCALE, self.window)
        return output

    def expected(self, layer):
        output, heads = self.output.double(), self.keys.shape[2]
        for extra, (_, reads, bias, request, at, first) in zip(self.extra, self.reads, strict=True):
            for token, (head, query) in itertools.product(
                range(len(reads)), enumerate(self.query[:, at : at + len(reads)])
            ):
                if not reads[token].any():
                    continue
                kv_head, end = head * heads // len(self.query), first + token + 1
                own = slice(0 if self.window is None else max(0, end - self.window), end)
                added = 0 if bias is None else bias[token, reads[token]].double()
                keys, values = (part[kv_head][reads[token]].double() for part in extra[layer])
                scores = [keys @ query[token].double() * SCALE + added]
                scores.append(self.keys[request, own, kv_head].double() @ query[token].double() * SCALE)
                shares = torch.cat(scores).softmax(0)
                read = shares @ torch.cat([values, self.values[request, own, kv_head].double()])
                output[at + token].view(len(self.query), -1)[head] = read
        return output


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_tokens_attend_to_extra_keys_and_blocks(sizes, dtype, tolerance):
    torch.manual_seed(0)
    case = Case(*sizes, dtype)
    for layer in range(2):
        torch.testing.assert_close(case.attend(layer).double(), case.expected(layer), rtol=tolerance, atol=tolerance)


def test_tokens_that_read_no_extra_key_keep_their_bits():
    case = Case(*SIZES[1], torch.float32)
    unread = torch.cat([~part.reads.any(-1) for part in case.reads])
    output = case.attend(0)
    assert unread.any()
    assert torch.equal(output[unread], case.output[unread])
    assert not torch.equal(output[~unread], case.output[~unread])


def test_threads_and_other_requests_change_no_bit(threads):
    case = Case(*SIZES[0], torch.float32)
    outputs = []
    for number in (1, 2):
        threads(number)
        outputs.append(case.attend(1))
    assert torch.equal(*outputs)
    case.reads, first = case.reads[1:], case.attend(1)
    assert torch.equal(case.attend(1)[1:], first[1:])


def test_blocks_of_another_layout_are_refused():
    layout = BlockLayout((4, 2, 8), (0, 1, 64, 4), (32, 8, 64, 1))
    assert native_refusal(layout) is None
    by_token = layout._replace(keys=(0, 8, 64, 1))
    assert "expected such" in native_refusal(by_token)


def test_tensors_of_another_device_are_refused():
    case = Case(*SIZES[0], torch.float32)
    with pytest.raises(ValueError, match="output is on meta, and others are on cpu; expected one device"):
        case.attend(0, case.output.to("meta"))

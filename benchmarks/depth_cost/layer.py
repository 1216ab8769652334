"""A layer that reads the depth: the calls to time, and the right results."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.depth_cost.shapes import JOINED, KV_HEADS, WIDTH, Shape
from benchmarks.timing import Task
from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.ops.depth.joining import Depth
from midus_hf.ops.depth.op import depth_attention

Forward = Callable[[], torch.Tensor]


class Layer:
    """Random heads of one layer, and the calls that are timed on them."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype):
        self.shape, self.scaling, self.device = shape, WIDTH**-0.5, device
        generator = torch.Generator(device).manual_seed(0)

        def heads(count: int) -> torch.Tensor:
            drawn = torch.randn(1, shape.tokens, count, WIDTH, generator=generator, device=device)
            return drawn.to(dtype).transpose(1, 2).requires_grad_()

        self.query = heads(KV_HEADS * shape.group)
        self.key, self.value = heads(KV_HEADS), heads(KV_HEADS)
        self.keys, self.values = ([heads(KV_HEADS) for _ in range(shape.slots)] for _ in range(2))
        self.upstream = heads(KV_HEADS * shape.group).detach()

    @property
    def leaves(self) -> dict[str, list[torch.Tensor]]:
        """Tensors that get gradients, by what is read: the sequence, the depth or both."""
        sequence, slots = [self.query, self.key, self.value], [*self.keys, *self.values]
        return {"sequence": sequence, "depth": [self.query, *slots], "both": [*sequence, *slots]}

    def sequence(self, way: str) -> SequenceHeads:
        """Return attention to the sequence as in a model, by one of transformers' attention functions, such as `"sdpa"`."""
        module = SimpleNamespace(is_causal=True, num_key_value_groups=self.shape.group, training=True)
        mask = None
        if way == "flex_attention":
            tokens = self.shape.tokens
            compiled = torch.compile(create_block_mask)  # compiled, it never holds all pairs of tokens in memory
            made = compiled if self.device == "cuda" else create_block_mask
            mask = made(lambda b, h, t, s: t >= s, None, None, tokens, tokens, device=self.device)
        own = ALL_ATTENTION_FUNCTIONS[way]
        arguments = {"scaling": self.scaling}
        return SequenceHeads(module, own, way, self.query, self.key, self.value, mask, arguments)

    def alone(self) -> torch.Tensor:
        """Attend to the sequence alone, by the kernel that torch chooses."""
        heads = self.sequence("sdpa")
        return heads.own(heads.module, heads.query, heads.key, heads.value, None, **heads.arguments)[0].transpose(1, 2)

    def depth(self) -> torch.Tensor:
        """Attend to the depth alone."""
        return depth_attention(self.query, self.keys, self.values, self.scaling)[0]

    def merged(self, sequence: SequenceHeads) -> torch.Tensor:
        """Attend to the sequence, then to the depth, and join both results."""
        return sequence.joined(Depth(self.query, self.keys, self.values, self.scaling))[0].transpose(1, 2)

    def forward(self, what: str) -> Forward:
        """Return the forward pass of a way, by its name in `WHATS` or `JOINED`."""
        if what == "merged-flex":
            flex = self.sequence("flex_attention")
            return lambda: self.merged(flex)
        ways: dict[str, Forward] = {
            "sequence": _by_flash(self.alone),
            "usual": self.alone,
            "merged": lambda: self.merged(self.sequence("sdpa")),
            "merged-flash": _by_flash(lambda: self.merged(self.sequence("sdpa"))),
            "depth": self.depth,
        }
        return ways[what]

    def task(self, what: str) -> Task:
        """Return the task that runs both passes of a way; for `bound`, a copy of all slots."""
        if what == "bound":
            source = torch.empty(2 * self.shape.slots, *self.key.shape, dtype=self.key.dtype, device=self.device)
            target = torch.empty_like(source)
            return Task(lambda _: target.copy_(source))
        forward = self.forward(what)
        leaves = self.leaves["both" if what in JOINED else "depth" if what == "depth" else "sequence"]
        return Task(lambda _: torch.autograd.grad(forward(), leaves, self.upstream))

    @property
    def copies(self) -> float:
        """Bytes that the depth must read and write in both passes, over the bytes that a copy of all slots reads and writes."""
        slots, heads = 2 * self.shape.slots * KV_HEADS, KV_HEADS * self.shape.group
        forward = slots + 2 * heads  # slots, queries and the output
        backward = 2 * slots + 4 * heads  # the same and their gradients
        return (forward + backward) / (2 * slots)

    @property
    def chosen_kernel(self) -> str:
        """Name of the kernel that torch chooses for attention to the sequence."""
        arguments = (self.query, self.key, self.value, None, 0.0, True)
        return SDPBackend(torch._fused_sdp_choice(*arguments, scale=self.scaling, enable_gqa=True)).name

    def error(self, what: str) -> float:
        """Return the largest RMS ratio, error to right result, of a way that reads both; infinity for NaN.

        The right results are computed in float64 for the first, the middle and the last token: the output, the
        gradients of queries and slots, to which no other token contributes, and the gradients of the last key and
        value, which only the last token reads.
        """
        tokens = sorted({0, self.shape.tokens // 2, self.shape.tokens - 1})
        expected = self._exact(tokens)
        output = self.forward(what)()
        of_query, of_key, of_value, *of_slots = torch.autograd.grad(output, self.leaves["both"], self.upstream)
        computed = [output.detach(), of_query, of_key[:, :, -1:], of_value[:, :, -1:]]
        computed += [torch.stack(part) for part in (of_slots[: self.shape.slots], of_slots[self.shape.slots :])]
        worst = 0.0
        for ours, right in zip(computed, expected, strict=True):
            ours = ours if ours.shape[-2] == right.shape[-2] else ours[..., tokens, :]
            ratio = ((ours.double() - right).norm() / right.norm()).item()
            worst = max(worst, ratio) if ratio == ratio else float("inf")
        return worst

    def _exact(self, tokens: list[int]) -> list[torch.Tensor]:
        """Compute in float64 the output at `tokens`, the last of all included, and the gradients that only these tokens make."""
        group, last = self.shape.group, self.shape.tokens - 1

        def wide(tensor: torch.Tensor, positions: list[int]) -> torch.Tensor:
            return tensor.detach()[..., positions, :].double().requires_grad_()

        def together(slots: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([wide(slot, tokens).detach() for slot in slots]).requires_grad_()  # [n, 1, K, t, d]

        query, ends = wide(self.query, tokens), [wide(part, [last]) for part in (self.key, self.value)]
        slots = [together(part) for part in (self.keys, self.values)]
        key, value = (
            torch.cat([part.detach()[:, :, :last].double(), end], dim=2)
            for part, end in zip((self.key, self.value), ends, strict=True)
        )
        rows = []
        for index, token in enumerate(tokens):
            queries = query[:, :, index].unflatten(1, (KV_HEADS, group))  # [1, K, G, d]
            keys = torch.cat([key[:, :, : token + 1], slots[0][:, :, :, index].movedim(0, 2)], dim=2)
            values = torch.cat([value[:, :, : token + 1], slots[1][:, :, :, index].movedim(0, 2)], dim=2)
            rows.append(((queries @ keys.mT * self.scaling).softmax(-1) @ values).flatten(1, 2))
        output = torch.stack(rows, dim=2)  # [1, H, t, d]
        along = self.upstream[:, :, tokens].double()
        gradients = torch.autograd.grad(output, [query, *ends, *slots], along)
        return [output.detach(), *gradients]


def _by_flash(forward: Forward) -> Forward:
    """Return the same forward pass, in which torch must choose FlashAttention."""

    def chosen() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return forward()

    return chosen

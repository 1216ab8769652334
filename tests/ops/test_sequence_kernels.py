"""Kernels of torch that tell their divisors: what they give, what they are handed, and which of them is taken.

Here is no GPU, so operators of CUDA are replaced by stand-ins that compute the same on a CPU, write their results as the operators
do, and refuse what these would read wrongly.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode

from midus_hf.ops.depth.sequence_kernels import _KERNELS, Call, kernel_of
from midus_hf.ops.depth.sequence_lse import sequence_lse
from midus_hf.ops.dispatch import private_torch

NAMES = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def scores_of(query, key, bias, is_causal, scale):
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, float("-inf")) if is_causal else scores


def by_token(tensor):
    """`[B, H, T, ...]`, in memory `[B, T, H, ...]`."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


class StandIns(TorchDispatchMode):
    """Computes what operators of CUDA compute."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.removesuffix(".default").removeprefix("_scaled_dot_product_")
        stand_in = getattr(self, name, None)
        if stand_in is None:
            return function(*args, **(kwargs or {}))
        declared = function._schema.arguments
        named = {one.name: one.default_value for one in declared} | (kwargs or {})
        return stand_in(**named | {one.name: value for one, value in zip(declared, args, strict=False)})

    def forward(self, query, key, value, bias, is_causal, scale):
        scores = scores_of(query, key, bias, is_causal, scale)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        lse = scores.logsumexp(-1)
        lse = lse.masked_fill(lse == float("-inf"), 0)  # as kernels have it
        return by_token((scores - lse.unsqueeze(-1)).exp() @ value), lse

    def backward(self, gradient, query, key, value, output, lse, bias, is_causal, scale):
        group, kv_heads = query.shape[1] // key.shape[1], key.shape[1]
        weights = (scores_of(query, key, bias, is_causal, scale) - lse.unsqueeze(-1)).exp()
        along = gradient @ value.repeat_interleave(group, 1).mT - (gradient * output).sum(-1, keepdim=True)
        of_scores = weights * along * (query.shape[-1] ** -0.5 if scale is None else scale)
        of_query = of_scores @ key.repeat_interleave(group, 1)
        parts = ((of_scores, query), (weights, gradient))
        return of_query, *((part.mT @ heads).unflatten(1, (kv_heads, group)).sum(2) for part, heads in parts)

    def flash_attention(self, query, key, value, dropout_p, is_causal, return_debug_mask, scale):
        assert dropout_p == 0 and not return_debug_mask
        lengths = (query.shape[2], key.shape[2])
        return *self.forward(query, key, value, None, is_causal, scale), None, None, *lengths, *self.seeds(), None

    def flash_attention_backward(self, grad_out, query, key, value, out, logsumexp, is_causal, scale, **further):
        self.check_lengths(query, key, **further)
        assert logsumexp.is_contiguous()
        return self.backward(grad_out, query, key, value, out, logsumexp, None, is_causal, scale)

    def efficient_attention(self, query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale):
        assert compute_log_sumexp and dropout_p == 0 and query.shape[1] == key.shape[1]
        self.check_bias(attn_bias, query, key)
        output, lse = self.forward(query, key, value, attn_bias, is_causal, scale)
        behind = lse.new_full((*lse.shape[:2], -lse.shape[2] % 32), float("inf"))
        return output, torch.cat([lse, behind], dim=2), *self.seeds()

    def efficient_attention_backward(
        self, grad_out_, query, key, value, attn_bias, out, logsumexp, grad_input_mask, is_causal, scale, **further
    ):
        self.check_seeds(**further)
        self.check_bias(attn_bias, query, key)
        tokens = query.shape[2]
        assert grad_input_mask == [True, True, True, False]
        assert out.transpose(1, 2).is_contiguous() and grad_out_.transpose(1, 2).is_contiguous()
        assert logsumexp.shape[2] % 32 == 0 and logsumexp.stride(-1) == 1
        assert (logsumexp[:, :, tokens:] == float("inf")).all()
        lse = logsumexp[:, :, :tokens]
        return *self.backward(grad_out_, query, key, value, out, lse, attn_bias, is_causal, scale), None

    def cudnn_attention(
        self, query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale
    ):
        assert compute_log_sumexp and dropout_p == 0 and not return_debug_mask
        assert attn_bias is None or attn_bias.isfinite().all()
        output, lse = self.forward(query, key, value, attn_bias, is_causal, scale)
        sums = by_token(lse.unsqueeze(-1))  # as cuDNN has it at times
        return output, sums, None, None, query.shape[2], key.shape[2], *self.seeds(), None

    def cudnn_attention_backward(
        self, grad_out, query, key, value, out, logsumexp, attn_bias, is_causal, scale, **further
    ):
        self.check_lengths(query, key, **further)
        assert out.stride() == grad_out.stride() == by_token(out).stride()
        assert logsumexp.shape[-1] == 1 and logsumexp.stride() == by_token(logsumexp).stride()
        return self.backward(grad_out, query, key, value, out, logsumexp.squeeze(-1), attn_bias, is_causal, scale)

    def seeds(self):
        return torch.tensor([11]), torch.tensor(12)

    def check_seeds(self, philox_seed, philox_offset, dropout_p):
        assert (philox_seed.item(), philox_offset.item(), dropout_p) == (11, 12, 0)

    def check_lengths(self, query, key, cum_seq_q, cum_seq_k, max_q, max_k, **seeds):
        assert cum_seq_q is None and cum_seq_k is None and (max_q, max_k) == (query.shape[2], key.shape[2])
        self.check_seeds(**seeds)

    def check_bias(self, bias, query, key):
        if bias is not None:
            assert bias.shape == (*query.shape[:3], key.shape[2]) and bias.dtype == query.dtype
            assert bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1])


CASES = [
    *(("FLASH_ATTENTION", kind, kv_heads) for kind in ("causal", "all") for kv_heads in (4, 2)),
    *(("EFFICIENT_ATTENTION", kind, 4) for kind in ("causal", "all", "mask", "wide mask", "row")),
    *(("CUDNN_ATTENTION", kind, kv_heads) for kind in ("causal", "all", "mask") for kv_heads in (4, 1)),
]


def call_of(kind, kv_heads=4, tokens=5):
    """Five queries and keys; masks of rows that are, and are not, multiples of 8 numbers, and one for all queries."""
    keys = 16 if kind == "wide mask" else tokens
    query, key, value = (drawn(2, keys if heads != 4 else tokens, heads, 8, seed=heads) for heads in (4, kv_heads, 4))
    key, value = (drawn(2, keys, kv_heads, 8, seed=seed) for seed in (2, 3))
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    shape = {"mask": (2, 1, tokens, keys), "wide mask": (2, 4, tokens, keys), "row": (2, 1, 1, keys)}.get(kind)
    mask = None
    if shape is not None:
        read = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
        read[..., 0] = True
        mask = torch.zeros(shape, dtype=torch.float64).masked_fill(~read, -65504.0)
    return Call(query, key, value, mask, 0.0, kind == "causal", 0.4, enable_gqa=kv_heads < 4)


@pytest.mark.parametrize(("name", "kind", "kv_heads"), CASES)
def test_kernels_of_a_gpu_give_the_divisor_and_the_gradient_of_their_part_of_a_larger_softmax(name, kind, kv_heads):
    kernel, call = _KERNELS["cuda", name], call_of(kind, kv_heads)
    group = 4 // kv_heads
    leaves = [heads.detach().requires_grad_() for heads in call[:3]]
    scores = scores_of(*leaves[:2], call.attn_mask, call.is_causal, call.scale)
    others, of_others = drawn(*scores.shape[:3], 3, seed=8), drawn(2, 4, 3, 8, seed=9)
    both = torch.cat([scores, others], dim=-1)
    union = both.softmax(-1) @ torch.cat([leaves[2].repeat_interleave(group, 1), of_others], dim=2)
    along = drawn(*union.shape, seed=10)
    expected = torch.autograd.grad(union, leaves, along)
    with StandIns():
        output, lse, extra = kernel.forward(call)
        got = kernel.backward(call, along, union.detach(), both.logsumexp(-1).detach(), *extra)
    alone = scores.softmax(-1) @ leaves[2].repeat_interleave(group, 1)
    torch.testing.assert_close(output, alone.detach())
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach())
    assert lse.shape == output.shape[:3] and None not in extra
    for ours, right in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_row_that_reads_nothing_says_so_and_has_no_gradient(place):
    call = call_of("all")
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.float64)
    mask[1, :, 2] = float("-inf")
    call = call._replace(attn_mask=mask)
    kernel = _KERNELS[place, "FLASH_ATTENTION" if place == "cpu" else "EFFICIENT_ATTENTION"]
    with StandIns():
        output, lse, extra = kernel.forward(call)
        gradients = kernel.backward(call, torch.ones_like(output), output, lse, *extra)
    own = sequence_lse(call.query, call.key, mask, False, call.scaling)
    torch.testing.assert_close(lse, own)
    assert torch.equal(lse == float("-inf"), own == float("-inf")) and (lse[1, :, 2] == float("-inf")).all()
    assert all(part.isfinite().all() for part in gradients) and not gradients[0][1, :, 2].any()


def fake(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def fake_call(tokens=33, width=64, kv_heads=4, dtype=torch.bfloat16, mask=None, is_causal=True):
    query = fake(2, 4, tokens, width, dtype=dtype)
    key, value = (fake(2, kv_heads, 33, width, dtype=dtype) for _ in range(2))
    masks = {None: None, "bool": torch.bool, "added": dtype, "wide": torch.float32}
    added = None if mask is None else fake(2, 1, tokens, 33, dtype=masks[mask])
    return Call(query, key, value, added, 0.0, is_causal and mask is None, enable_gqa=kv_heads < 4)


@pytest.mark.parametrize("name", [*NAMES, "MATH"])
def test_the_kernel_is_the_one_that_torch_chooses(name, monkeypatch):
    asked = []
    chosen = getattr(SDPBackend, name).value
    monkeypatch.setattr(
        private_torch, "_chosen_attention", lambda *args, **kwargs: asked.append((args, kwargs)) or chosen
    )
    with FakeTensorMode():
        call = fake_call(kv_heads=2)
        kernel = kernel_of(call)
        narrow = kernel_of(fake_call(width=60))
    assert (kernel.name if kernel else "MATH") == name
    assert asked[0] == (tuple(call[:6]), {"scale": None, "enable_gqa": True})
    assert narrow is None if name == "FLASH_ATTENTION" else narrow is kernel  # torch pads for FlashAttention


def test_dropout_and_masks_that_learn_are_left_to_torch():
    call = call_of("mask")
    assert kernel_of(call) is _KERNELS["cpu", "FLASH_ATTENTION"]
    assert kernel_of(call._replace(dropout_p=0.1)) is None
    assert kernel_of(call._replace(attn_mask=call.attn_mask.clone().requires_grad_())) is None


GRAPHS = [
    ({}, "FLASH_ATTENTION"),
    ({"kv_heads": 2}, "FLASH_ATTENTION"),
    ({"dtype": torch.float16, "is_causal": False, "tokens": 1}, "FLASH_ATTENTION"),
    ({"tokens": 1}, "EFFICIENT_ATTENTION"),
    ({"mask": "bool"}, "EFFICIENT_ATTENTION"),
    ({"mask": "added"}, "EFFICIENT_ATTENTION"),
    ({"dtype": torch.float32}, "EFFICIENT_ATTENTION"),
    ({"width": 264}, "EFFICIENT_ATTENTION"),
    ({"mask": "wide"}, None),
    ({"mask": "bool", "kv_heads": 2}, None),
    ({"width": 60}, None),
    ({"dtype": torch.float64}, None),
]


@pytest.mark.parametrize(("sizes", "name"), GRAPHS, ids=str)
def test_a_graph_takes_a_kernel_by_what_it_knows_before_it_runs(sizes, name, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        call = fake_call(**sizes)
        kernel = kernel_of(call)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert kernel_of(call) is None
    assert (kernel and kernel.name) == name


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch without CUDA slices no tensor of a GPU")
@pytest.mark.parametrize(("mask", "name"), [(None, "flash"), ("added", "efficient")])
def test_a_compiled_graph_holds_the_operators_of_the_kernel(mask, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    def both_ways(*tensors):
        call = Call(*tensors[:4], 0.0, mask is None)
        kernel = kernel_of(call)
        output, lse, extra = kernel.forward(call)
        return kernel.backward(call, tensors[4], output, lse, *extra)

    with FakeTensorMode():
        call = fake_call(mask=mask)
        got = torch.compile(both_ways, backend=keep, fullgraph=True)(*call[:4], torch.empty_like(call.query))
    assert [part.shape for part in got] == [part.shape for part in call[:3]]
    called = [str(node.target) for node in graphs[0].graph.nodes if "scaled_dot_product" in str(node.target)]
    stem = f"aten._scaled_dot_product_{name}_attention"
    assert called == [stem, f"{stem}_backward"] and len(graphs) == 1


@pytest.mark.parametrize("name", NAMES)
def test_operators_take_what_kernels_hand_them(name):
    """As their schemas and the shapes that they declare have it, in this torch."""
    if name == "EFFICIENT_ATTENTION" and not torch.backends.cuda.is_built():
        pytest.skip("torch without CUDA slices no tensor of a GPU")
    kernel = _KERNELS["cuda", name]
    with FakeTensorMode():
        call = fake_call(mask=None if name == "FLASH_ATTENTION" else "added")
        output, lse, extra = kernel.forward(call)
        gradients = kernel.backward(call, torch.empty_like(output), output, lse, *extra)
    assert (output.shape, lse.shape, lse.dtype) == (call.query.shape, call.query.shape[:3], torch.float32)
    assert [part.shape for part in gradients] == [part.shape for part in call[:3]]

"""Check which kernel computes attention that is joined with the depth, and that its bits are the bits of torch's own kernel.

    python -m benchmarks.gpu.attention_kernels --device cuda --results FOLDER

Each case is attention of one layer. Outside of a graph, the kernel must be the one that torch chooses, and its output
must equal torch's bit for bit, with and without a gradient. In a graph of `torch.compile`, the kernel must be the one
that static facts name. The output, the logarithm of the sum of exponentials and the gradients must agree with float64.
If a case fails, the command ends with status 1.

A row names the kernel that is `expected` and the kernel that was `taken`. Its `status` is "ok" or says what is wrong,
`lse_error` is the largest error of the logarithms, and `error` is the worst RMS ratio, error to right result, of the
output and the gradients of query, key and value.
"""

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks.options import device_command, prepare_device
from benchmarks.pretended_gpu import chosen_device
from benchmarks.recorded import in_words
from benchmarks.tracked import append, this_run
from midus_hf.ops.depth.sequence_kernels import Call, kernel_of

FILE = "attention_kernels.csv"
_TOKENS = {"cuda": 520, "cpu": 40, "rehearsal": 5}
_HEADS, _WIDTH = 8, 64
_LSE_TOLERANCE = 1e-3
# Largest accepted RMS ratio of an error to the right result, by dtype.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Case:
    """Way in which a layer calls attention.

    `in_graph` is the kernel that a compiled graph takes on a GPU; without it there is no graph, and torch chooses. A boolean mask
    also hides keys of padding. In decoding one query reads all keys, else queries read no later key.
    """

    name: str
    in_graph: str | None = None
    kv_heads: int = _HEADS
    is_masked: bool = False
    is_decoding: bool = False


CASES = (
    Case("causal"),
    Case("causal, shared keys", kv_heads=2),
    Case("masked", is_masked=True),
    Case("one token", is_decoding=True),
    Case("compiled, causal", "FLASH_ATTENTION"),
    Case("compiled, causal, shared keys", "FLASH_ATTENTION", kv_heads=2),
    Case("compiled, masked", "EFFICIENT_ATTENTION", is_masked=True),
)


def main(argv: list[str] | None = None) -> int:
    """Try each case, print, and append to `attention_kernels.csv`; return 1 if a case fails, else 0."""
    arguments = device_command(__doc__).parse_args(argv)
    prepare_device(arguments)
    with chosen_device(arguments) as device:
        tokens = _TOKENS["rehearsal" if arguments.rehearse else device]
        this = this_run(device)
        rows = [{**asdict(this), **_tried(case, device, tokens)} for case in CASES]
    for row in rows:
        print("{case}: {taken}, {status}".format(**row), file=sys.stderr)
    if not arguments.no_append:
        append(rows, arguments.results / FILE)
    return int(any(row["status"] != "ok" for row in rows))


def _tried(case: Case, device: str, tokens: int) -> dict[str, Any]:
    call, gradient = _call(case, device, tokens)
    chosen = SDPBackend(torch._fused_sdp_choice(*call[:6], scale=call.scale, enable_gqa=call.enable_gqa)).name
    # A pretended GPU takes the CPU's kernel, also in graphs.
    expected = chosen if case.in_graph is None or not call.query.is_cuda else case.in_graph
    row: dict[str, Any] = {"case": case.name, "expected": expected, "taken": "none", "status": "ok"}
    row |= {"lse_error": None, "error": None}
    try:
        both_ways = _both_ways if case.in_graph is None else torch.compile(_both_ways, fullgraph=True)
        name, output, lse, *gradients = both_ways(call, gradient)
        row["taken"] = name
        exact_lse, *exact = _exact(call, gradient)
        row["lse_error"] = (lse.double() - exact_lse).abs().max().item()
        row["error"] = max(
            ((ours.double() - right).norm() / right.norm()).item()
            for ours, right in zip((output, *gradients), exact, strict=True)
        )
        row["status"] = _status(case, call, row, output)
    except Exception as error:
        row["status"] = in_words(error)
    return row


def _status(case: Case, call: Call, row: dict[str, Any], output: torch.Tensor) -> str:
    if row["taken"] != row["expected"]:
        return "another kernel"
    if not row["lse_error"] <= _LSE_TOLERANCE:
        return "wrong divisor"
    if not row["error"] <= _TOLERANCE[call.query.dtype]:
        return "wrong numbers"
    if case.in_graph is None:
        for wants in (True, False):
            heads = [part.detach().requires_grad_(wants) for part in call[:3]]
            own = F.scaled_dot_product_attention(*heads, *call[3:6], scale=call.scale, enable_gqa=call.enable_gqa)
            if not torch.equal(own, output):
                return f"other bits than torch's with{'' if wants else 'out'} a gradient"
    return "ok"


def _call(case: Case, device: str, tokens: int) -> tuple[Call, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def drawn(heads: int, count: int) -> torch.Tensor:
        made = torch.randn(2, count, heads, _WIDTH, generator=generator, device=device)
        return made.to(dtype).transpose(1, 2)

    queries = 1 if case.is_decoding else tokens
    query, gradient = drawn(_HEADS, queries), drawn(_HEADS, queries)
    key, value = drawn(case.kv_heads, tokens), drawn(case.kv_heads, tokens)
    mask = None
    if case.is_masked:
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=device).tril().expand(2, 1, -1, -1).clone()
        mask[1, :, 2:, 0] = False  # the second text has padding in front
    causal = not (case.is_masked or case.is_decoding)
    return Call(query, key, value, mask, 0.0, causal, enable_gqa=case.kv_heads < _HEADS), gradient


def _both_ways(call: Call, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Run both passes; return the kernel's name, the output, the logarithms and the gradients of query, key and value."""
    kernel = kernel_of(call)
    if kernel is None:
        raise RuntimeError("no kernel returns the divisor of its softmax")
    mask = call.attn_mask
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=call.query.dtype).masked_fill(~mask, kernel.excluded)
    added = call._replace(attn_mask=mask)
    output, lse, extra = kernel.forward(added)
    return kernel.name, output, lse, *kernel.backward(added, gradient, output, lse, *extra)


def _exact(call: Call, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute in float64 the logarithms, the output, and the gradients of query, key and value."""
    leaves = [part.double().requires_grad_() for part in call[:3]]
    query, key, value = leaves
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).mT * call.scaling
    read = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    read = read.tril() if call.is_causal else read if call.attn_mask is None else call.attn_mask
    scores = scores.masked_fill(~read, float("-inf"))
    output = scores.softmax(-1) @ value.repeat_interleave(group, 1)
    return scores.logsumexp(-1).detach(), output.detach(), *torch.autograd.grad(output, leaves, gradient.double())


if __name__ == "__main__":
    sys.exit(main())

"""The table of ops with several bodies: small arguments of each, and how it is called, for the tests of `laws`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from midus_hf.ops import headwise_memory, product_key_topk, weighted_gather
from midus_hf.ops.gather.op import gathered_products, gathered_products_op, weighted_gather_op
from midus_hf.ops.midus_hml.op import headwise_lookup_op
from midus_hf.ops.moc.op import block_arguments, chapter_attention, chapter_blocks_op, sort_by_chapter
from midus_hf.ops.moda.op import depth_attention, depth_attention_op
from midus_hf.ops.product_key.op import product_key_scores_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Arguments = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OpCase:
    make: Callable[..., Arguments]  # arguments by name; gradients flow to all that are floating point
    call: Callable[..., torch.Tensor]  # the differentiable output of arguments, by a body
    bodies: tuple[str, ...]  # in addition to `"reference"`
    # Named sizes and `options` of calls, whose outputs and gradients are compared with the reference in float64.
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    registered: Callable[[Arguments, str], tuple[Any, tuple]] | None = None  # the op and its arguments, for a body
    node: str = ""  # the op's name in a graph
    unregistered: tuple[str, ...] = ()  # bodies without a registered op
    wide: tuple[str, ...] = ()  # results in float32 whatever the dtype of the arguments
    exact: tuple[str, ...] = ()  # results as close to float64 as sums in float32, too
    sums: bool = False  # the last column of the output is called `sums`, and compared apart
    narrows: bool = False  # autocast changes the result
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    entry: tuple[Callable[..., Any], str] | None = (
        None  # what bypasses the op without active hooks; the op's name there
    )
    never_direct: tuple[str, ...] = ()  # bodies that it always calls through the op
    around: bool = False  # PyTorch computes something around the op
    sizes_of_kernels: tuple[str, ...] = ()  # where another row has the same kernels; by default all
    tokens_of_kernels: int = 70  # of two runs of kernels, whose bits are compared
    query_sizes: tuple[str, ...] = ("small",)  # for queries that are large or not finite
    options: tuple[str, ...] = ("k", "softcap")  # arguments of a call that are not tensors

    def made(self, size: str, **changes: Any) -> tuple[Arguments, dict[str, Any]]:
        options = {name: value for name, value in self.sizes[size].items() if name in self.options}
        sizes = {name: value for name, value in self.sizes[size].items() if name not in options}
        return self.make(**sizes, **changes), options


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def whole_numbers(most: int, *shape: int) -> torch.Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def gathered(tokens=30, m=12, rows=9, width=20, dtype=torch.float32):
    """Make a bank, slots and weights; heads may read the same row."""
    slots = whole_numbers(rows, tokens, m)
    slots[:, m // 2 :] = slots[:, :1]
    made = {"bank": drawn(rows, width, seed=1, dtype=dtype), "slots": slots}
    return made | {"weights": drawn(tokens, m, seed=2, dtype=dtype)}


def multiplied(tokens=30, m=12, rows=9, width=20, dtype=torch.float32):
    made = gathered(tokens, m, rows, width, dtype)
    return {"vectors": drawn(tokens, width, seed=3, dtype=dtype), "bank": made["bank"], "slots": made["slots"]}


def keyed(tokens=20, heads=3, half=8, n=12, dtype=torch.float32):
    """Make a query and keys whose scores are of order one, whatever the width."""
    keys = {f"{side}_keys": drawn(heads, n, half, seed=seed) for side, seed in (("row", 5), ("column", 6))}
    return {"query": drawn(tokens, heads, 2 * half, seed=4, dtype=dtype)} | {
        name: (of_side / (2 * half) ** 0.5).to(dtype) for name, of_side in keys.items()
    }


def looked_up(tokens=20, heads=3, half=8, n=12, width=20, own=False, transform=False, dtype=torch.float32):
    bank = drawn(*((heads,) if own else ()), n * n, width, seed=7, dtype=dtype)
    made = keyed(tokens, heads, half, n, dtype) | {"bank": bank}
    return made | ({"transform": drawn(heads, width, width, seed=8, dtype=dtype)} if transform else {})


def memory(arguments: Arguments, backend: str, k: int = 4, **options: Any) -> torch.Tensor:
    tables = (arguments[name] for name in ("query", "row_keys", "column_keys", "bank"))
    return headwise_memory(
        *tables, arguments.get("transform"), min(k, arguments["row_keys"].shape[1]), backend=backend, **options
    )


def opened(tokens=37, chosen=2, heads=4, width=16, chapters=3, memory=8, dtype=torch.float32):
    """Make tokens that each read chapters of their own."""
    order = torch.rand(tokens, chapters, generator=torch.Generator().manual_seed(0)).argsort(-1)
    table = (chapters, memory, heads, width)
    return {
        "query": drawn(tokens, heads, width, seed=1, dtype=dtype),
        "keys": drawn(*table, seed=2, dtype=dtype),
        "values": drawn(*table, seed=3, dtype=dtype),
        "chapters": order[:, :chosen].to(DEVICE),
        "scales": drawn(tokens, chosen, seed=6),
    }


def in_segments(tokens=64, dtype=torch.float32, **sizes):
    """Make two segments of tokens, so long that the rows of their chapters are gathered."""
    made, segments = opened(tokens, dtype=dtype, **sizes), min(2, tokens)
    return made | {name: made[name][:segments] for name in ("chapters", "scales")}


def attended(arguments: Arguments, backend: str) -> torch.Tensor:
    """Read tokens, in as many segments as there are choices of chapters."""
    query, segments = arguments["query"], max(1, len(arguments["chapters"]))
    by_segment = query.reshape(len(arguments["chapters"]), len(query) // segments, *query.shape[1:])
    return chapter_attention(**(arguments | {"query": by_segment}), backend=backend).reshape(query.shape)


def block_arguments_from(arguments: Arguments) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the op on blocks of rows, detached, as an op that is checked alone gets them."""
    tables, chapters = (arguments["query"], arguments["keys"], arguments["values"]), arguments["chapters"]
    made = block_arguments(*tables, chapters, arguments["scales"], sort_by_chapter(chapters, len(arguments["keys"])))
    return tuple(tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor for tensor in made)


def depth_slots(arguments: Arguments) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return tuple(
        [tensor for name, tensor in arguments.items() if name.startswith(f"{part} ")] for part in ("key", "value")
    )


def stacked(tokens=5, texts=2, group=2, kv_heads=2, width=16, slots=3, dtype=torch.float32):
    """Make heads as models have them: `[B, T, H, d]` in memory, seen as `[B, H, T, d]`."""

    def heads(count, seed):
        return drawn(texts, tokens, count, width, seed=seed, dtype=dtype).transpose(1, 2)

    made = {"query": heads(group * kv_heads, 0)}
    return made | {
        f"{part} {slot}": heads(kv_heads, seed + slot)
        for part, seed in (("key", 1), ("value", 1001))
        for slot in range(slots)
    }


def depth_outputs(arguments: Arguments, backend: str, softcap: float | None = 2.0) -> torch.Tensor:
    """Return what each head reads, then the logarithm of its sum of exponentials."""
    query = arguments["query"]
    read, lse = depth_attention(query, *depth_slots(arguments), query.shape[-1] ** -0.5, softcap, backend=backend)
    assert read.dtype == query.dtype
    return torch.cat([read.to(lse.dtype), lse.unsqueeze(-1)], dim=-1)


def sized(names: str, rows: str) -> dict[str, dict[str, Any]]:
    """Return sizes by name, of rows such as `small 1 2` and names for their numbers."""
    named = [(name, map(int, numbers)) for name, *numbers in map(str.split, rows.split(";"))]
    return {name: dict(zip(names.split(), numbers, strict=True)) for name, numbers in named}


GATHERED = sized(
    "tokens m rows width",
    "one 1 1 1 1; small 30 12 9 20; wider-than-a-segment 13 37 50 300; few-rows 200 4 3 16; many-rows 2 1 5000 3; "
    "half-a-vector 90 7 40 37; vectors 20 7 40 64",
)
LOOKED_UP = sized(
    "tokens heads half n width k",
    "one 1 1 1 1 1 4; small 37 3 8 8 12 4; n-64 33 2 8 64 16 1; many-heads 17 9 32 12 64 4; n-33 20 2 48 33 96 4; "
    "n-40 9 2 10 40 133 32; n-7 20 2 8 7 9 5; widest 5 1 128 16 256 8; n-300 6 2 4 300 8 4; five-keys 70 10 4 5 3 4; "
    "many-scores 350 3 2 5 3 4",
)
KEYED = sized(
    "tokens heads half n k",
    "small 20 3 8 12 4; no-mask 64 2 32 64 4; widest 5 1 128 16 4; n-33 20 2 48 33 32; one-slot 33 3 8 12 1; "
    "n-100 17 2 33 100 7; all-keys 70 2 4 5 5; n-128 1 2 8 128 8; n-300 5 1 16 300 9; many-tokens 300 3 33 64 4",
)
OPENED = sized(
    "tokens chosen heads width chapters memory",
    "small 37 2 4 16 3 8; one-token 1 3 2 8 4 5; several-segments 33 1 3 20 3 70; all-chapters 150 2 4 32 2 33; "
    "few-are-read 5 4 2 80 30 3; widest 20 2 2 256 3 40; ones 65 1 1 1 1 2",
)
STACKED = sized(
    "texts tokens group kv_heads width slots",
    "small 2 5 2 2 16 3; one 1 1 1 1 16 1; odd-sizes 2 5 3 2 20 3; no-texts 0 5 2 2 16 3; no-tokens 2 0 2 2 16 3; "
    "many-slots 2 3 2 2 16 20; slots-of-two-blocks 2 5 1 2 96 33; one-slot 2 7 2 2 80 1; widest 2 3 7 2 256 5; "
    "eight-heads 2 3 8 2 80 5; five-heads 2 3 5 2 20 33; more-heads-than-a-block 2 3 17 2 16 5; most-heads 2 1 64 2 1 3; "
    "no-mask 2 3 6 2 128 33; 255-slots 1 1 2 1 16 255; 300-slots 1 1 2 1 16 300; 512-slots 1 1 2 1 16 512",
)
UNCAPPED = ("many-slots", "five-heads", "more-heads-than-a-block", "most-heads", "no-mask")
STACKED = {name: sizes | {"softcap": None if name in UNCAPPED else 2.0} for name, sizes in STACKED.items()}
# A bank per head is another stride, and transforms are a matrix product around kernels.
OF_SHARED_KERNELS = ("one", "small", "many-heads", "n-40", "five-keys")
QUERIES_OF_MEMORY = ("small", "n-64", "n-300", "many-scores")
ALL = ("torch", "native", "triton")


def calls(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda arguments, backend, **options: op(**arguments, backend=backend, **options)


def registers(op: Any, *more: Any) -> Callable[[Arguments, str], tuple[Any, tuple]]:
    return lambda arguments, body: (op, (*arguments.values(), *more, body))


OPS = {
    "weighted gather": OpCase(
        gathered, calls(weighted_gather), ALL, GATHERED, registers(weighted_gather_op), "weighted_gather"
    ),
    "gathered products": OpCase(
        *(multiplied, calls(gathered_products), ALL, GATHERED, registers(gathered_products_op), "gathered_products"),
        wide=("output",),
    ),
    "product keys": OpCase(
        keyed,
        lambda arguments, backend, k=4: product_key_topk(*arguments.values(), k, backend=backend)[0],
        *(ALL, KEYED, registers(product_key_scores_op, 4), "product_key_scores", ("torch",)),
        wide=("output",),
        exact=("output",),
        entry=(product_key_topk, "product_key_scores_op"),
        # Kernels have no room for more than 128 sub-keys in float32.
        sizes_of_kernels=tuple(name for name in KEYED if name not in ("n-300", "many-tokens")),
    ),
    **{
        f"head-wise memory, {name}": OpCase(
            *(lambda given=given, **sizes: looked_up(**given, **sizes), memory, ALL, LOOKED_UP),
            *(registers(headwise_lookup_op, *[None] * (1 if "transform" in given else 2), 4), "headwise_lookup"),
            narrows=True,
            entry=(headwise_memory, "headwise_lookup_op"),
            never_direct=("torch",),
            sizes_of_kernels=OF_SHARED_KERNELS if given else (),
            query_sizes=QUERIES_OF_MEMORY,
        )
        for name, given in (
            ("shared bank", {}),
            ("bank per head", {"own": True}),
            ("transformed", {"transform": True}),
        )
    },
    "chapters": OpCase(
        *(opened, attended, ("torch", "triton"), OPENED),
        *(lambda arguments, body: (chapter_blocks_op, block_arguments_from(arguments)), "chapter_blocks", ("torch",)),
        wide=("scales",),
        around=True,
    ),
    "chapters in segments": OpCase(
        *(in_segments, attended, ("torch",)),
        {"small": {}, "odd-sizes": {"tokens": 32, "heads": 3, "width": 20}},
        wide=("scales",),
        unregistered=("torch",),
    ),
    "depth": OpCase(
        *(stacked, depth_outputs, ("torch", "triton"), STACKED),
        lambda arguments, body: (depth_attention_op, (arguments["query"], *depth_slots(arguments), 0.3, 2.0)),
        *("depth_attention", ("torch",), ("output", "sums"), ("sums",)),
        sums=True,
        narrows=True,
        tokens_of_kernels=5,
        query_sizes=("small", "many-slots"),
    ),
}
# Ops that gather rows of a bank, and may give it a sparse gradient.
GATHERINGS = ("weighted gather", "gathered products")
SCORINGS = tuple(name for name in OPS if name not in GATHERINGS)
# Ops that take tokens of any leading shape.
BATCHED = tuple(name for name in OPS if not name.startswith(("chapters", "depth")))

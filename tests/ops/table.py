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
    """One row of the table."""

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
        """Return arguments of a size, by its name, and options of the call."""
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
    return {
        "bank": drawn(rows, width, seed=1, dtype=dtype),
        "slots": slots,
        "weights": drawn(tokens, m, seed=2, dtype=dtype),
    }


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


GATHERED = {
    "one": {"tokens": 1, "m": 1, "rows": 1, "width": 1},
    "small": {},
    "wider-than-a-segment": {"tokens": 13, "m": 37, "rows": 50, "width": 300},
    "few-rows": {"tokens": 200, "m": 4, "rows": 3, "width": 16},
    "many-rows": {"tokens": 2, "m": 1, "rows": 5000, "width": 3},
    "half-a-vector": {"tokens": 90, "m": 7, "rows": 40, "width": 37},
    "vectors": {"tokens": 20, "m": 7, "rows": 40, "width": 64},
}
LOOKED_UP = {
    "one": {"tokens": 1, "heads": 1, "half": 1, "n": 1, "width": 1},
    "small": {"tokens": 37, "n": 8, "width": 12},
    "n-64": {"tokens": 33, "heads": 2, "n": 64, "width": 16, "k": 1},
    "many-heads": {"tokens": 17, "heads": 9, "half": 32, "width": 64},
    "n-33": {"tokens": 20, "heads": 2, "half": 48, "n": 33, "width": 96},
    "n-40": {"tokens": 9, "heads": 2, "half": 10, "n": 40, "width": 133, "k": 32},
    "n-7": {"tokens": 20, "heads": 2, "half": 8, "n": 7, "width": 9, "k": 5},
    "widest": {"tokens": 5, "heads": 1, "half": 128, "n": 16, "width": 256, "k": 8},
    "n-300": {"tokens": 6, "heads": 2, "half": 4, "n": 300, "width": 8},
    "five-keys": {"tokens": 70, "heads": 10, "half": 4, "n": 5, "width": 3},
    "many-scores": {"tokens": 350, "half": 2, "n": 5, "width": 3},
}
KEYED = {
    "small": {},
    "no-mask": {"tokens": 64, "heads": 2, "half": 32, "n": 64},
    "widest": {"tokens": 5, "heads": 1, "half": 128, "n": 16},
    "n-33": {"heads": 2, "half": 48, "n": 33, "k": 32},
    "one-slot": {"tokens": 33, "k": 1},
    "n-100": {"tokens": 17, "heads": 2, "half": 33, "n": 100, "k": 7},
    "all-keys": {"tokens": 70, "heads": 2, "half": 4, "n": 5, "k": 5},
    "n-128": {"tokens": 1, "heads": 2, "n": 128, "k": 8},
    "n-300": {"tokens": 5, "heads": 1, "half": 16, "n": 300, "k": 9},
    "many-tokens": {"tokens": 300, "half": 33, "n": 64},
}
OPENED = {
    "small": {},
    **{
        name: dict(zip(("tokens", "chosen", "heads", "width", "chapters", "memory"), numbers, strict=True))
        for name, numbers in {
            "one-token": (1, 3, 2, 8, 4, 5),
            "several-segments": (33, 1, 3, 20, 3, 70),
            "all-chapters": (150, 2, 4, 32, 2, 33),
            "few-are-read": (5, 4, 2, 80, 30, 3),
            "widest": (20, 2, 2, 256, 3, 40),
            "ones": (65, 1, 1, 1, 1, 2),
        }.items()
    },
}
STACKED = {
    "small": {"softcap": 2.0},
    "one": {"tokens": 1, "texts": 1, "group": 1, "kv_heads": 1, "slots": 1},
    "odd-sizes": {"group": 3, "width": 20},
    "no-texts": {"texts": 0},
    "no-tokens": {"tokens": 0},
    "many-slots": {"slots": 20, "tokens": 3, "softcap": None},
    **{
        name: dict(zip(("group", "width", "slots", "tokens", "softcap"), numbers, strict=True))
        for name, numbers in {
            "slots-of-two-blocks": (1, 96, 33, 5, 2.0),
            "one-slot": (2, 80, 1, 7, 2.0),
            "widest": (7, 256, 5, 3, 2.0),
            "eight-heads": (8, 80, 5, 3, 2.0),
            "five-heads": (5, 20, 33, 3, None),
            "more-heads-than-a-block": (17, 16, 5, 3, None),
            "most-heads": (64, 1, 3, 1, None),
            "no-mask": (6, 128, 33, 3, None),
        }.items()
    },
    **{f"{slots}-slots": {"slots": slots, "tokens": 1, "texts": 1, "kv_heads": 1} for slots in (255, 300, 512)},
}
# A bank per head is another stride, and transforms are a matrix product around kernels.
OF_SHARED_KERNELS = ("one", "small", "many-heads", "n-40", "five-keys")
QUERIES_OF_MEMORY = ("small", "n-64", "n-300", "many-scores")
ALL = ("torch", "native", "triton")
OPS = {
    "weighted gather": OpCase(
        gathered,
        lambda arguments, backend, **options: weighted_gather(**arguments, backend=backend, **options),
        ALL,
        GATHERED,
        lambda arguments, body: (weighted_gather_op, (*arguments.values(), body)),
        "weighted_gather",
    ),
    "gathered products": OpCase(
        multiplied,
        lambda arguments, backend, **options: gathered_products(**arguments, backend=backend, **options),
        ALL,
        GATHERED,
        lambda arguments, body: (gathered_products_op, (*arguments.values(), body)),
        "gathered_products",
        wide=("output",),
    ),
    "product keys": OpCase(
        keyed,
        lambda arguments, backend, k=4: product_key_topk(*arguments.values(), k, backend=backend)[0],
        ALL,
        KEYED,
        registered=lambda arguments, body: (product_key_scores_op, (*arguments.values(), 4, body)),
        node="product_key_scores",
        unregistered=("torch",),
        wide=("output",),
        exact=("output",),
        entry=(product_key_topk, "product_key_scores_op"),
        # Kernels have no room for more than 128 sub-keys in float32.
        sizes_of_kernels=tuple(name for name in KEYED if name not in ("n-300", "many-tokens")),
    ),
    **{
        f"head-wise memory, {name}": OpCase(
            lambda given=given, **sizes: looked_up(**given, **sizes),
            memory,
            ALL,
            LOOKED_UP,
            lambda arguments, body: (
                headwise_lookup_op,
                (*arguments.values(), *(None,) * (6 - len(arguments)), 4, body),
            ),
            "headwise_lookup",
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
        opened,
        attended,
        ("torch", "triton"),
        OPENED,
        lambda arguments, body: (chapter_blocks_op, block_arguments_from(arguments)),
        "chapter_blocks",
        unregistered=("torch",),
        wide=("scales",),
        around=True,
    ),
    "chapters in segments": OpCase(
        in_segments,
        attended,
        ("torch",),
        {"small": {}, "odd-sizes": {"tokens": 32, "heads": 3, "width": 20}},
        wide=("scales",),
        unregistered=("torch",),
    ),
    "depth": OpCase(
        stacked,
        depth_outputs,
        ("torch", "triton"),
        STACKED,
        registered=lambda arguments, body: (
            depth_attention_op,
            (arguments["query"], *depth_slots(arguments), 0.3, 2.0),
        ),
        tokens_of_kernels=5,
        node="depth_attention",
        unregistered=("torch",),
        wide=("output", "sums"),
        exact=("sums",),
        sums=True,
        narrows=True,
        query_sizes=("small", "many-slots"),
    ),
}
# Ops that gather rows of a bank, and may give it a sparse gradient.
GATHERINGS = ("weighted gather", "gathered products")
SCORINGS = tuple(name for name in OPS if name not in GATHERINGS)
# Ops that take tokens of any leading shape.
BATCHED = tuple(name for name in OPS if not name.startswith(("chapters", "depth")))

"""Compare a layer with UltraMemV2 to a mixture of experts of the same size: bytes read and time by batch size (figure 5).

    python -m experiments.moe_cost
    python -m experiments.moe_cost --shapes 227m-1.2b --passes forward --seconds 10
    python -m experiments.moe_cost --device cuda --dtype bfloat16 --shapes 1b-7b

One layer decodes one token of each sequence. The shapes come from the paper's table 7: a feed-forward network of width
D with its memory, and Transformers' OLMoE block with 64 experts, 8 per token. Both have nearly equal numbers of
parameters, in all and per token. Bytes count the weights that the batch reads, each once: all experts that any token
chose, and all rows that any token retrieved. Inputs and weights are random, so experts and rows are chosen nearly
evenly. Transformers has several ways to compute experts; the fastest counts. `batched_mm` copies the experts of each
token and is left out if the copies need more than a gigabyte. Values that the memory derives from its weights alone are
kept between calls, as in `generate`.

With passes `both`, the backward pass computes the gradients of all weights and of the input, as in training. Gradients
of tables are sparse and cover the rows that were read, as with `sparse_values`. No values are kept, and bytes are the
forward pass's. `eager` is left out, because its gradient of each expert is as large as the weights of all experts.
Every result is written, good or bad. Times are medians in milliseconds of runs in turns, and `experts` names the
fastest way for this row.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, OlmoeConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

from benchmarks.study import Row, add_device, listed, run_columns, tell
from benchmarks.timing import Task, interleaved
from experiments.steps import results_of, study
from midus_hf.config.memories.ultramem import UltraMemOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.kept_values import kept_values
from midus_hf.memory.registry import build_memory

EXPERTS, CHOSEN = 64, 8
PASSES = ("forward", "both")
# Transformers' ways to compute experts.
WAYS = ("eager", "grouped_mm", "batched_mm")
_MOST_COPIED = 1 << 30
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Shape:
    """Sizes in one row of table 7. `inner` and `expert` are the hidden units of the feed-forward network and of each expert."""

    hidden: int
    layers: int
    heads: int
    inner: int
    expert: int
    memory: dict[str, Any]


SHAPES = {
    "227m-1.2b": Shape(
        768, 20, 12, 2496, 384, {"n": 360, "k": 32, "key_width": 192, "value_width": 192, "pre_value_width": 192}
    ),
    "1b-7b": Shape(
        2048, 16, 16, 6976, 1024, {"n": 528, "k": 128, "key_width": 512, "value_width": 768, "pre_value_width": 384}
    ),
}


class UltraMemLayer(nn.Module):
    """Feed-forward network with an UltraMemV2 memory beside it."""

    def __init__(self, shape: Shape):
        super().__init__()
        sizes = ModelSizes(
            hidden_size=shape.hidden,
            num_heads=shape.heads,
            intermediate_size=shape.inner,
            num_layers=shape.layers,
        )
        config = LlamaConfig(hidden_size=shape.hidden, intermediate_size=shape.inner, num_attention_heads=shape.heads)
        self.mlp = LlamaMLP(config)
        self.memory: Any = build_memory(UltraMemOptions(**shape.memory, zero="none"), sizes)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the layer's output, `[B, 1, D]`."""
        return self.mlp(hidden_states) + self.memory(hidden_states)

    def bytes_read(self, hidden_states: torch.Tensor) -> int:
        """Count the bytes of all weights but the rows that no token retrieves."""
        _, rows = self.memory.retrieve(hidden_states)
        tables = {name: value for name, value in self.named_parameters() if name.endswith("value_table")}
        others = sum(value.nbytes for name, value in self.named_parameters() if name not in tables)
        return others + len(rows.unique()) * sum(table[0].nbytes for table in tables.values())


class MoeLayer(nn.Module):
    """Transformers' OLMoE block."""

    def __init__(self, shape: Shape):
        super().__init__()
        config = OlmoeConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.expert,
            num_attention_heads=shape.heads,
            num_experts=EXPERTS,
            num_experts_per_tok=CHOSEN,
        )
        config._experts_implementation = WAYS[0]
        self.config = config
        self.block: Any = OlmoeSparseMoeBlock(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the block's output, `[B, 1, D]`."""
        return self.block(hidden_states)

    def computed_by(self, way: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the block's output, `[B, 1, D]`, by one of `WAYS`."""
        self.config._experts_implementation = way
        return self(hidden_states)

    def bytes_read(self, hidden_states: torch.Tensor) -> int:
        """Count the bytes of the router and of all experts that any token chose."""
        chosen = len(self.block.gate(hidden_states.flatten(0, 1))[2].unique())
        experts = sum(parameter.nbytes for parameter in self.block.experts.parameters())
        return sum(parameter.nbytes for parameter in self.block.gate.parameters()) + experts * chosen // EXPERTS


def main() -> None:
    parser = study(__doc__, work=None)
    add_device(parser)
    listed(parser, "--shapes", SHAPES)
    listed(parser, "--passes", PASSES)
    listed(parser, "--batches", BATCHES)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of timing per row (default: 10)")
    arguments = parser.parse_args()
    run, results = run_columns(arguments.device), results_of("moe_cost", arguments)
    columns = {
        "passes": "{passes}",
        "batch": "{batch}",
        "MoE MB": "{moe_mb:,.1f}",
        "UltraMemV2 MB": "{ultramem_mb:,.1f}",
    }
    columns |= {"MB, ratio": lambda row: f"{row['moe_mb'] / row['ultramem_mb']:.2f}", "experts by": "{experts}"}
    columns |= {"MoE ms": "{moe_ms:.3f}", "UltraMemV2 ms": "{ultramem_ms:.3f}"}
    columns |= {"ms, ratio": lambda row: f"{row['moe_ms'] / row['ultramem_ms']:.2f}"}
    for shape in arguments.shapes.split(","):
        torch.manual_seed(0)
        dtype = getattr(torch, arguments.dtype)
        kinds = {"moe": MoeLayer, "ultramem": UltraMemLayer}
        layers = {name: kind(SHAPES[shape]).to(arguments.device, dtype) for name, kind in kinds.items()}
        counts = {name: sum(p.numel() for p in layer.parameters()) for name, layer in layers.items()}
        print(f"\n{shape}, parameters: {', '.join(f'{name} {count:,}' for name, count in counts.items())}\n")
        tell(_rows(shape, layers, arguments), columns, results, run)


def _rows(name: str, layers: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Row]:
    for passes in arguments.passes.split(","):
        for batch in map(int, arguments.batches.split(",")):
            hidden_states = torch.randn(batch, 1, SHAPES[name].hidden)
            hidden_states = hidden_states.to(arguments.device, getattr(torch, arguments.dtype))
            yield {"shape": name, "passes": passes, **_measured(layers, arguments, passes, hidden_states)}


def _measured(layers: dict[str, Any], arguments: argparse.Namespace, passes: str, hidden_states: torch.Tensor) -> Row:
    moe, ultramem = layers["moe"], layers["ultramem"]
    ways = ways_of(moe, len(hidden_states), passes)
    calls = {way: partial(moe.computed_by, way) for way in ways} | {"ultramem": ultramem}
    ultramem.memory.table_reading.sparse_gradient = passes == "both"
    with torch.no_grad():
        read = {name: layer.bytes_read(hidden_states) / 1e6 for name, layer in layers.items()}
    if passes == "both":
        tasks = {name: Task(partial(_both_passes, layers, call, hidden_states)) for name, call in calls.items()}
        times = interleaved(tasks, arguments.device, seconds=arguments.seconds, fewest=3)
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
    else:
        tasks = {name: Task(lambda _, call=call: call(hidden_states)) for name, call in calls.items()}
        with torch.no_grad(), kept_values(ultramem):
            times = interleaved(tasks, arguments.device, seconds=arguments.seconds)
    fastest = min(ways, key=lambda way: times[way].median_ms)
    return {
        "dtype": arguments.dtype,
        "batch": len(hidden_states),
        "experts": fastest,
        "moe_mb": read["moe"],
        "ultramem_mb": read["ultramem"],
        "moe_ms": times[fastest].median_ms,
        "ultramem_ms": times["ultramem"].median_ms,
    }


def ways_of(moe: MoeLayer, batch: int, passes: str) -> tuple[str, ...]:
    """Return the ways among `WAYS` for a batch: `batched_mm` only if its copies fit, `eager` only without a backward pass."""
    experts = sum(parameter.nbytes for parameter in moe.block.experts.parameters())
    copied = experts // EXPERTS * CHOSEN * batch
    left_out = {"batched_mm"} if copied > _MOST_COPIED else set()
    return tuple(way for way in WAYS if way not in left_out | ({"eager"} if passes == "both" else set()))


def _both_passes(
    layers: dict[str, Any], call: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, _: object
) -> None:
    for layer in layers.values():
        layer.zero_grad(set_to_none=True)
    leaf = hidden_states.clone().requires_grad_()
    call(leaf).sum().backward()


if __name__ == "__main__":
    main()

"""Cost of a layer of Mixture of Chapters: time by sizes and routings, and memory of a step with the paper's bank.

    python -m experiments.chapter_cost
    python -m experiments.chapter_cost --device cuda --dtype bfloat16
    python -m experiments.chapter_cost --only bank --no-append

Each value of an axis is timed in turns with the middle layer, which has the settings of `MIDDLE`. On the axis `layout`,
all layers route by chunk, and the middle layer reads plain rows; `packed` rows hold documents of 32 to 224 tokens, and
half of the `left-padded` rows have padding in front.

`bank` runs one training step of the paper's layer (262,208 memory tokens of width 768, 4,097 chapters, k = 64) and
compares its peak memory with the release's way of choosing chapters: `torch.gather` on a bank that is expanded over the
batch. `layers` runs a step of four layers of the paper's sizes that share the bank, once with the gradient of the whole
bank and once with the gradient of the rows that were read.

Times are medians in milliseconds; `against_middle` divides the time of both passes by the middle layer's.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.study import Cell, Row, add_device, listed, run_columns, tell
from benchmarks.timing import Task, Timing, interleaved, peak_bytes
from experiments.steps import results_of, study
from midus_hf.config.memories.chapters import PAPER, ChaptersOptions
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import build_memory
from midus_hf.memory.routing.token_places import TokenPlaces
from midus_hf.memory.tables import MemoryTables

WIDTH, HEADS, BATCH, TOKENS = 576, 9, 4, 512
MIDDLE = {
    "k": 4,
    "chapters": 64,
    "chapter_tokens": 64,
    "tokens": TOKENS,
    "routing": "sequence",
    "layout": "plain",
}
AXES: dict[str, Sequence[Any]] = {
    "routing": ("sequence", "prompt", "chunk", "token"),
    "k": (1, 2, 8, 16),
    "chapters": (32, 128, 256),
    "chapter_tokens": (16, 32, 128),
    "tokens": (128, 256, 1024),
    "layout": ("plain", "packed", "left-padded"),
}
BANK_BATCH, BANK_TOKENS, BANK_LAYERS = 8, 128, 4
PARTS = (*AXES, "bank", "layers")


def main() -> None:
    parser = study(__doc__, work=None)
    add_device(parser)
    listed(parser, "--only", PARTS, "parts")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="seconds of timing for each layer together with the middle layer (default: 10)",
    )
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    strange = [part for part in wanted if part not in PARTS]
    if strange:
        parser.error(f"--only names {strange[0]!r}; expected parts among {', '.join(PARTS)}.")
    columns = {"axis": "{axis}", "layout": "{layout}", "layers": "{layers}", "routing": "{routing}", "k": "{k}"}
    columns |= {"C": "{chapters}", "T": "{chapter_tokens}", "tokens": "{tokens}"}
    columns |= {"forward ms": _number_cell("forward_ms"), "both ms": _number_cell("both_ms")}
    columns |= {"against the middle": _number_cell("against_middle", 2), "peak MB": _number_cell("peak_mb", 0)}
    rows = (row for part in wanted for row in _rows(part, arguments))
    tell(rows, columns, results_of("chapter_cost", arguments), run_columns(arguments.device))


def _number_cell(name: str, digits: int = 1) -> Cell:
    return lambda row: "" if row[name] is None else f"{row[name]:,.{digits}f}"


def _rows(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a part, one of `PARTS`. Every row has the columns of all parts."""
    of_part = {"bank": _bank, "layers": _layers}.get(part)
    dtype = getattr(torch, arguments.dtype)
    rows = _axis(part, arguments, dtype) if of_part is None else of_part(arguments.device, dtype)
    unknown = {"layout": "plain", "layers": 1, "forward_ms": None, "both_ms": None, "against_middle": None}
    for row in rows:
        yield {**unknown, "dtype": arguments.dtype, **row}


def _axis(axis: str, arguments: argparse.Namespace, dtype: torch.dtype) -> Iterator[Row]:
    """Yield a row for each value of an axis, timed in turns with the middle layer."""
    middle = {**MIDDLE, "routing": "chunk"} if axis == "layout" else MIDDLE
    for value in AXES[axis]:
        settings = {**middle, axis: value}
        tasks: dict[str, Task] = {}
        for name, of_layer in (("middle", middle), ("own", settings)):
            forward, both = _passes(of_layer, arguments.device, dtype)
            tasks |= {f"{name} forward": Task(forward), f"{name} both": Task(both)}
        times: dict[str, Timing] = interleaved(tasks, arguments.device, seconds=arguments.seconds)
        both_ms = times["own both"].median_ms
        yield {
            "axis": axis,
            **settings,
            "batch": BATCH,
            "width": WIDTH,
            "forward_ms": times["own forward"].median_ms,
            "both_ms": both_ms,
            "against_middle": both_ms / times["middle both"].median_ms,
            "peak_mb": peak_bytes(lambda both=both: both(None), arguments.device) / 1e6,
        }


def _passes(
    settings: dict[str, Any], device: str, dtype: torch.dtype
) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """Return two calls: a layer's forward pass without gradients, and its forward and backward pass."""
    options = ChaptersOptions(
        memory_tokens=settings["chapters"] * settings["chapter_tokens"],
        chapters=settings["chapters"],
        k=settings["k"],
        routing=settings["routing"],
        share="none",
    )
    memory = build_memory(options, ModelSizes(hidden_size=WIDTH, num_heads=HEADS)).to(device, dtype)
    nn.init.normal_(memory.output_projection.weight, std=0.02)
    hidden_states = torch.randn(BATCH, settings["tokens"], WIDTH, device=device, dtype=dtype, requires_grad=True)

    places = _places(settings["layout"], settings["tokens"], device)

    def forward(_: object) -> object:
        with torch.no_grad():
            return memory(hidden_states, tokens=places)

    def both(_: object) -> object:
        memory.zero_grad(set_to_none=True)
        return memory(hidden_states, tokens=places).sum().backward()

    return forward, both


def _places(layout: str, tokens: int, device: str) -> TokenPlaces:
    """Return the documents and the padding of a batch in a layout."""
    if layout == "plain":
        return TokenPlaces()
    marks = torch.zeros(BATCH, tokens, dtype=torch.bool)
    if layout == "packed":
        for row in range(BATCH):
            lengths = torch.randint(32, 225, (tokens // 32,), generator=torch.Generator().manual_seed(row))
            ends = lengths.cumsum(0)
            marks[row, ends[ends < tokens]] = True
        return TokenPlaces(None, marks.to(device), is_plain=False)
    for row in range(BATCH):
        marks[row, row % 2 * tokens // 3 :] = True
    return TokenPlaces(marks.to(device), None, is_plain=False)


def _bank(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Yield two rows of peak memory beyond the weights: both passes of the paper's layer, and the release's way of choosing."""
    options = ChaptersOptions(**{**PAPER, "share": "none"})
    sizes = ModelSizes(hidden_size=768, num_heads=12)
    memory = build_memory(options, sizes).to(device, dtype)
    hidden_states = torch.randn(BANK_BATCH, BANK_TOKENS, sizes.hidden_size, device=device, dtype=dtype)

    def step() -> object:
        return memory(hidden_states).sum().backward()

    def expanded() -> object:
        """Choose chapters as the release does, and backpropagate. Later work is the same in both ways and left out."""
        chosen = memory.route(hidden_states).chosen.flatten(1)  # [B, k]
        tokens = chosen[..., None] * options.chapter_tokens + torch.arange(options.chapter_tokens, device=device)
        index = tokens.flatten(1)[..., None].expand(-1, -1, sizes.hidden_size)
        bank = memory.bank.unsqueeze(0).expand(BANK_BATCH, -1, -1)
        return torch.gather(bank, 1, index).sum().backward()

    for axis, task in (("bank", step), ("bank, expanded", expanded)):
        memory.zero_grad(set_to_none=True)
        yield _of_paper(axis, options, sizes, peak_bytes(task, device))


def _of_paper(axis: str, options: ChaptersOptions, sizes: ModelSizes, peak: int) -> Row:
    return {
        "axis": axis,
        "routing": options.routing,
        "k": options.k,
        "chapters": options.chapters,
        "chapter_tokens": options.chapter_tokens,
        "batch": BANK_BATCH,
        "tokens": BANK_TOKENS,
        "width": sizes.hidden_size,
        "peak_mb": peak / 1e6,
    }


def _layers(device: str, dtype: torch.dtype) -> Iterator[Row]:
    """Yield two rows of peak memory beyond the weights: both passes of four layers, with dense and with sparse gradients."""
    options, sizes = ChaptersOptions(**PAPER), ModelSizes(hidden_size=768, num_heads=12)
    (shared,) = options.tables(sizes, tuple(range(BANK_LAYERS)))
    tables = MemoryTables(shared.tensors).to(device, dtype)
    memories = [build_memory(options, sizes).to(device, dtype) for _ in range(BANK_LAYERS)]
    modules = nn.ModuleList([tables, *memories])
    for parameter in modules.parameters():
        nn.init.normal_(parameter, std=0.02)
    hidden_states = torch.randn(BANK_BATCH, BANK_TOKENS, sizes.hidden_size, device=device, dtype=dtype)

    def step() -> object:
        read, states = tables(), hidden_states
        for memory in memories:
            states = states + memory(states, tables=read)
        return states.sum().backward()

    for axis, is_sparse in (("layers", False), ("layers, gradients of rows", True)):
        modules.zero_grad(set_to_none=True)
        for memory in memories:
            memory.sparse_gradient = is_sparse
        yield {**_of_paper(axis, options, sizes, peak_bytes(step, device)), "layers": BANK_LAYERS}


if __name__ == "__main__":
    main()

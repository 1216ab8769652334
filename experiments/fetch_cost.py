"""Time that a text waits for its blocks: a tree of blocks against a flat bank of equal size per text, cold and warm.

    python -m experiments.fetch_cost --work outputs/fetch
    python -m experiments.fetch_cost --work outputs/fetch --shape llama-3.2-1b --texts 10

Both banks have blocks of `hier-ffn` in bfloat16. The tree has three levels with 16 children per node, as in section 3
of the paper. The flat bank has one block for each of the 4,096 leaves, as large as the tree's three blocks together.

- `cold`: nothing is in the page cache, and no block of earlier texts is kept.
- `session`: each text has the topic of the text before it down to level 2. The blocks of shared levels are kept (figure
  5), and the rest is cold.
- `warm`: blocks are in the page cache, and no block is kept.
- `cold, mapped` and `warm, mapped`: the same, with every level on the tier `disk`.
- `disk`: one read of a plain file with as many bytes as a cold fetch from the tree, into memory that is allocated
  already.
- `disk, new memory`: the same read into newly allocated memory.
"""

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.study import Row, run_columns, tell
from experiments.steps import results_of, study
from midus_hf.banks.memory_bank import MemoryBank, create_bank
from midus_hf.config.fetched_blocks import BankLayout, level_file
from midus_hf.config.memory_entries import read_memories
from midus_hf.config.model_sizes import ModelSizes

# Sizes of the model, and sizes of the blocks per level (tables 1 and 2).
SHAPES = {
    "160m": (ModelSizes(hidden_size=512, num_heads=16, num_layers=35, intermediate_size=2048), [256, 64, 16]),
    "llama-3.2-1b": (
        ModelSizes(hidden_size=2048, num_heads=32, num_layers=16, intermediate_size=8192),
        [768, 256, 16],
    ),
}


def main() -> None:
    parser = study(__doc__, work="the banks, removed afterwards")
    parser.add_argument("--shape", choices=SHAPES, default="160m", help="default: 160m")
    parser.add_argument("--texts", type=int, default=20, help="default: 20")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True)
    columns = {
        "bank": "{bank}",
        "state": "{state}",
        "read": lambda row: f"{row['read_bytes'] / 1e6:.1f} MB",
        "median ms": lambda row: f"{1000 * row['seconds']:.1f}",
        "GB/s": lambda row: f"{row['read_bytes'] / row['seconds'] / 1e9:.2f}",
    }
    try:
        tell(_rows(arguments), columns, results_of("fetch_cost", arguments), run_columns())
    finally:
        shutil.rmtree(arguments.work)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    sizes, of_levels = SHAPES[arguments.shape]
    generator = torch.Generator().manual_seed(0)
    # All texts have one topic down to level 2: they are drawn from its sixteen leaves.
    session = torch.randint(16, (arguments.texts,), generator=generator) + 16 * int(torch.randint(256, (1,)))
    banks = {"tree": _layout(sizes, of_levels), "flat": _layout(sizes, [0, 0, sum(of_levels)])}

    def row(bank: str, state: str, read: int, seconds: list[float]) -> Row:
        return {
            "shape": arguments.shape,
            "bank": bank,
            "state": state,
            "texts": len(seconds),
            "read_bytes": read,
            "seconds": statistics.median(seconds),
        }

    whole = 2 * banks["tree"].fetched
    plain = arguments.work / "plain"
    plain.write_bytes(os.urandom(1 << 20) * (whole // (1 << 20) + 1))
    for state, is_new in (("disk", False), ("disk, new memory", True)):
        yield row("none", state, whole, [_read_plain(plain, whole, is_new) for _ in range(9)])
    plain.unlink()
    for name, layout in banks.items():
        folder = arguments.work / name
        create_bank(folder, layout, torch.bfloat16, 0)
        _write_blocks(folder, layout, session)
        for state in ("cold", "cold, mapped", "session", "warm", "warm, mapped"):
            mapped = dict.fromkeys(layout.levels, "disk") if state.endswith("mapped") else {}
            options = {"tiers": {"levels": mapped}, "cache_bytes": 4 * whole if state == "session" else 0}
            bank = MemoryBank(folder, layout, **options)
            seconds, read = [], []
            for leaf in session.tolist():
                if state != "session":
                    bank.close()  # before forgetting pages, since the kernel does not forget mapped ones
                if not state.startswith("warm"):
                    _forget_pages(folder, layout)
                if state != "session":
                    bank = MemoryBank(folder, layout, **options)
                path = layout.blocks.path(leaf)
                missing = [level for level in layout.levels if not bank.keeps(level, path[level - 1])]
                read.append(sum(2 * layout.record_numel(level) for level in missing))
                started = time.perf_counter()
                bank.fetch(torch.tensor([path]))
                seconds.append(time.perf_counter() - started)
            bank.close()
            # Left out: the first text of a session, for which no block is kept, and texts that read nothing because an
            # earlier text had the same leaf.
            changed = [index for index, count in enumerate(read) if count and (state != "session" or index)]
            yield row(name, state, read[changed[-1]], [seconds[index] for index in changed])
        shutil.rmtree(folder)


def _layout(sizes: ModelSizes, of_levels: list[int]) -> BankLayout:
    entry = {"type": "hier-ffn", "layers": list(range(sizes.num_layers)), "sizes": of_levels}
    return read_memories([entry], sizes).banks["hier-ffn"]


def _write_blocks(folder: Path, layout: BankLayout, leaves: torch.Tensor) -> None:
    bank = MemoryBank(folder, layout, writable=True, cache_bytes=0)
    for level in layout.levels:
        for index in sorted({layout.blocks.path(leaf)[level - 1] for leaf in leaves.tolist()}):
            bank.write(level, index, torch.randn(layout.record_numel(level)))
    bank.sync()
    bank.close()


def _forget_pages(folder: Path, layout: BankLayout) -> None:
    """Make the kernel drop the bank's files from the page cache."""
    for level in layout.levels:
        file = os.open(folder / level_file(level), os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def _read_plain(path: Path, count: int, is_new: bool) -> float:
    """Return the seconds to read a file that is not in the page cache, into new or existing memory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    there = torch.zeros(0 if is_new else count, dtype=torch.uint8)
    started = time.perf_counter()
    data = memoryview((torch.empty(count, dtype=torch.uint8) if is_new else there).numpy())
    done = 0
    while done < count:
        done += os.preadv(file, [data[done:]], done)
    seconds = time.perf_counter() - started
    os.close(file)
    return seconds


if __name__ == "__main__":
    main()

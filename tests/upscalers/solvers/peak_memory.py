"""A program: how far one solver's peak memory rises above the level before it, on random matrices.

Its argument is a list of cases as JSON: method (`opt-deus` or `lesa`), hidden size, intermediate size, and options of
the method. Prints a list of the growth and the solver's own statement, in bytes.
"""

import contextlib
import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.upscalers.solvers.recording import MemoryBase, memory_base
from upscalers.architecture.family import Projection
from upscalers.methods.contract import get_method
from upscalers.methods.lesa import MatrixPrediction
from upscalers.methods.opt_deus import BlockFusion
from upscalers.plan.plan import New
from upscalers.request.options import parse_options
from upscalers.request.progress import Progress
from upscalers.solvers import transport
from upscalers.tensors.solver import Solver, Workplace

_CHUNK = 1 << 23


def status(key: str) -> int:
    """A line of the process's own account, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def solver_of(method: str, hidden: int, inner: int, options: dict[str, Any]) -> tuple[MemoryBase, Solver]:
    """The solver of a block between two layers, or of the matrix `down` of three."""
    base = memory_base(3, hidden_size=hidden, intermediate_size=inner, num_attention_heads=hidden // 64)
    chosen = parse_options(get_method(method).options_class, options, method)
    if method == "opt-deus":
        filled = frozenset({"output_projection", "down"} if chosen.identity != "none" else ())
        return base, BlockFusion(base, New(0, 1, (1, 0)), 1, filled, chosen)
    name, tensor = next((n, t) for n, t in base.family.layer_tensors(base.config).items() if t.role == "down")
    return base, MatrixPrediction(base, Projection("down", name, tensor.shape), {1: (0, 1)}, 0, chosen)


def run(base: MemoryBase, solver: Solver) -> None:
    """Let it make its tensors, and drop each at once, as the writer does."""
    tensors = base.family.layer_tensors(base.config)

    def read(name: str) -> torch.Tensor:
        shape = tensors[name.partition(".")[2]].shape
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))).mul_(0.02)
        return torch.cat(values.flatten().split(_CHUNK)).view(shape)  # a second copy for a moment, as the writer

    with tempfile.TemporaryDirectory() as folder:
        for _, made in solver.solve(Workplace(read, Path(folder), Progress())):
            assert made.isfinite().all()


def main() -> None:
    """Measure all cases."""
    torch.set_num_threads(1)
    transport._STRETCH = 20  # so that few iterations take several stretches, as many do
    found = []
    for method, hidden, inner, options in json.loads(sys.argv[1]):
        run(*solver_of(method, 64, 64, options))  # imports and first buffers of libraries
        base, solver = solver_of(method, hidden, inner, options)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # starts the high-water mark anew
        before = status("VmRSS")
        run(base, solver)
        found.append({"growth": status("VmHWM") - before, "stated": solver.work_bytes})
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""CUDA calls for benchmarks of models, beyond the calls in `benchmarks.timing`."""

from collections.abc import Callable

import torch


def held_bytes() -> int:
    """Return the bytes that tensors on the GPU hold now."""
    return torch.cuda.memory_allocated()


def captured(step: Callable[[], object], warm_up: int) -> Callable[[], None]:
    """Capture a call in a CUDA graph; return the function that replays the graph.

    Args:
        step: The call. It must read and write the same tensors every time, and wait for nothing.
        warm_up: Number of calls before the capture, so that compilation and one-time allocation are over.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay

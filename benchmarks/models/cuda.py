"""What benchmarks of models ask of CUDA beyond `benchmarks.timing`."""

from collections.abc import Callable

import torch


def held_bytes() -> int:
    """What tensors on the GPU hold now."""
    return torch.cuda.memory_allocated()


def captured(step: Callable[[], object], warm_up: int) -> Callable[[], None]:
    """Capture a call in a CUDA graph; returns its replay.

    Args:
        step: Reads and writes the same tensors at every call, and waits for nothing.
        warm_up: Calls made before, so that nothing is compiled or allocated once within the capture.
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

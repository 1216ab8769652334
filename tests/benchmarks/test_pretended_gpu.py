"""A GPU that is pretended does on the CPU what it is asked, and nothing of it is left behind."""

import pytest
import torch

from benchmarks.pretended_gpu import pretended_gpu


def test_what_is_asked_of_the_gpu_is_done_on_the_cpu():
    with pretended_gpu():
        assert torch.cuda.is_available()
        drawn = torch.randn(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        with torch.device("cuda"):
            inside = torch.ones(2)
        moved = torch.zeros(1).to("cuda:0", torch.float64)
    assert {tensor.device.type for tensor in (drawn, inside, moved)} == {"cpu"}
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(1)))
    assert moved.dtype == torch.float64
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


def test_a_captured_graph_is_called_again_on_the_same_tensors():
    with pretended_gpu():
        count, doubled = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            count += 1
            result = count * 2
            doubled.copy_(result)
        assert not torch.cuda.is_current_stream_capturing()
        assert (count.item(), doubled.item()) == (0.0, 0.0)  # a capture runs nothing
        count.fill_(10.0)
        graph.replay()
        graph.replay()
    assert (count.item(), result.item(), doubled.item()) == (12.0, 24.0, 24.0)


@pytest.mark.parametrize("ask", [lambda t: t.item(), lambda t: bool(t > 0), lambda t: torch.equal(t, t + 0)])
def test_a_capture_ends_where_the_host_waits_for_a_value(ask):
    with pretended_gpu():
        tensor = torch.ones(1, device="cuda")
        with (
            pytest.raises(RuntimeError, match="waits for a value of the device"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            ask(tensor)
        assert not torch.cuda.is_current_stream_capturing()

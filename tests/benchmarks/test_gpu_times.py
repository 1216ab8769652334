"""What is measured of a GPU, by one whose kernels are known: many for a prompt, fewer for a token."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.models.build import build, read_base, variants
from benchmarks.models.measure import measure
from benchmarks.models.points import Point
from benchmarks.timing import KernelTime

PROMPT, NEW_TOKENS = 8, 9
# Seconds that the host takes to issue a pass, and that it then waits for the device.
HOST_S, WAIT_S = 0.25, 0.5


@pytest.fixture
def midus(model_arguments):
    _, config = read_base(model_arguments().base[0])
    (variant,) = variants(config, ["midus-hml"], ["distributed"])
    return variant, build(variant, "float32", "cpu")


@pytest.fixture
def gpu(midus, monkeypatch):
    """A device on which a pass over a prompt launches 7 kernels of 100 us, and one over a token 5 of 20 us."""
    _, model = midus
    passes, clock = [], [0.0]

    def spend(seconds):
        clock[0] += seconds

    def note(module, arguments, keywords):
        passes.append(keywords["input_ids"].shape[1])
        spend(HOST_S)

    model.register_forward_pre_hook(note, with_kwargs=True)

    def kernels(run, device):
        passes.clear()
        run()
        prompts, tokens = sum(length > 1 for length in passes), passes.count(1)
        found = [("read", 7 * prompts, 700.0 * prompts), ("step", 4 * tokens, 80.0 * tokens)]
        found.append(("both", prompts + tokens, 100.0 * prompts + 20.0 * tokens))
        return [KernelTime(*kernel) for kernel in found if kernel[1]]

    def peak_bytes(run, device):
        run()
        return 500

    monkeypatch.setattr("benchmarks.models.measure.kernels", kernels)
    monkeypatch.setattr("benchmarks.models.measure.peak_bytes", peak_bytes)
    monkeypatch.setattr("benchmarks.models.measure.release_memory", lambda device: None)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 1000)
    monkeypatch.setattr("benchmarks.models.measure.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("benchmarks.models.measure.synchronize", lambda device: spend(WAIT_S))
    monkeypatch.setattr(
        "benchmarks.models.decoding.captured", lambda step, warm_up: ([step() for _ in range(warm_up)], step)[1]
    )
    return kernels


def _measured(midus, point, with_profile=True):
    variant, model = midus
    return measure(model, variant, point, "cuda", with_memory=False, with_profile=with_profile)


def test_generate_reads_its_prompt_once(midus, gpu):
    measured = _measured(midus, Point("generate", 1, 1, PROMPT, NEW_TOKENS, "eager"))
    assert measured.launches == 5
    assert measured.device_s == pytest.approx((800 + (NEW_TOKENS - 1) * 100) / 1e6)
    assert measured.kernels[:2] == (KernelTime("read", 7, 700.0), KernelTime("step", 16, 320.0))
    assert measured.profiled == "the prompt and 4 tokens"


def test_a_captured_step_reads_none(midus, gpu):
    measured = _measured(midus, Point("generate", 3, 1, PROMPT, NEW_TOKENS, "graph"))
    assert measured.launches == 5
    assert measured.device_s == pytest.approx(NEW_TOKENS * 100 / 1e6)
    assert measured.peak_bytes == 1500
    assert measured.compile_s is None


def test_a_prefill_is_what_it_launches(midus, gpu):
    measured = _measured(midus, Point("prefill", 1, 1, PROMPT))
    assert (measured.launches, measured.device_s) == (8, pytest.approx(800 / 1e6))


def test_of_training_kernels_are_kept_and_not_scaled(midus, gpu):
    measured = _measured(midus, Point("train", 4, 4, PROMPT))
    assert (measured.launches, measured.device_s) == (None, None)
    assert [kernel.launches for kernel in measured.kernels] == [14, 2]
    assert measured.profiled == "2 passes and the optimizer"


def test_the_host_is_done_before_the_device(midus, gpu):
    measured = _measured(midus, Point("prefill", 1, 1, PROMPT), with_profile=False)
    assert (measured.host_s, measured.seconds) == (HOST_S, HOST_S + WAIT_S)
    assert measured.launches is None and measured.kernels == ()


def test_a_profiler_that_sees_nothing_says_nothing(midus, gpu, monkeypatch):
    monkeypatch.setattr("benchmarks.models.measure.kernels", lambda run, device: [])
    measured = _measured(midus, Point("prefill", 1, 1, PROMPT))
    assert (measured.launches, measured.device_s) == (None, None)
    assert torch.is_grad_enabled()

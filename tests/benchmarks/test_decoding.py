"""Generation a step at a time, through a cache of fixed size."""

import functools
import shutil

import pytest
import torch
from models.upscaled import upscaled_model
from tiny import prompt
from torch.overrides import TorchFunctionMode

from benchmarks.models import decoding as decoding_module
from benchmarks.models.decoding import WARM_UP, generate, static_decoding
from benchmarks.models.points import FILE
from benchmarks.models.run import run
from benchmarks.tracked import read
from midus_hf.ops import headwise_memory


@pytest.fixture
def model():
    made = upscaled_model("llama", num_hidden_layers=2, new_layers=(1,)).eval()
    made.generation_config.eos_token_id = None
    with torch.no_grad():
        yield made


@pytest.fixture
def quickly_compiled(monkeypatch):
    """Traced as ever, and run as it was written."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def memories(model):
    return [module.kept for module in model.modules() if getattr(module, "kept", None) is not None]


@pytest.mark.parametrize("compiled", [False, True])
def test_steps_give_the_tokens_that_generate_gives(compiled, model, quickly_compiled):
    read, steps = prompt(6), 5
    expected = generate(model, read, 1 + WARM_UP + steps)[:, -steps:]
    tokens = []
    with static_decoding(model, read, steps, compiled=compiled, device="cpu") as decoding:
        for _ in range(steps):
            decoding.take(1)
            tokens.append(decoding.token.clone())
        assert (decoding.compile_s is not None) == compiled
    assert torch.equal(torch.cat(tokens, dim=1), expected)


def test_a_compiled_step_is_one_graph_and_leaves_none_to_the_next_model(model, quickly_compiled):
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            torch._dynamo.utils.counters.clear()
            with static_decoding(model, prompt(6), 5, compiled=True, device="cpu") as decoding:
                decoding.take(5)
                assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_step_that_would_be_compiled_again_is_refused(model, quickly_compiled):
    mlp = model.model.layers[0].mlp
    mlp.calls = 0
    whole = mlp.forward

    def counting(hidden):
        mlp.calls += 1  # a graph depends on the number
        return whole(hidden) * mlp.calls

    mlp.forward = counting
    with pytest.raises(RuntimeError, match="recompile"):
        with static_decoding(model, prompt(6), 5, compiled=True, device="cpu"):
            pass


def test_what_is_captured_reads_kept_values(model, monkeypatch):
    seen = []

    def captured(step, warm_up):
        for _ in range(warm_up):
            step()
        seen.append([kept.is_empty for kept in memories(model)])
        return step

    monkeypatch.setattr(decoding_module, "captured", captured)
    with static_decoding(model, prompt(6), 5, compiled=False, device="cuda") as decoding:
        decoding.take(5)
        keys = decoding.cache.layers[0].keys
        expanded = sum(kept.num_bytes for kept in memories(model))
        assert expanded > 0
        assert decoding.held_bytes == expanded + 2 * len(decoding.cache.layers) * keys.nbytes
        assert keys.shape[2] == 6 + WARM_UP + 5
    assert seen == [[False]]
    assert all(kept.is_empty for kept in memories(model))


def test_a_capture_takes_the_path_of_its_warm_up(model, monkeypatch):
    """With nothing expanded, cast or looked up by other ways than before; on a GPU that would be compiled within the capture."""
    steps = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            steps[-1].append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    def captured(step, warm_up):
        for is_capture in [False] * warm_up + [True]:
            steps.append([])
            with monkeypatch.context() as patched, Noting():
                patched.setattr(torch.cuda, "is_current_stream_capturing", lambda is_capture=is_capture: is_capture)
                step()
        return step

    def refused(*arguments):
        raise AssertionError("values are expanded in a step")

    monkeypatch.setattr(decoding_module, "captured", captured)
    with static_decoding(model, prompt(6), 5, compiled=False, device="cpu"):
        pass  # so that nothing is seen for the first time
    monkeypatch.setitem(headwise_memory.__globals__, "expand_values", refused)
    monkeypatch.setitem(headwise_memory.__globals__, "headwise_lookup_op", refused)
    with pytest.raises(RuntimeError, match="the cache holds"):  # the step behind the warm-up is not counted
        with static_decoding(model, prompt(6), 5, compiled=False, device="cuda"):
            pass
    assert len(steps) == WARM_UP + 1 and len(steps[0]) > 20
    assert all(step == steps[0] for step in steps[1:])


def test_steps_that_do_nothing_are_found_out(model, monkeypatch):
    monkeypatch.setattr(decoding_module, "captured", lambda step, warm_up: lambda: None)
    with pytest.raises(RuntimeError, match=f"the cache holds 6 tokens; expected {6 + WARM_UP + 5}"):
        with static_decoding(model, prompt(6), 5, compiled=False, device="cuda") as decoding:
            decoding.take(5)


@pytest.mark.product
@pytest.mark.skipif(not shutil.which("g++") and not shutil.which("c++"), reason="compiling takes a C++ compiler")
def test_a_compiled_step_is_measured_on_a_cpu(model_arguments, tmp_path, capsys):
    chosen = ["--methods", "midus-hml", "--phases", "generate", "--decoding", "compiled", "--generate-batches", "2"]
    assert run(model_arguments(*chosen)) == 0
    (row,) = read(tmp_path / FILE)
    assert (row["status"], row["decoding"], row["batch"]) == ("ok", "compiled", "2")
    assert float(row["tokens_per_s"]) == pytest.approx(2 * 4 / float(row["seconds"]), rel=0.01)
    assert float(row["seconds"]) < 1  # of a tiny model; compiling took longer
    assert " compiled in " in capsys.readouterr().err

"""What is wrong is not timed."""

import dataclasses
import math

import pytest
import torch

from benchmarks.ops.bench import FILE, run
from benchmarks.ops.gate import Expected, rms_ratio
from benchmarks.ops.operations import PROVIDERS, Provider, Unavailable, make_inputs
from benchmarks.ops.shapes import MODES, SHAPES, Case
from benchmarks.tracked import read
from midus_hf.ops import headwise_memory, product_key_topk

CASE = Case("headwise_memory", SHAPES["tiny"], 20, "uniform", "float32", "cpu")


def _right(case, inputs):
    return lambda: headwise_memory(**inputs, k=case.shape.k)


def _slightly_off(case, inputs):
    return lambda: 1.001 * headwise_memory(**inputs, k=case.shape.k)


def _wrong_gradient(case, inputs):
    def run():
        output = headwise_memory(**inputs, k=case.shape.k)
        return output + (output - output.detach()) * 0.001

    return run


def _not_a_number(case, inputs):
    return lambda: headwise_memory(**inputs, k=case.shape.k) * math.nan


def _wrong_shape(case, inputs):
    return lambda: headwise_memory(**inputs, k=case.shape.k).flatten(1)


def _wrong_on_many_tokens(case, inputs):
    return _slightly_off(case, inputs) if case.tokens > 61 else _right(case, inputs)


def _registered(monkeypatch, **builds):
    table = {name: Provider(name, build, MODES, {}) for name, build in builds.items()}
    monkeypatch.setitem(PROVIDERS, "headwise_memory", table)


@pytest.mark.parametrize("wrong", [_slightly_off, _wrong_gradient, _not_a_number, _wrong_shape, _wrong_on_many_tokens])
def test_a_wrong_provider_is_refused_and_the_others_are_timed(wrong, monkeypatch, ops_arguments, tmp_path, capsys):
    _registered(monkeypatch, wrong=wrong, right=_right)
    status = run(ops_arguments("--ops", "headwise_memory", "--popularity", "uniform"))
    assert status == 1
    printed = capsys.readouterr().err
    assert "FAILED headwise_memory tiny 70 tokens uniform float32, wrong:" in printed
    rows = {(row["provider"], row["mode"]): row for row in read(tmp_path / FILE)}
    assert set(rows) == {("wrong", ""), *(("right", mode) for mode in MODES)}
    assert rows["wrong", ""]["status"] == "refused"
    assert rows["wrong", ""]["median_ms"] == ""
    assert all(float(rows["right", mode]["median_ms"]) > 0 for mode in MODES)


def test_right_providers_end_with_status_0(monkeypatch, ops_arguments):
    _registered(monkeypatch, right=_right)
    assert run(ops_arguments("--ops", "headwise_memory", "--popularity", "zipf", "--no-append")) == 0


def test_the_refusal_names_what_differs(ops_arguments):
    inputs = make_inputs(CASE)
    expected = Expected(CASE, inputs)

    def judged(build):
        made = Provider("any", build, MODES, {})
        return expected.judge(made, build(CASE, inputs), inputs)

    assert judged(_right).passes
    assert judged(_wrong_gradient).error_of.startswith("gradient of ")
    assert judged(_wrong_gradient).error == pytest.approx(0.001, rel=0.01)
    assert not judged(_not_a_number).passes


def test_other_slots_are_refused_whatever_their_scores():
    case = dataclasses.replace(CASE, op="product_key_topk")
    inputs = make_inputs(case)

    def shifted(case, inputs):
        def run():
            scores, slots = product_key_topk(**inputs, k=case.shape.k)
            return scores, (slots + 1) % case.shape.slots

        return run

    verdict = Expected(case, inputs).judge(Provider("shifted", shifted, MODES, {}), shifted(case, inputs), inputs)
    assert verdict.error_of == "slots"
    assert not verdict.passes


def test_a_reference_in_stretches_is_one_in_a_piece(monkeypatch):
    inputs = make_inputs(CASE)
    whole = Expected(CASE, inputs)
    monkeypatch.setattr("benchmarks.ops.gate._MOST_ELEMENTS", 7 * 2 * 4 * 16)
    pieces = Expected(CASE, inputs)
    assert rms_ratio(pieces.output, whole.output) < 1e-12
    assert len(pieces.upstream) == CASE.tokens
    assert rms_ratio(pieces.gradients["query"][:7], whole.gradients["query"][:7]) < 1e-12


def test_too_little_memory_is_a_finding_and_an_error_a_failure(monkeypatch, ops_arguments, tmp_path):
    def hungry(case, inputs):
        def run():
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    def broken(case, inputs):
        raise RuntimeError("broken")

    def absent(case, inputs):
        raise Unavailable("not installed")

    def status(**builds):
        _registered(monkeypatch, **builds)
        return run(ops_arguments("--ops", "headwise_memory", "--popularity", "uniform"))

    assert status(hungry=hungry, absent=absent) == 0
    assert status(broken=broken) == 1
    assert [row["status"] for row in read(tmp_path / FILE)] == ["out of memory", "failed"]

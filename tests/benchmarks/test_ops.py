"""Every implementation of every op, at a size that takes no time."""

import dataclasses
import functools
import math

import pytest
import torch

from benchmarks.ops.bench import FILE, Row, run
from benchmarks.ops.gate import Expected, rms_ratio
from benchmarks.ops.inputs import draw_sub_keys, retrieval_inputs, sub_key_probabilities, sub_keys
from benchmarks.ops.operations import OPS, PROVIDERS, Provider, Unavailable, make_inputs, roofline_microseconds
from benchmarks.ops.providers import expand_then_gather
from benchmarks.ops.shapes import COMPILED, MODES, POPULARITIES, SHAPES, Case
from benchmarks.tracked import read, threads
from midus_hf.ops import headwise_memory, product_key_topk

# Minutes of C compiler; the benchmark itself judges it before it is timed.
SLOW = set(COMPILED)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, table in PROVIDERS.items() for name in table if name not in SLOW]
)
def test_every_provider_passes_the_gate(op, name, dtype):
    case = Case(op, SHAPES["tiny"], 33, "zipf", dtype, "cpu")
    inputs = make_inputs(case)
    provider = PROVIDERS[op][name]
    verdict = Expected(case, inputs).judge(provider, provider.build(case, inputs), inputs)
    assert verdict.passes, verdict


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_expanding_before_gathering_is_right_and_one_graph(backend, dtype):
    case = Case("headwise_memory", SHAPES["tiny"], 33, "zipf", dtype, "cpu")
    inputs = make_inputs(case)
    function = expand_then_gather
    if backend != "eager":  # what the compiler is given, without the minutes that it takes
        function = torch.compile(expand_then_gather, backend=backend, fullgraph=True, dynamic=False)
    provider = Provider("expand", lambda case, inputs: None, MODES, {})
    verdict = Expected(case, inputs).judge(provider, lambda: function(**inputs, k=case.shape.k), inputs)
    assert verdict.passes, verdict


@pytest.fixture
def without_a_c_compiler(monkeypatch):
    """Graphs are traced, forward and backward, and run as they are: compiling them takes minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):  # which providers raise
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", [op for op, table in PROVIDERS.items() if "compiled" in table])
def test_a_compiled_provider_is_one_graph_that_passes_the_gate(op, dtype, without_a_c_compiler):
    test_every_provider_passes_the_gate(op, "compiled", dtype)


@pytest.mark.parametrize(
    ("name", "tokens", "dtype", "device", "reason"),
    [
        ("expand-max-autotune", 1, "float32", "cpu", "max-autotune tries kernels of a GPU; on a CPU it compiles what"),
    ],
)
def test_what_would_compute_as_another_provider_does_is_not_timed(name, tokens, dtype, device, reason):
    case = Case("headwise_memory", SHAPES["tiny"], tokens, "zipf", dtype, device)
    with pytest.raises(Unavailable, match=reason):
        PROVIDERS["headwise_memory"][name].build(case, make_inputs(dataclasses.replace(case, device="cpu")))


def test_a_run_appends_one_row_a_provider_and_mode(ops_arguments, tmp_path):
    chosen = ["--ops", "headwise_memory", "--providers", "naive,sorted,kept-values", "--tokens", "70,1"]
    assert run(ops_arguments(*chosen)) == 0
    rows = read(tmp_path / FILE)
    assert list(rows[0]) == [field.name for field in dataclasses.fields(Row)]
    many = [row for row in rows if row["tokens"] == "70"]
    assert len(many) == 2 * (3 + 3 + 1)  # popularities x modes, of which values that were kept have but one
    one = [row for row in rows if row["tokens"] == "1"]
    assert [(row["provider"], row["mode"]) for row in one] == [
        ("naive", "forward"),
        ("sorted", "forward"),
        ("kept-values", "forward"),
    ]
    for row in rows:
        assert row["status"] == "ok"
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert 0 < float(row["error"]) < 1e-5
        assert row["device"] == row["backend"] == "cpu"
        assert row["roofline_us"] == row["roofline_fraction"] == ""
        assert row["host_ms"] == row["wall_ms"] == row["launches"] == ""
        assert row["torch"] and row["transformers"] and row["commit"] and row["date"] == rows[0]["date"]


def test_a_spent_budget_begins_no_case(ops_arguments, tmp_path, capsys):
    assert run(ops_arguments("--ops", "product_key_topk", "--budget", "-1")) == 0
    assert "out of time; not measured: product_key_topk tiny 70 tokens uniform float32" in capsys.readouterr().err
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops", "sorting"], "op is 'sorting'; expected one of headwise_memory"),
        (["--shapes", "gpt-2"], "shape is 'gpt-2'; expected one of llama-3.2-1b"),
        (["--popularity", "normal"], "popularity is 'normal'; expected one of uniform, zipf"),
        (["--modes", "sideways"], "mode is 'sideways'; expected one of forward, backward"),
        (["--providers", "magic"], "provider is 'magic'; expected one of"),
    ],
)
def test_what_does_not_exist_is_refused(words, message, ops_arguments):
    with pytest.raises(SystemExit, match=message):
        run(ops_arguments(*words))


def test_every_op_has_a_naive_provider_and_a_roofline():
    assert set(COMPILED) <= set(PROVIDERS["headwise_memory"])
    for op in OPS:
        assert "naive" in PROVIDERS[op]
        case = Case(op, SHAPES["llama-3.2-1b"], 4096, "uniform", "bfloat16", "cuda")
        forward = roofline_microseconds(case, "forward", "NVIDIA H200")
        backward = roofline_microseconds(case, "backward", "NVIDIA H200")
        assert forward and backward
        assert roofline_microseconds(case, "forward+backward", "NVIDIA H200") == pytest.approx(forward + backward)
        assert roofline_microseconds(case, "forward", "cpu") is None


def test_rows_of_a_cpu_tell_its_threads_and_dtypes_are_measured_in_one_run(ops_arguments, tmp_path):
    words = ["--ops", "headwise_memory", "--providers", "sorted", "--modes", "forward", "--dtype", "float32,bfloat16"]
    assert run(ops_arguments(*words)) == 0
    rows = read(tmp_path / FILE)
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"} and len({row["date"] for row in rows}) == 1
    assert all(row["machine"].endswith(f", {threads(torch.get_num_threads())}") for row in rows)
    with pytest.raises(SystemExit, match=r"dtype is 'float8'; expected one of float32, bfloat16, float16\."):
        run(ops_arguments("--dtype", "float8"))


def _case(shape, popularity, tokens=400):
    return Case("product_key_topk", shape, tokens, popularity, "float32", "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("name", SHAPES)
def test_retrieved_slots_are_the_ones_drawn(name, popularity, dtype):
    tokens = 3000 if name == "smollm2-135m" else 200
    case = _case(SHAPES[name], popularity, tokens)
    tensors, drawn = retrieval_inputs(case, torch.Generator().manual_seed(3))
    _, slots = product_key_topk(**{key: t.to(dtype) for key, t in tensors.items()}, k=4, backend="reference")
    assert torch.equal(slots.sort(-1).values, drawn.sort(-1).values)


def test_popularities_are_uniform_and_inverse_to_the_rank():
    assert torch.equal(sub_key_probabilities("uniform", 64), torch.full((64,), 1 / 64))
    zipf = sub_key_probabilities("zipf", 64)
    assert zipf.sum().item() == pytest.approx(1)
    assert torch.allclose(zipf[0] / zipf, torch.arange(1.0, 65.0))


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_sub_keys_are_drawn_as_often_as_intended(popularity):
    shape, tokens = SHAPES["smollm2-135m"], 20_000
    drawn = draw_sub_keys(_case(shape, popularity, tokens), torch.Generator().manual_seed(0))  # [S, H, 2]
    assert (drawn[..., 0] != drawn[..., 1]).all()
    p = sub_key_probabilities(popularity, shape.n).double()
    # Of two draws without putting back: the first is r, or the first is another and the second is r.
    expected = p + p * ((p / (1 - p)).sum() - p / (1 - p))
    for head in range(shape.heads):
        counts = drawn[:, head].flatten().bincount(minlength=shape.n).double() / tokens
        by_popularity = counts.sort(descending=True).values
        assert (by_popularity - expected.sort(descending=True).values).abs().max() < 0.02
    most_popular = [drawn[:, head].flatten().bincount().argmax().item() for head in range(shape.heads)]
    assert popularity == "uniform" or len(set(most_popular)) > 1


def test_keys_are_unit_vectors_that_are_hardly_alike():
    keys = sub_keys(SHAPES["llama-3.2-1b"], "cpu", torch.Generator().manual_seed(0)).double()
    products = torch.einsum("hip,hjp->hij", keys, keys)
    diagonal = torch.diagonal(products, dim1=1, dim2=2)
    assert torch.allclose(diagonal, torch.ones_like(diagonal), atol=1e-5)
    others = products - torch.diag_embed(diagonal)
    assert others.abs().max().item() == pytest.approx(32**-0.5, rel=1e-4)


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


@pytest.mark.parametrize("wrong", [_slightly_off, _wrong_gradient, _not_a_number, _wrong_shape, _wrong_on_many_tokens])
def test_a_wrong_provider_is_refused_and_the_others_are_timed(wrong, register, ops_arguments, tmp_path, capsys):
    register(wrong=wrong, right=_right)
    status = run(ops_arguments("--ops", "headwise_memory", "--popularity", "uniform"))
    assert status == 1
    printed = capsys.readouterr().err
    assert "FAILED headwise_memory tiny 70 tokens uniform float32, wrong:" in printed
    rows = {(row["provider"], row["mode"]): row for row in read(tmp_path / FILE)}
    assert set(rows) == {("wrong", ""), *(("right", mode) for mode in MODES)}
    assert rows["wrong", ""]["status"] == "refused"
    assert rows["wrong", ""]["median_ms"] == ""
    assert all(float(rows["right", mode]["median_ms"]) > 0 for mode in MODES)


def test_right_providers_end_with_status_0(register, ops_arguments):
    register(right=_right)
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


def test_too_little_memory_is_a_finding_and_an_error_a_failure(register, ops_arguments, tmp_path):
    def hungry(case, inputs):
        def run():
            raise torch.OutOfMemoryError("CUDA out of memory")

        return run

    def broken(case, inputs):
        raise RuntimeError("broken")

    def absent(case, inputs):
        raise Unavailable("not installed")

    def status(**builds):
        register(**builds)
        return run(ops_arguments("--ops", "headwise_memory", "--popularity", "uniform"))

    assert status(hungry=hungry, absent=absent) == 0
    assert status(broken=broken) == 1
    assert [row["status"] for row in read(tmp_path / FILE)] == ["out of memory", "failed"]

"""Every implementation of every op, at a size that takes no time."""

import csv
import dataclasses
import functools
import importlib.util

import pytest
import torch

from benchmarks.ops.bench import FILE, Row, run
from benchmarks.ops.gate import Expected
from benchmarks.ops.operations import OPS, PROVIDERS, Provider, Unavailable, make_inputs, roofline_microseconds
from benchmarks.ops.providers import expand_then_gather
from benchmarks.ops.shapes import COMPILED, MODES, SHAPES, Case
from benchmarks.tracked import threads

# Minutes of C compiler; the benchmark itself judges it before it is timed.
SLOW = set(COMPILED)

# What differs from others on a GPU alone, where it is rehearsed.
OF_KERNELS = {"exact", "one-block"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, table in PROVIDERS.items() for name in table if name not in SLOW | OF_KERNELS]
)
def test_every_provider_passes_the_gate(op, name, dtype):
    case = Case(op, SHAPES["tiny"], 33, "zipf", dtype, "cpu")
    inputs = make_inputs(case)
    provider = PROVIDERS[op][name]
    try:
        call = provider.build(case, inputs)
    except Unavailable as reason:
        # Packages of others, which nothing here depends on.
        assert importlib.util.find_spec(name) is None and str(reason) == f"No module named '{name}'"
        return
    verdict = Expected(case, inputs).judge(provider, call, inputs)
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


def test_a_search_for_kernels_of_a_gpu_is_not_made_on_a_cpu():
    case = Case("headwise_memory", SHAPES["tiny"], 1, "uniform", "float32", "cpu")
    with pytest.raises(Unavailable, match="max-autotune tries kernels of a GPU; on a CPU it compiles what expand-"):
        PROVIDERS["headwise_memory"]["expand-max-autotune"].build(case, make_inputs(case))
    assert set(COMPILED) <= set(PROVIDERS["headwise_memory"])


def test_programs_of_one_block_are_not_timed_where_none_walks():
    for tokens, dtype, device in ((2, "bfloat16", "cpu"), (2, "float32", "cuda"), (1, "bfloat16", "cuda")):
        case = Case("headwise_memory", SHAPES["tiny"], tokens, "zipf", dtype, device)
        with pytest.raises(Unavailable, match="nothing but kernels of half precision walks, over the blocks of many"):
            PROVIDERS["headwise_memory"]["one-block"].build(case, {})


def test_exact_kernels_are_not_timed_where_everything_is_exact():
    for device, dtype in (("cpu", "bfloat16"), ("cuda", "float32")):
        case = Case("headwise_memory", SHAPES["tiny"], 1, "uniform", dtype, device)
        with pytest.raises(Unavailable, match="nothing but kernels of half precision selects otherwise than exactly"):
            PROVIDERS["headwise_memory"]["exact"].build(case, {})


def test_a_run_appends_one_row_a_provider_and_mode(ops_arguments, tmp_path):
    chosen = ["--ops", "headwise_memory", "--providers", "naive,sorted,kept-values", "--tokens", "70,1"]
    assert run(ops_arguments(*chosen)) == 0
    with (tmp_path / FILE).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
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
    with (tmp_path / FILE).open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"} and len({row["date"] for row in rows}) == 1
    assert all(row["machine"].endswith(f", {threads(torch.get_num_threads())}") for row in rows)
    with pytest.raises(SystemExit, match=r"dtype is 'float8'; expected one of float32, bfloat16, float16\."):
        run(ops_arguments("--dtype", "float8"))

"""Benchmarks at sizes that take no time: what is measured is right, and each measurement is a row."""

import csv
import functools
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from evaluation.byte_models import save_byte_model
from models.fresh_process import run_python
from models.pack_models import chat_tokenizer
from pairs import by_default, taking_turns
from tiny import FAMILIES, save_tiny_model

from benchmarks import glossaries, models, ops, packs, streaming
from benchmarks import upscale as upscale_bench
from benchmarks.measuring import append, is_out_of_memory, peak_bytes, run_columns
from benchmarks.models import METHODS, Point, build, measure, new_parameters, read_base, set_trained, variant_of
from benchmarks.ops import OPS, SHAPES, TOLERANCES, body_of, largest_error, make_inputs
from benchmarks.upscale import REFUSED, planned_requests
from midus_hf.cli.edit import main as edit
from midus_hf.cli.look import main as look
from midus_hf.cli.upscale import main
from midus_hf.memories.module import MemoryModule, tensor_names


def read_rows(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


OPS_AT_ONCE = ["--device", "cpu", "--shapes", "tiny", "--seconds", "0"]
# By default every op with the body that is chosen, and every other body with one op: tests/ops has what bodies compute.
BODIES, DTYPES = ["auto", "reference", "torch", "compiled"], ["float32", "bfloat16"]
OTHERS = [("headwise_memory", "reference"), ("product_key_topk", "torch"), ("weighted_gather", "compiled")]
MEASURED = [(name, "auto", dtype) for name, dtype in taking_turns(OPS, DTYPES)]
MEASURED += [(*other, "float32") for other in OTHERS]


@pytest.mark.parametrize(("name", "body", "dtype"), by_default(MEASURED, itertools.product(OPS, BODIES, DTYPES)))
def test_op_bodies_agree_with_float64(name, body, dtype, monkeypatch):
    # Graphs are traced, forward and backward, and run as they are: compiling them takes minutes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    op, shape = OPS[name], SHAPES["tiny"]
    inputs = make_inputs(op, shape, 33, getattr(torch, dtype), "cpu")
    error, error_of = largest_error(op, shape, body_of(op, shape, body), inputs)
    assert error <= TOLERANCES[dtype], error_of


def test_ops_run_appends_a_row_per_body_and_mode(tmp_path, capsys):
    words = ["--ops", "headwise_memory", "--bodies", "reference,auto", "--tokens", "70,1", "--dtype", "float32"]
    assert ops.main([*OPS_AT_ONCE, *words], tmp_path / "ops.csv") == 0
    rows = read_rows(tmp_path / "ops.csv")
    cases = [(row["tokens"], row["body"], row["mode"]) for row in rows]
    modes = [("70", body, mode) for body in ("reference", "auto") for mode in ("forward", "backward")]
    assert cases == [*modes, ("1", "reference", "forward"), ("1", "auto", "forward")]
    assert all(float(row["median_ms"]) > 0 and float(row["error"]) < 2e-5 and row["commit"] for row in rows)
    assert capsys.readouterr().out.count("headwise_memory") == len(rows)


WRONG = {
    "output": lambda output: 1.001 * output,
    "gradient": lambda output: output + (output - output.detach()) * 0.001,
    "not a number": lambda output: output * float("nan"),
}
HEADWISE = [*OPS_AT_ONCE, "--ops", "headwise_memory", "--dtype", "float32"]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_body_is_reported_and_not_timed(wrong, monkeypatch, tmp_path, capsys):
    right = body_of(OPS["headwise_memory"], SHAPES["tiny"], "auto")
    monkeypatch.setattr(ops, "body_of", lambda *_: lambda inputs: WRONG[wrong](right(inputs)))
    assert ops.main([*HEADWISE, "--bodies", "auto", "--tokens", "70"], tmp_path / "ops.csv") == 1
    assert "differs from float64 by" in capsys.readouterr().err
    assert not (tmp_path / "ops.csv").exists()


def test_unusable_body_is_no_failure(tmp_path, capsys):
    words = ["--ops", "product_key_topk", "--bodies", "native", "--tokens", "2", "--dtype", "float16"]
    assert ops.main([*OPS_AT_ONCE, *words], tmp_path / "ops.csv") == 0
    assert "not measured, backend is 'native', but the tensors are float16" in capsys.readouterr().err


@pytest.fixture
def tiny_base(tmp_path):
    """Return the path of the config of a tiny Llama."""
    config = FAMILIES["llama"].config(tie_word_embeddings=True, architectures=["LlamaForCausalLM"], dtype="float32")
    config.to_json_file(tmp_path / "tiny-llama.json", use_diff=False)
    return str(tmp_path / "tiny-llama.json")


@pytest.mark.parametrize(
    ("main", "words", "message"),
    [
        (ops.main, "--ops sorting", "'sorting' is unknown; expected some of headwise_memory"),
        (ops.main, "--shapes gpt-2", "'gpt-2' is unknown; expected some of smollm2-135m"),
        (models.main, "--phases sleep", "'sleep' is unknown; expected some of train, generate, prefill"),
        (models.main, "--base gpt-2", "base is 'gpt-2'; expected one of gemma-3-270m, "),
        (models.main, "--base BASE --batches 3 --device cpu", "batch is 3; expected a multiple of accumulation = 2"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(main, words, message, tiny_base, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([tiny_base if word == "BASE" else word for word in words.split()], tmp_path / "rows.csv")
    assert message in f"{ended.value} {capsys.readouterr().err}"


# The base, adapters of it, a dense model, and one with layers of memory.
OF_EACH_KIND = ["base", "lora", "solar", "midus-hml"]


@pytest.mark.parametrize("methods", by_default([OF_EACH_KIND], [OF_EACH_KIND, METHODS]))
def test_methods_are_measured_in_all_phases(methods, tiny_base, tmp_path):
    words = ["--device", "cpu", "--base", tiny_base, "--seconds", "0", "--batches", "2", "--lengths", "16"]
    words += ["--prompts", "8", "--dtype", "float32", "--methods", ",".join(methods)]
    assert models.main(words, tmp_path / "model.csv") == 0
    rows = read_rows(tmp_path / "model.csv")
    phases = {(row["method"], row["phase"]) for row in rows}
    assert phases == {(method, phase) for method in methods for phase in ("train", "generate", "prefill")}
    assert all(float(row["seconds"]) > 0 and float(row["tokens_per_s"]) > 0 for row in rows)
    counts = {row["method"]: row for row in rows}
    for method, trained in (("midus-hml", "new"), ("lora", "new"), ("base", "total"), ("solar", "total")):
        assert counts[method]["trained_parameters"] == counts[method][f"{trained}_parameters"]


@pytest.mark.parametrize(
    ("base", "total", "new"),
    [
        ("smollm2-135m", 134_515_008, {"base": 0, "midus-hml": 13_341_120}),
        ("llama-3.2-1b", 1_235_814_400, {"llama-pro": 486_600_000, "midus-hml": 54_542_336, "moc": 76_030_208}),
        ("qwen2.5-coder-0.5b", 630_167_424, {"base": 0}),
        ("qwen2.5-coder-1.5b", 1_777_088_000, {"midus-hml": 55_600_000}),
    ],
)
def test_models_have_their_published_sizes(base, total, new):
    for method, expected in new.items():
        variant = variant_of(read_base(base)[1], method, "top-heavy")
        model = build(variant, "bfloat16", "meta")
        added = sum(parameter.numel() for parameter in new_parameters(model, variant))
        assert model.num_parameters() - added == total, method
        assert added == pytest.approx(expected, rel=0.001)


@pytest.mark.parametrize("method", by_default(["midus-hml", "moc"], ["midus-hml", "midus-pkm", "midus-linear", "moc"]))
def test_step_trains_only_what_is_new(method, tiny_base):
    variant = variant_of(read_base(tiny_base)[1], method, None)
    model = build(variant, "float32", "cpu")
    memories = [module for module in model.modules() if isinstance(module, MemoryModule)]
    assert memories
    assert all(getattr(memory, name).any() for memory in memories for name in tensor_names(memory, "value"))
    new = {id(parameter) for parameter in new_parameters(model, variant)}
    assert {id(parameter) for parameter in set_trained(model, variant)} == new
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    measured = measure(model, variant, Point("train", 2, 2, 32), "cpu", 0)
    changed = {id(p) for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert changed <= new
    assert all(parameter.grad is None for parameter in model.parameters())
    # Of shorter prompts, moc reads one token after the other, which holds more.
    generating = measure(model, variant, Point("generate", 1, 1, 24, 4), "cpu", 0)
    assert generating["peak_gb"] <= measured["peak_gb"]


def test_peak_is_what_was_held_at_once():
    def run():
        first = torch.ones(1 << 20)
        del first
        return [tensor.shape for tensor in (torch.ones(1 << 20), torch.ones(1 << 18))]

    assert peak_bytes(run, "cpu") == 4 * ((1 << 20) + (1 << 18))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("other"))


def test_rows_go_only_to_a_file_of_the_same_columns(tmp_path):
    run = run_columns("cpu")
    for _ in range(2):
        append([run], tmp_path / "a.csv")
    assert [row["device"] for row in read_rows(tmp_path / "a.csv")] == ["cpu", "cpu"]
    (tmp_path / "b.csv").write_text("other,columns\n")
    with pytest.raises(ValueError, match=r"has the columns \['other', 'columns'\]; expected \['date'"):
        append([run], tmp_path / "b.csv")


def test_timed_requests_are_planned_or_refused(tmp_path, capsys):
    requests = planned_requests(tmp_path)
    assert {name: main(words) for name, words in requests.items()} == {
        name: 2 * (name == REFUSED) for name in requests
    }
    assert "placement 'nowhere' is unknown" in capsys.readouterr().err


def test_generated_stream_is_read_once_and_continues(tmp_path):
    words = ["--gigabytes", "0.001", "--format", "parquet", "--sequence-length", "64", "--shuffle-buffer", "50"]
    assert streaming.main([*words, "--folder", str(tmp_path)], tmp_path / "streaming.csv") == 0
    (row,) = read_rows(tmp_path / "streaming.csv")
    assert int(row["sequences"]) == 1000 * 401 // 64
    assert float(row["tokens_per_second"]) > 0
    assert 0 < int(row["buffer_mb"]) <= int(row["tenth_mb"]) <= int(row["peak_mb"])
    assert [path.name for path in tmp_path.iterdir()] == ["streaming.csv"]


def test_pack_benchmark_has_each_variant_and_length(tmp_path):
    base = save_tiny_model("llama", tmp_path / "base")
    chat_tokenizer().save_pretrained(base)
    words = ["--base", str(base), "--texts", "8,16", "--rounds", "2"]
    assert packs.main(words, tmp_path / "packs.csv") == 0
    rows = read_rows(tmp_path / "packs.csv")
    variants = {(row["tokens"], row["variant"]) for row in rows}
    assert len(variants) == len(rows)
    assert {tokens for tokens, _ in variants} == {"8", "16"}
    assert {"base", packs.IN_FRONT, "packs, name in front, kept"} < {variant for _, variant in variants}
    assert all(float(row["seconds"]) > 0 and float(row["of_front"]) > 0 for row in rows)


def test_glossaries_of_each_size_are_measured(tmp_path, monkeypatch):
    base = save_byte_model("llama", tmp_path / "base")
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "Of the Kestrel gateway 00001."}) + "\n")

    def run(command: list[str]) -> tuple[float, float, str]:
        program, *words = command
        if words[0] == "-c":
            code = f"sys.argv[1:] = {words[2:]}\n{words[1]}"
            return 2.0, 1.0, run_python(code, tmp_path, package_present=True).splitlines()[-1]
        tool = main if Path(program).name == "upscale" else {"edit": edit, "look": look}[words.pop(0)]
        assert tool(words) == 0
        return 2.0, 1.0, ""

    monkeypatch.setattr(glossaries, "spent", run)
    words = ["--base", str(base), "--entries", "3", "--text", str(text)]
    assert glossaries.main(words, tmp_path / "glossaries.csv") == 0
    rows = read_rows(tmp_path / "glossaries.csv")
    assert [row["entries"] for row in rows] == ["3"]
    assert all(float(row[name]) > 0 for row in rows for name in ("glossary_mb", "load_s", "token_s", "add_ms"))


def test_processor_time_is_that_of_a_process():
    seconds, gigabytes, said = glossaries.spent([sys.executable, "-c", "print(sum(range(3_000_000)))"])
    assert said == "4499998500000\n"
    assert 0 < seconds < 60
    assert gigabytes > 0  # it also counts what this process had when it forked
    with pytest.raises(SystemExit, match="failed"):
        glossaries.spent([sys.executable, "-c", "1 / 0"])


def test_result_is_stripped_edited_and_loaded(tmp_path, monkeypatch):
    base, output = tmp_path / "base", tmp_path / "output"
    save_byte_model("llama", base)
    for name in ("glossary", "added"):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"name": f"Kestrel {name}", "text": "On port 8443."}) + "\n"
        )
    words = ["--base", str(base), "--method", "packs", "--set", f"corpus={tmp_path / 'glossary.jsonl'}"]
    assert main([*words, "--output", str(output)]) == 0

    def run(command: list[str]) -> tuple[float, float]:
        program, *words = command
        if program == "sh":
            (tmp_path / "copy").mkdir()
        if program == "sh" or words[-1] in ("import midus_hf", "import transformers"):
            return 1.0, 1.0
        if words[0] == "-c":
            run_python(f"sys.argv[1:] = {words[2:]}\n{words[1]}", tmp_path, package_present=True)
        else:
            assert {"upscale": main, "midus": edit}[Path(program).name](words[words[0] == "edit" :]) == 0
        return 2.0, 1.0

    monkeypatch.setattr(upscale_bench, "timed", run)
    rows = upscale_bench.rows_after("packs", base, output, tmp_path / "added.jsonl", 1)
    tools = ["strip", "edit", "load", "load without the package", "load of the base"]
    assert [row["tool"] for row in rows] == tools
    assert {row["ratio"] for row in rows} == {2.0}
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"base", "output", "modules"}

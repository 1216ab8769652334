"""The `upscale` command: options, configuration, JSON, tables, statuses, and dry runs."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from inspect import signature

import pytest
import yaml
from tiny import NATIVE_FAMILIES

from midus_hf.sources import progress as library_bars
from tests.upscalers.checkpoints import MEMORY_OPTIONS, save_base
from tests.upscalers.contents import file_digests
from tests.upscalers.methods import KINDS, PLAIN
from tests.upscalers.real_configs import LLAMA_3_1_8B, LLAMA_3_2_1B, write_config
from upscalers.architecture import layout
from upscalers.console import Console
from upscalers.methods.contract import METHODS, get_method
from upscalers.request import Request, show_progress
from upscalers.runs.training_cost import TrainingCost
from upscalers.runs.upscale import upscale

SMALL = ("--set", "n=8", "--set", "k=2")


def test_command_line_wins_over_the_config_file(command, base, tmp_path):
    request = {"method": "midus-hml", "placement": "0,2,6", "seed": 9, "dtype": "bfloat16", "max_shard_size": "30KB"}
    words = [word for key, value in request.items() for word in (f"--{key.replace('_', '-')}", value)]
    words += ["--output", tmp_path / "out", "--set", "n=6", "--set", "k=3", "--no-verify", "--json"]
    outcome = command("--base", base, *words)
    assert (outcome.status, outcome.err) == (0, "")
    report = outcome.json()
    assert (report["new_layer_indices"], report["identity"]["checked"]) == ([0, 2, 6], None)
    assert (report["base"], report["output"]) == (str(base), str(tmp_path / "out"))
    upscale(base=base, output=tmp_path / "same", options={"n": 6, "k": 3}, verify=False, **request)
    changed = {"placement": [0, 2, 6], "options": {"n": 4, "k": 3}, "seed": 1, "verify": False}
    settings = {**request, **changed, "base": str(base), "output": str(tmp_path / "file")}
    (tmp_path / "request.yaml").write_text(yaml.safe_dump(settings))
    done = command("--config", tmp_path / "request.yaml", "--seed", 9, "--set", "n=6", "--json")
    assert done.json()["new_layer_indices"] == [0, 2, 6]
    assert file_digests(tmp_path / "out") == file_digests(tmp_path / "same") == file_digests(tmp_path / "file")


def test_config_file_values_are_read_or_refused(command, base, tmp_path, refused):
    path, usual = tmp_path / "request.yaml", f"base: {base}\nmethod: midus-hml\ndry_run: true\n"
    for placement, indices in {"bottom-heavy": [0, 2], "1,4": [1, 4], "[1, 4]": [1, 4], "3": [3], "3.0": [3]}.items():
        path.write_text(f"{usual}placement: {placement}\n")
        assert command("--config", path, "--json").json()["new_layer_indices"] == indices
    for text, message in (
        ("\x80", "is not YAML"),
        ("bsae: x", "has no option 'bsae'. Expected one of: base, method, "),
        ("bsae:", "has no option 'bsae'. Expected one of: base, method, "),
        ("options: [n]", "options is ['n']; expected a mapping"),
        ("placement: no", "placement is False; expected a whole number or a string or a list"),
        ("max_shard_size: .5", "max_shard_size is 0.5; expected a whole number or a string."),
        ("options: {n: 1:30}", "n is '1:30'; expected a whole number"),
    ):
        path.write_bytes(text.encode("latin-1"))
        words = ("--base", base, "--method", "midus-hml", "--dry-run", "--config", path)
        refused(command(*words), message, ["request.yaml"])
    wrong = (
        ("seed", 1.5, "1.5; expected an integer"),
        ("placement", [], "'' is unknown"),
        ("placement", True, "'True' is unknown"),
    )
    for key, value, message in wrong:
        with pytest.raises(ValueError, match=f"{key}.* {message}"):
            upscale(base=base, method="midus-hml", dry_run=True, **{key: value})
    assert upscale(base=base, method="midus-hml", placement=1, dry_run=True).new_layer_indices == [1]


@pytest.mark.parametrize("words", ["--dry-run", "--seed 5", "--seed 0", "--no-verify", "--num-new-layers 0"])
def test_options_before_a_subcommand_are_refused(command, words):
    done = command(*words.split(), "strip", "model", "--output", "base")
    assert done.status == 2
    assert f"{words.split()[0].replace('no-', '')} is given before 'strip'" in done.err


def test_methods_lists_options_paper_and_start(command):
    (method,) = [row for row in command("methods", "--json").json() if row["name"] == "midus-hml"]
    assert method["paper"] == {"title": "MIDUS: Memory-Infused Depth Up-Scaling", "reference": "arXiv:2512.13751"}
    assert {row["name"]: row["default"] for row in method["options"]} == {**MEMORY_OPTIONS, "n": 64, "k": 4}
    assert (method["identity"], method["trainable"], method["placement"]) == (True, "new", "distributed")
    shown = command("methods", "midus-hml").out
    assert all(word in shown for word in ("midus-hml", "--set n=64", "--set k=4", "arXiv:2512.13751"))
    for name, placed in (("midus-hml", "distributed"), ("moc", "none: it adds no layers"), ("solar", "its own")):
        assert re.search(rf"^ placement +{placed} *$", command("methods", name).out, re.MULTILINE)
    for name, trained in (
        ("midus-hml", "the new layers"),
        ("moc", "what is new"),
        ("packs", "nothing"),
        ("solar", "everything"),
    ):
        assert re.search(rf"^ trains +{trained} *$", command("methods", name).out, re.MULTILINE)
    lines = [line.split() for line in command("methods").out.splitlines()]
    starts = {line[0]: line[1] for line in lines if line and line[0] in METHODS}
    expected = {"midus-hml": "exact", "packs": "exact*", "solar": "changed", "lesa": "changed*"}
    assert starts.keys() == METHODS.keys()
    assert expected.items() <= starts.items()


def test_summary_names_what_was_done(command, base, tmp_path):
    usual = ("--method", "midus-hml", *SMALL)
    done = command("--base", base, *usual, "--output", tmp_path / "out")
    words = ("midus_llama", "6, new: 1, 4", "logits: largest difference 0", "trainable", "written")
    assert (done.status, done.err) == (0, "")
    assert all(word in done.out for word in words)
    planned = command("--base", base / "config.json", *usual, "--dry-run").succeeded()
    assert all(word in planned.out for word in ("(none: dry run)", "would write"))
    command("--base", base, *usual, "--dry-run", "--output", tmp_path / "a" / "b").succeeded()
    assert not (tmp_path / "a").exists()
    inside = command("--base", base, *usual, "--dry-run", "--output", base)
    assert inside.status == 2
    assert "is inside the base" in inside.err
    bracketed = save_base(tmp_path / "x[/red]")
    shown = command("--base", bracketed, "--method", "llama-pro", "--output", tmp_path / "a[b]c", "--no-verify")
    assert all(name in "".join(shown.out.split()) for name in ("x[/red]", "a[b]c"))  # long paths are folded


def test_corpus_option_needs_a_method_that_reads_one(command, base, tmp_path, monkeypatch):
    rows, requests = tmp_path / "rows.jsonl", []
    rows.write_text('{"name": "word5", "text": "word7"}\n')
    monkeypatch.setattr("upscalers.runs.upscale.upscale", lambda **request: requests.append(request) or 1 / 0)
    (tmp_path / "request.yaml").write_text("options: {corpus: other.jsonl, links: false}\n")
    (tmp_path / "corpus.yaml").write_text("corpus: other.jsonl\noptions: {links: false}\n")
    for words in (["--corpus", rows], ["--set", f"corpus={rows}"]):
        for config in ("request.yaml", "corpus.yaml"):
            command("--base", base, "--method", "packs", *words, "--config", tmp_path / config)
    assert [request["options"] for request in requests] == [{"corpus": str(rows), "links": False}] * 4
    assert all(request["corpus"] is None for request in requests)
    for words, said in (
        (["--method", "solar"], "method 'solar' reads no corpus; expected one of engram, packs. Leave"),
        (["--method", "packs", "--set", f"corpus={rows}"], "among the method's options, where it is the same"),
        ([], "--method is missing"),
    ):
        refused = command("--base", base, *words, "--corpus", rows)
        assert (refused.status, refused.err.count("\n")) == (2, 1), said
        assert said in refused.err


def test_config_file_names_a_corpus(command, base, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"name": "word5", "text": "word7"}\n')
    requests = []
    monkeypatch.setattr("upscalers.runs.upscale.upscale", lambda **request: requests.append(request) or 1 / 0)
    config = tmp_path / "request.yaml"
    config.write_text(f"base: {base}\nmethod: packs\ncorpus: {tmp_path / 'rows.jsonl'}\n")
    command("--config", config)
    assert [request["options"] for request in requests] == [{"corpus": str(tmp_path / "rows.jsonl")}]
    for text, said in (
        (
            "method: solar\ncorpus: a.jsonl\n",
            "corpus is 'a.jsonl', and method 'solar' reads no corpus; expected one of",
        ),
        (
            "method: packs\ncorpus: a.jsonl\noptions: {corpus: b.jsonl}\n",
            "corpus is 'a.jsonl', and 'b.jsonl' among the method's",
        ),
    ):
        config.write_text(text)
        refused = command("--base", base, "--config", config)
        assert refused.status == 2, text
        assert said in refused.err


@pytest.mark.parametrize("words", ["--no-verify", "--seed 0"])
def test_option_without_a_base_is_refused(command, words):
    done = command(*words.split())
    assert done.status == 2
    assert "--base is missing" in done.err


def test_help_has_an_example_and_every_option(command):
    shown = command("--help").out
    assert "upscale --base meta-llama/Llama-3.2-1B --method midus-hml --output DIR" in shown.partition("Options:")[0]
    keys = {field.name for field in fields(Request)}
    assert {*signature(upscale).parameters} == keys | {"progress"}
    options = {f"--{key.replace('_', '-')}" for key in keys - {"options"}}
    words = {*options, "--config", "--set", "--corpus", "--json", "--no-verify", "methods", "inspect", "strip"}
    assert all(word in shown for word in words)


def test_json_report_has_the_promised_keys(command, tmp_path):
    folder = write_config(tmp_path / "base", LLAMA_3_2_1B)
    result = command("--base", folder, "--method", "midus-hml", "--dry-run", "--json")
    report = result.json()
    assert (result.status, result.err, report["method"], report["model_type"]) == (0, "", "midus-hml", "midus_llama")
    promised = "method base output model_type num_layers new_layer_indices parameters bytes identity seconds"
    assert list(report) == [*promised.split(), "peak_rss_bytes", "training"]
    assert report["output"] is None
    assert list(report["training"]) == ["tokens", *(field.name for field in fields(TrainingCost))]
    assert list(report["parameters"]) == ["base", "new", "total", "trainable"]
    assert report["bytes"] == {"read": 0, "written": 2 * report["parameters"]["total"]}
    assert report["identity"].items() >= {"checked": None, "max_abs_diff": None}.items()


# The model that Mixture of Chapters was trained with.
TABLE_5 = {
    **LLAMA_3_2_1B,
    **{"hidden_size": 768, "intermediate_size": 2304, "num_attention_heads": 12, "num_key_value_heads": 4},
    "vocab_size": 49152,
}
BASES = {"1B": LLAMA_3_2_1B, "8B": LLAMA_3_1_8B, "table 5": TABLE_5}
BASE_PARAMETERS = {"1B": 1_235_814_400, "8B": 8_030_261_248, "table 5": 147_874_560}
# A block of a memory: attention with its projection and norm, query projection, values, gain and bias of the batch norm.
BLOCK = {"1B": 10_487_808 + 4_194_304 + 8_388_608 + 4096, "8B": 41_947_136 + 16_777_216 + 16_777_216 + 8192}
DENSE = ("llama-pro", "solar", "avg-deus", "lesa", "opt-deus")
# Method, base, options, new parameters, and billions that MIDUS prints of new ones and of all (tables 1, 4 and 12, but that it has
# 0.35 for linear memory at 1B); None where it prints nothing.
COUNTS = [
    *((method, "1B", {}, 486_572_032, 0.49, 1.72) for method in DENSE),
    *((method, "8B", {}, 3_489_792_000, 3.49, 11.52) for method in DENSE),
    ("stack", "1B", {"layers": ["0-11", "4-15"]}, 486_572_032, 0.49, 1.72),
    ("midus-hml", "1B", {}, 54_542_336, 0.05, 1.29),
    ("midus-hml", "8B", {}, 423_690_240, 0.42, 8.45),
    ("midus-pkm", "1B", {}, 8 * (BLOCK["1B"] + 2 * 32 * 64 * 32), 0.19, None),
    ("midus-pkm", "8B", {}, 16 * (BLOCK["8B"] + 2 * 32 * 64 * 64), 1.21, None),
    ("midus-linear", "1B", {}, 8 * (BLOCK["1B"] + 32 * 4096 * 64), 0.25, None),
    ("midus-linear", "8B", {}, 16 * (BLOCK["8B"] + 32 * 4096 * 128), 1.48, None),
    ("moc", "table 5", {"preset": "paper"}, 223_418_372, None, None),
    ("hier-ffn", "1B", {"sizes": [768, 256, 16, 0]}, 0, None, None),
]


@pytest.mark.parametrize(("method", "name", "options", "new", "new_printed", "total_printed"), COUNTS)
def test_parameter_counts_are_the_published_ones(method, name, options, new, new_printed, total_printed, tmp_path):
    base, layers = BASE_PARAMETERS[name], BASES[name]["num_hidden_layers"]
    folder = write_config(tmp_path / "base", BASES[name])
    report = upscale(base=folder, method=method, options=options, dry_run=True)
    counts = report.parameters
    assert (counts.base, counts.new, counts.total) == (base, new, base + new)
    assert counts.trainable == (base + new if method in ("solar", "stack") else new + (counts.bank or 0))
    assert new_printed in (None, round(new / 1e9, 2))
    assert total_printed in (None, round((base + new) / 1e9, 2))
    assert (counts.fetched, counts.bank) == ((102_236_160, 14_092_861_440) if method == "hier-ffn" else (None, None))
    has_buffers = method in ("midus-pkm", "midus-linear")  # the statistics of batch norms
    assert (report.bytes.written == 2 * counts.total) is not has_buffers, "bfloat16"
    assert report.num_layers == (3 * layers // 2 if get_method(method).adds_layers else layers)
    assert [path.name for path in folder.iterdir()] == ["config.json"]


# Runs words of the command line, one list a line of the input, and prints the status and output of each.
ALONE = """
import contextlib, io, json, sys
from midus_hf.cli.upscale import main
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(json.loads(line))
    imported = {"torch", "transformers"} & {*sys.modules}
    assert not imported, (line, imported)
    print(json.dumps([status, said.getvalue()]))
"""


def without_torch(requests: list[list[str]]) -> list[tuple[int, str]]:
    """Run command lines one after the other in a process without torch and transformers."""
    lines = "".join(json.dumps([*map(str, words)]) + "\n" for words in requests)
    done = subprocess.run([sys.executable, "-c", ALONE], input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_dry_run_without_torch_plans_the_same(tmp_path, monkeypatch):
    requests, lines = {}, []
    for family, tiny in NATIVE_FAMILIES.items():
        base = write_config(tmp_path / family, tiny.config().to_dict())
        for method in PLAIN:
            requests[family, method] = request = {**KINDS[method], "base": str(base), "dry_run": True}
            (tmp_path / f"{len(lines)}.yaml").write_text(yaml.safe_dump(request))
            lines.append(["--config", tmp_path / f"{len(lines)}.yaml", "--json"])
    results = without_torch(lines)
    monkeypatch.setattr(layout, "known_layout", lambda native: None)
    layout._backbone.cache_clear()
    for case, (status, said) in zip(requests, results, strict=True):
        read, planned = upscale(**requests[case]).to_dict(), json.loads(said[said.index("{") :])
        assert status == 0, case
        assert planned.keys() == read.keys(), case
        for key in read.keys() - {"seconds", "peak_rss_bytes"}:
            assert planned[key] == read[key], (case, key)
    layout._backbone.cache_clear()


def test_methods_inspect_and_refusals_need_no_torch(base, tmp_path):
    upscale(base=base, method="llama-pro", output=tmp_path / "out")
    config = write_config(tmp_path / "base", LLAMA_3_2_1B)
    usual = ["--base", config, "--method", "midus-hml", "--dry-run"]
    no_width = write_config(tmp_path / "zero", {**LLAMA_3_2_1B, "hidden_size": 0})
    requests = {
        "llama-pro": (0, ["methods"]),
        "arXiv:2512.13751": (0, ["methods", "midus-hml"]),
        "new, between base": (0, ["inspect", tmp_path / "out"]),
        "was not made by upscale": (2, ["inspect", config]),
        "n is 'none'": (2, [*usual, "--set", "n=none"]),
        "dtype is 'int8'": (2, [*usual, "--dtype", "int8"]),
        "absent": (2, [*usual, "--base", "absent/folder/of/none"]),
        "num-new-layers is 3": (2, [*usual, "--num-new-layers", "3"]),
        "method 'none' is unknown": (2, [*usual, "--method", "none"]),
        "hidden_size = 0; expected a positive": (2, [*usual, "--base", no_width]),
        "corpus is 'no.txt'": (2, [*usual, "--base", base, "--method=engram", "--set=table=exact", "--set=corpus=no.txt"]),
    }  # fmt: skip
    results = without_torch([words for _, words in requests.values()])
    for (message, (expected, _)), (status, said) in zip(requests.items(), results, strict=True):
        assert message in said, said
        assert status == expected, said


STARTED_BY_A_LARGE_PROCESS = """
import subprocess, sys
held = bytearray(b"x") * 1_500_000_000
code = "from midus_hf.sources.peak_memory import peak_memory_bytes; print(peak_memory_bytes())"
subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
"""


def test_peak_memory_is_of_this_process_only():
    words = [sys.executable, "-W", "ignore", "-c", STARTED_BY_A_LARGE_PROCESS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert 10_000_000 < int(done.stdout) < 1_000_000_000


def test_dry_run_needs_no_shards(tmp_path):
    whole, bare = save_base(tmp_path / "whole", max_shard_size="30KB"), tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copy(whole / name, bare)
    one, other = (upscale(base=base, method="midus-hml", num_new_layers=2, dry_run=True) for base in (whole, bare))
    assert (one.parameters, one.bytes.written) == (other.parameters, other.bytes.written)


def test_stages_are_lines_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(library_bars, "_SECONDS_PER_LINE", 0)
    progress = Console()
    with show_progress(progress):
        progress.stage("writing tensors", 4, "bytes")
        progress.advance(4)
    assert any(line.startswith("writing tensors:   0%|") for line in capsys.readouterr().err.splitlines())

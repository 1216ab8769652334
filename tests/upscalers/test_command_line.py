"""The `upscale` command: options, configuration file, JSON, tables, exit statuses."""

from inspect import signature
from unittest.mock import Mock

import pytest
import yaml

from tests.upscalers.checkpoints import MEMORY_OPTIONS, file_digests, save_base
from upscalers.methods.contract import METHODS
from upscalers.request.errors import MethodError, VerificationError
from upscalers.runs.upscale import upscale

SMALL = ("--set", "n=8", "--set", "k=2")


def test_options_reach_the_engine_and_those_of_the_command_line_win_over_the_configuration_file(
    command, base, tmp_path
):
    outcome = command(
        "--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--placement", "0,2,6", "--set", "n=6",
        "--set", "k=3", "--seed", 9, "--dtype", "bfloat16", "--max-shard-size", "30KB", "--no-verify", "--json",
    )  # fmt: skip
    assert (outcome.status, outcome.err) == (0, "")
    report = outcome.json()
    assert (report["new_layer_indices"], report["identity"]["checked"]) == ([0, 2, 6], None)
    assert (report["base"], report["output"]) == (str(base), str(tmp_path / "out"))
    options = {"n": 6, "k": 3}
    request = {
        "method": "midus-hml",
        "placement": "0,2,6",
        "dtype": "bfloat16",
        "max_shard_size": "30KB",
        "verify": False,
    }
    upscale(base=base, output=tmp_path / "same", options=options, seed=9, **request)
    settings = {**request, "base": str(base), "placement": [0, 2, 6], "options": {"n": 4, "k": 3}, "seed": 1}
    (tmp_path / "request.yaml").write_text(yaml.safe_dump({**settings, "output": str(tmp_path / "file")}))
    done = command("--config", tmp_path / "request.yaml", "--seed", 9, "--set", "n=6", "--json")
    assert done.json()["new_layer_indices"] == [0, 2, 6]
    assert file_digests(tmp_path / "out") == file_digests(tmp_path / "same") == file_digests(tmp_path / "file")


def test_a_configuration_file_places_by_name_list_or_number(command, base, tmp_path):
    path, usual = tmp_path / "request.yaml", f"base: {base}\nmethod: midus-hml\ndry_run: true\n"
    for placement, indices in (("bottom-heavy", [0, 2]), ("1,4", [1, 4]), ("3", [3])):
        path.write_text(f"{usual}placement: {placement}\n")
        assert command("--config", path, "--json").json()["new_layer_indices"] == indices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("a: [", "is not YAML: while parsing"),
        ("\x80", "is not YAML"),
        ("- base", "holds a list; expected a mapping of keys to values"),
        ("bsae: x", "has no option 'bsae'. Expected one of: base, method, "),
        ("num_new_layers: many", "num_new_layers is 'many'; expected a whole number"),
        ("verify: maybe", "verify is 'maybe'; expected true or false"),
        ("base: 5", "base is 5; expected a string"),
        ("options: [n]", "options is ['n']; expected a mapping"),
    ],
)
def test_a_configuration_file_that_makes_no_sense_is_refused(command, base, tmp_path, text, message, refused):
    path = tmp_path / "request.yaml"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    words = ("--base", base, "--method", "midus-hml", "--output", tmp_path / "out", "--config", path)
    refused(command(*words), message, None)


def test_methods_are_listed_with_options_defaults_and_paper(command):
    (method,) = [row for row in command("methods", "--json").json() if row["name"] == "midus-hml"]
    assert method["paper"] == {"title": "MIDUS: Memory-Infused Depth Up-Scaling", "reference": "arXiv:2512.13751"}
    assert {row["name"]: row["default"] for row in method["options"]} == {**MEMORY_OPTIONS, "n": 64, "k": 4}
    assert (method["identity"], method["trainable"], method["placement"]) == (True, "new", "distributed")
    tables = {name: command("methods", name) for name in ("midus-hml", "moc", "solar")}
    assert {table.status for table in tables.values()} == {0}
    words = ("midus-hml", "--set n=64", "--set k=4", "arXiv:2512.13751")
    assert all(word in tables["midus-hml"].out for word in words)
    placed = {
        name: line.removeprefix(" placement ").strip()
        for name, table in tables.items()
        for line in table.out.splitlines()
        if line.startswith(" placement ")
    }
    assert placed == {"midus-hml": "distributed", "moc": "none: it adds no layers", "solar": "its own"}


def test_the_list_of_methods_has_a_line_each_that_says_how_the_model_starts(command):
    lines = [line.split() for line in command("methods").out.splitlines()]
    starts = {line[0]: line[1] for line in lines if line and line[0] in METHODS}
    assert starts.keys() == METHODS.keys()
    assert [starts[name] for name in ("midus-hml", "solar", "lesa")] == ["exact", "changed", "changed*"]


def test_the_summary_on_a_terminal_says_what_was_done(command, base, tmp_path):
    usual = ("--method", "midus-hml", *SMALL)
    done = command("--base", base, *usual, "--output", tmp_path / "out")
    assert (done.status, done.err) == (0, "")
    words = ("midus_llama", "6, new: 1, 4", "logits: largest difference 0", "trainable", "written")
    assert all(word in done.out for word in words)
    planned = command("--base", base / "config.json", *usual, "--dry-run")
    assert planned.status == 0 and all(word in planned.out for word in ("(none: dry run)", "would write"))
    elsewhere = command("--base", base, *usual, "--dry-run", "--output", tmp_path / "a" / "b")
    assert elsewhere.status == 0 and not (tmp_path / "a").exists()
    inside = command("--base", base, *usual, "--dry-run", "--output", base)
    assert inside.status == 2 and "lies inside the base" in inside.err
    bracketed = save_base(tmp_path / "x[/red]")
    shown = command("--base", bracketed, "--method", "llama-pro", "--output", tmp_path / "a[b]c", "--no-verify")
    assert all(name in "".join(shown.out.split()) for name in ("x[/red]", "a[b]c"))  # long paths are folded


def test_work_that_fails_ends_in_one_line_and_status_1(command, base, tmp_path, monkeypatch):
    for error, line in (
        (VerificationError("it lies"), "VerificationError: it lies"),
        (MethodError("first\nsecond"), "MethodError: first second"),
    ):
        monkeypatch.setattr("upscalers.runs.upscale.upscale", Mock(side_effect=error))
        outcome = command("--base", base, "--method", "midus-hml", "--output", tmp_path / "out")
        assert (outcome.status, outcome.out, outcome.err) == (1, "", f"upscale: failed: {line}\n")


def test_help_begins_with_what_upscale_does_and_an_example_and_names_every_option_and_command(command):
    shown = command("--help")
    assert shown.status == 0
    beginning = shown.out.partition("Options:")[0]
    assert "Add memory or layers to a pretrained model." in beginning
    assert "upscale --base HuggingFaceTB/SmolLM2-135M --method midus-hml --output OUT" in beginning
    keys = [key for key in signature(upscale).parameters if key not in ("options", "progress")]
    options = ("--config", "--set", "--json", "--no-verify", *(f"--{key.replace('_', '-')}" for key in keys))
    assert all(word in shown.out for word in (*options, "methods", "inspect", "strip"))

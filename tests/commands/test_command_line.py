"""Commands show help at once, end by one table of statuses, and refuse a request in one line."""

import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any
from unittest.mock import Mock

import pytest
import typer
from commands.installed import COMMANDS, ENTRY_POINTS, REPOSITORY, Outcome, run_alone, run_in_process

from midus_hf.cli import entry_points
from midus_hf.cli.run_arguments import read_arguments
from midus_hf.config.errors import RequestError
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft.run import SftArguments
from midus_hf.version import __version__
from upscalers.architecture.flops import count_flops

MISSING_FILE = {
    "upscale": ["--config", "absent"], "midus train": ["absent.yaml"], "midus sft": ["absent.yaml"],
    "midus eval": ["model", "--config", "absent"], "midus ask": ["absent", "Why?"], "midus edit": ["list", "absent"],
    "midus flops": ["absent.json"], "midus cluster": ["report", "--tree", "absent"],
    "midus look": ["heads", "model", "--tasks", "piqa", "--data", "absent"], "midus compare": ["absent"],
}  # fmt: skip
# What does the work of a command, and a request for it.
WORK = {
    "upscale": ("upscalers.runs.upscale.upscale", ["--base", "model", "--method", "solar", "--output", "out"]),
    "midus train": ("midus_hf.training.run.run_training", ["run.yaml"]),
    "midus sft": ("midus_hf.training.sft.run.finetune", ["sft.yaml"]),
    "midus eval": ("midus_hf.evaluation.evaluate.evaluate", ["model", "--text", "text.txt"]),
    "midus ask": ("midus_hf.models.saved_models.load_for_reading", ["model", "Why?"]),
    "midus edit": ("midus_hf.cli.edit.list_memories", ["list", "model"]),
    "midus flops": ("upscalers.checkpoint.base_checkpoint.read_config", ["config.json"]),
    "midus cluster": ("midus_hf.topics.run.open_build", ["report", "--tree", "model"]),
    "midus look": ("midus_hf.evaluation.harness.Tasks", ["heads", "model", "--tasks", "piqa", "--data", "."]),
    "midus compare": ("midus_hf.compare.run.run_all", ["compare.yaml"]),
}
WITH_KEYS = WITH_TRACEBACK = ("midus train", "midus sft")
# A request of each command that takes a device, which lacks nothing but the device and the model.
TEXT = ["model", "--text", "text.txt"]
WITH_A_DEVICE = {
    "midus eval": TEXT,
    "midus ask": ["model", "Why?"],
    "midus look usage": TEXT,
    "midus look depth": TEXT,
    "midus look ablation": TEXT,
    "midus look heads": ["model", "--tasks", "piqa"],
    "midus look touched": [*TEXT, "--prove"],
    "midus look glossary": ["model"],
    "midus look page": [*TEXT, "--output", "page.html"],
    "midus cluster build": ["--corpus", "text.txt", "--embedding-model", "model", "--tokenizer", "model", "--output", "tree"],
    "midus cluster grow": ["model", "--corpus", "text.txt", "--output", "grown"],
    "midus cluster assign": ["--tree", "model", "--corpus", "text.txt", "--output", "paths.jsonl"],
}  # fmt: skip
SUBCOMMANDS = (
    *(f"upscale {name}" for name in ("methods", "inspect", "strip", "shuffle")),
    *(f"midus cluster {name}" for name in ("build", "assign", "report")),
    "midus edit blocks",
)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A working directory with the files that requests name; a comparison does not read its base."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("midus_hf.compare.plan.check", lambda *_: None)
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / "empty.txt").touch()
    for encoding in ("latin", "utf-16"):
        (tmp_path / f"{encoding}.txt").write_text("caf\u00e9 \u00e0 la", encoding=encoding)
    for name, file in (("model", "config.json"), ("adapter", "adapter_config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "run.yaml").write_text("model_name_or_path: model\ncorpus: text.txt\noutput_dir: out\n")
    (tmp_path / "compare.yaml").write_text(
        "base: model\noutput_dir: out\nvariants: {full: {}}\ntrain: {corpus: text.txt, max_steps: 1}\ndomain: {text: text.txt}\n"
    )
    (tmp_path / "chats.jsonl").write_text("{}")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: model\ndataset_name: chats.jsonl\noutput_dir: out\n")
    return tmp_path


def test_help_and_completion_import_nothing_heavy():
    """Ask for each help in one process; those with keys come last, by the parser of Transformers."""
    commands = [command.split() for command in (*(each for each in COMMANDS if each not in WITH_KEYS), *WITH_KEYS)]
    code = f"""
for number, arguments in enumerate({commands!r}):
    sys.argv = [*arguments, "--help"]
    assert getattr(entry_points, arguments[0])() in (0, None)
    parser = {{"transformers"}} if number < {len(commands) - len(WITH_KEYS)} else set()
    assert not {{"torch", "transformers.training_args", "midus_hf.models", *parser}} & set(sys.modules), arguments
"""
    done = run_alone("midus", ["--help"], afterwards=f"from midus_hf.cli import entry_points{code}")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"sage: {command} " in done.stdout for command in COMMANDS)


def test_package_is_the_command_for_launchers():
    words = [sys.executable, "-m", "midus_hf", "flops", "--no-such-option"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "midus flops: No such option: --no-such-option. See 'midus flops --help'.\n"


@pytest.mark.parametrize("command", [one for one in (*COMMANDS, *SUBCOMMANDS, "midus") if one not in WITH_KEYS])
def test_each_help_fits_one_screen(command, as_command):
    run = as_command(command, columns="80")
    status, out, _ = run("--help")
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith(f"Usage: {command} ")
    assert run("-h").out == out
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.startswith("  ") and line.endswith("...")], "summaries are whole"
    assert run("--version")[:2] == (0, f"{__version__}\n")


@pytest.mark.parametrize("command", ["upscale", "midus", "midus train", "midus look"])
def test_command_without_words_shows_its_help(command, as_command):
    status, out, err = as_command(command)()
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: {command} ")
    assert as_command(command)("--version")[:2] == (0, f"{__version__}\n")


@pytest.mark.parametrize(("words", "line"), [
    ("midus trian", "midus: No such command 'trian'. Did you mean 'train'? See 'midus --help'."),
    ("midus look usge model", "midus look: No such command 'usge'. Did you mean 'usage'? See 'midus look --help'."),
    ("midus eval model --text_s text", "midus eval: No such option: --text-s (Possible options: --text). See 'midus eval --help'."),
    ("midus flops model --bach 2", "midus flops: No such option: --bach (Possible options: --batch). See 'midus flops --help'."),
    ("upscale strip --k", "upscale strip: No such option: --k. See 'upscale strip --help'."),
])  # fmt: skip
def test_typo_is_answered_with_the_nearest_word(words, line, as_command):
    program, *rest = words.split()
    assert as_command(program)(*rest) == (2, "", f"{line}\n")


PRINTS_THEN_WORKS = """
import sys
from pathlib import Path
from midus_hf.cli.command_line import command_line, run_command

app = command_line()

@app.command()
def work():
    print("beginning with \\xfc and \\udcff", flush=True)
    print("and more", file=sys.stderr, flush=True)
    print("x" * 100_000)
    Path("made").write_text("whole")
    print("done")

sys.exit(run_command(app, [], name="work"))
"""
FULL = "work: done, but not all output could be written: No space left on device\n"


@pytest.mark.parametrize(("stdout", "stderr", "status", "said"), [
    ("closed pipe", "pipe", 0, "and more\n"),
    ("/dev/full", "pipe", 3, f"and more\n{FULL}"),
    ("pipe", "/dev/full", 3, None),
    ("pipe", "closed pipe", 0, None),
    ("closed", "pipe", 0, "and more\n"),
    ("pipe", "closed", 0, None),
])  # fmt: skip
@pytest.mark.parametrize("options", [[], ["-u"]], ids=["buffered", "unbuffered"])
def test_output_that_cannot_be_written_costs_no_work(stdout, stderr, status, said, options, tmp_path):
    """Output goes to `| head`, to a full disk, or to a stream that the shell closed."""
    streams, closes = {}, ""
    for name, kind, number in (("stdout", stdout, 1), ("stderr", stderr, 2)):
        if kind == "closed pipe":
            reading, streams[name] = os.pipe()
            os.close(reading)
        else:
            streams[name] = open(kind, "w") if kind == "/dev/full" else subprocess.PIPE
        closes += f" {number}>&-" * (kind == "closed")
    words = ["sh", "-c", f'exec "$@"{closes}', "sh", sys.executable, *options, "-c", PRINTS_THEN_WORKS]
    done = subprocess.run(words, cwd=tmp_path, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, **streams)
    assert (tmp_path / "made").read_text() == "whole"
    assert done.returncode == status
    assert said is None or done.stderr == said
    assert stdout != "pipe" or done.stdout == f"beginning with \xfc and \\udcff\n{'x' * 100_000}\ndone\n"


def test_letters_that_a_terminal_lacks_are_escaped(tmp_path):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPOSITORY)}
    words, environment = [sys.executable, "-c", PRINTS_THEN_WORKS], {**os.environ, **ascii_only}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("beginning with \\xfc and \\udcff\n")


COMPLETED = [("midus ", "train"), ("midus flops --ba", "--batch"), ("upscale strip --ou", "--output")]


@pytest.mark.parametrize(("words", "completed"), COMPLETED)
def test_shells_complete_commands_and_options(words, completed, as_command, monkeypatch):
    program = words.split()[0]
    monkeypatch.setenv(f"_{program.upper()}_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert completed in as_command(program)().out.splitlines()  # the help would name the word within a line


def commands_with_a_device() -> Iterator[str]:
    for name, module in entry_points.COMMANDS.items():
        whole = typer.main.get_command(importlib.import_module(f"midus_hf.cli.{module}").app)
        for subcommand, part in {"": whole, **getattr(whole, "commands", {})}.items():
            if any(option.name == "device" for option in part.params):
                yield f"midus {name} {subcommand}".strip()


def test_tables_of_these_tests_have_every_command():
    assert ENTRY_POINTS == {name: f"midus_hf.cli.entry_points:{name}" for name in ("upscale", "midus")}
    assert set(MISSING_FILE) == set(WORK) == set(COMMANDS)
    assert set(commands_with_a_device()) == set(WITH_A_DEVICE)


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_words_end_with_status_2_and_one_line(command, room, as_command):
    wrong = "'--no-such-option' is not a key" if command in WITH_KEYS else "No such option: --no-such-opt"
    for words, message in (
        (["--no-such-option"], wrong),
        (MISSING_FILE[command], "absent"),
        (["--text", ""], ": --text is ''; expected a value. Fill it in"),
        (["--text="], ": --text is ''; expected a value. Fill it in"),
        ([""], ": an argument is ''; expected a value. Fill it in"),
        (["list", ""], ": an argument is ''; expected a value. Fill it in"),
    ):
        status, out, err = as_command(command)(*words)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(command)
        assert message in err


@pytest.mark.parametrize("command", WITH_A_DEVICE)
def test_absent_device_is_refused_before_loading(command, room, as_command, monkeypatch):
    monkeypatch.setattr("midus_hf.evaluation.harness.Tasks", lambda *names, **options: None)
    before = {path.name for path in room.iterdir()}
    status, out, err = as_command(command)(*WITH_A_DEVICE[command], "--device", "cuda:99")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "device is 'cuda:99', which cannot be used here (" in err
    assert {path.name for path in room.iterdir()} == before


# Mistakes that no model has to be loaded for, each with what is said.
OF_QUESTIONS = "data is 'absent', which does not exist; expected a folder with questions of tasks."
OF_TREE = "is 'absent', which does not exist; expected a tree of topics."
ADAPTER = "is 'adapter', an adapter of PEFT; expected a whole model."
TOLD_WITHOUT_TORCH = {
    "eval model --text text.txt --retriever absent": OF_TREE,
    "eval model --text text.txt --max-tokens 0": "max_tokens is 0; expected at least 1.",
    "eval model --tasks piqa --data absent": OF_QUESTIONS,
    "eval model --tasks piqa --include-path absent": "include_path is 'absent', which does not exist; expected a folder of task",
    "eval model --text empty.txt": "which is empty: it has no text with a visible character. Add text to it.",
    "eval model --text latin.txt": "not UTF-8, perhaps Windows-1252. Save it as UTF-8, or run: iconv -f WINDOWS-1252 -t UTF-8",
    "eval adapter --text a=b": ADAPTER,
    "look usage adapter --text a=b": ADAPTER,
    "look heads adapter --tasks piqa": ADAPTER,
    **{f"{words} --dtype int8": "dtype is 'int8'; expected auto, float32, bfloat16 or float16."
       for words in ("look usage model --text text.txt", "eval model --text text.txt", "ask model What?")},
    "compare compare.yaml --set base=./no": "base is './no', which does not exist",
    "compare compare.yaml --set seed=1": "config has no option 'seed'",
    "compare compare.yaml --set domain.a=no.txt": "domain.a is 'no.txt', which does not exist",
    "compare compare.yaml --set output_dir=text.txt": "output_dir is 'text.txt', a file",
    "eval model --text no.txt": "text is 'no.txt', which does not exist",
    "cluster build --corpus text.txt --embedding-model no/x --tokenizer t --output t": "embedding model is 'no/x', which",
    "look usage model --text text.txt --retriever absent": OF_TREE,
    "look depth model --text text.txt --max-tokens 0": "Invalid value for '--max-tokens': ",
    "look heads model --tasks ,": "tasks is ','; expected names of tasks, separated by commas.",
    "look heads model --tasks piqa --data absent": OF_QUESTIONS,
    "cluster build --corpus text.txt --embedding-model model --tokenizer model --output tree --window-tokens 0":
        "Invalid value for '--window-tokens': ",
    "cluster grow model --corpus utf-16.txt --output tree": "it is UTF-16. Save it as UTF-8, or run: iconv -f UTF-16 -t UTF-8",
    "cluster grow absent --corpus text.txt --output tree": OF_TREE,
    "cluster assign --tree absent --corpus text.txt --output paths.jsonl": OF_TREE,
    "cluster assign --tree model --corpus text.txt --output paths.txt": "'paths.txt'; expected a file ending in .jsonl.",
    "cluster assign --tree model --corpus absent.txt --output paths.jsonl": "corpus is 'absent.txt', which does not exist;",
    "cluster report --tree absent": OF_TREE,
    "edit delete absent/absent/absent --name word --output out": "is neither a folder nor a hub id; expected",
    "edit add model --corpus absent.jsonl --output out": "'absent.jsonl', which does not exist; expected a file, a folder",
}  # fmt: skip


def test_wrong_requests_are_refused_without_torch(room):
    code = f"""
for words in {[*TOLD_WITHOUT_TORCH]!r}:
    sys.argv = ["midus", *words.split()]
    assert entry_points.midus() == 2, words
    assert not {{"torch", "transformers", "datasets"}} & {{*sys.modules}}, words
"""
    done = run_alone("midus", ["--help"], afterwards=f"from midus_hf.cli import entry_points{code}", folder=room)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("midus ")]
    for line, message in zip(lines, TOLD_WITHOUT_TORCH.values(), strict=True):
        assert message in line, (line, message)


@pytest.mark.parametrize(("command", "recipe"), zip(WITH_KEYS, ("run.yaml", "sft.yaml"), strict=True))
def test_training_refuses_an_adapter_as_a_model(command, recipe, room, as_command):
    (room / recipe).write_text((room / recipe).read_text().replace(": model", ": adapter"))
    done = as_command(command)(recipe)
    assert done.status == 2
    assert ADAPTER in done.err


# Commands, what stops their work, and the status.
STOPS = [(command, RuntimeError, 1) for command in COMMANDS] + [
    ("midus edit", OSError, 1),
    ("midus edit", EOFError, 1),
]
STOPS += [
    ("midus edit", KeyboardInterrupt, 130),
    *((name, signal.SIGTERM, 143) for name in ("midus edit", "midus train")),
]


@pytest.mark.parametrize(("command", "stopped", "expected"), STOPS)
def test_stopped_work_has_its_status_and_may_clean_up(command, stopped, expected, room, as_command, monkeypatch):
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def fail(*arguments, **options):
        try:
            if stopped is signal.SIGTERM:
                signal.raise_signal(stopped)
            raise stopped("broken")
        finally:
            cleaned.append(command)

    function, words = WORK[command]
    monkeypatch.setattr(function, fail)
    status, out, err = as_command(command)(*words)
    raised = status == 1 and command in WITH_TRACEBACK
    lines = 0 if raised else 3 if status == 1 else 1  # an error has our last place after it, and that which raised it
    assert (status, out, err.count("\n")) == (expected, "", lines)
    assert raised or ("interrupted" if status > 1 else f"{stopped.__name__}: broken") in err
    assert cleaned == [command]
    assert signal.getsignal(signal.SIGTERM) == before


def work_of(module: str, body: str) -> Callable[..., Any]:
    names = {"__name__": module, "json": json, "RequestError": RequestError}
    exec(compile(f"def work(*_, **__):\n{textwrap.indent(body, '    ')}", f"/{module}.py", "exec"), names)
    return names["work"]


@pytest.fixture
def ended(room, as_command, monkeypatch) -> Callable[..., Outcome]:
    """Return how a command ends by a function with this body in a module of this name."""
    offered = [EntryPoint("bottleneck", "bottleneck.method", "midus_hf.memories")]
    monkeypatch.setattr("midus_hf.config.plugins.entry_points", lambda group: offered if "memories" in group else [])

    def run(module: str, body: str, command: str = "midus edit") -> Outcome:
        function, words = WORK[command]
        monkeypatch.setattr(function, work_of(module, body))
        return as_command(command)(*words)

    return run


REFUSAL = 'raise RequestError("n is 0")'
WITHIN_A_LIBRARY = f"""
def refuse(values):
    {REFUSAL}
json.loads("{{}}", object_hook=refuse)
"""


@pytest.mark.parametrize("body", [REFUSAL, WITHIN_A_LIBRARY])
@pytest.mark.parametrize("module", ["midus_hf.data.new", "bottleneck.options"])
def test_request_error_ends_a_command_with_status_2(module, body, ended):
    assert ended(module, body) == (2, "", "midus edit list: n is 0\n")
    assert ended(module, body, "midus train") == (2, "", "midus train: n is 0\n")


PLACE = '  File "/midus_hf.new.py", line 2, in work\n'


@pytest.mark.parametrize(("body", "said", "is_of_library"), [
    ('raise ValueError("n is 0")', "ValueError: n is 0", False),
    ('json.loads("no")', "JSONDecodeError: Expecting value: line 1 column 1 (char 0)", True),
    ('raise ExceptionGroup("two", [ValueError("n is 0")])', "ExceptionGroup: two (1 sub-exception)", False),
    ('{}["x"]', "KeyError: 'x'", False),
    (f'int("hf_{"a1" * 12}")', "ValueError: invalid literal for int() with base 10: '<hidden>'", False),
])  # fmt: skip
def test_error_of_a_library_is_a_failure_with_our_place(body, said, is_of_library, ended):
    status, out, err = ended("midus_hf.new", body)
    line, places = err.split("\n", 1)
    assert (status, out, line.split()) == (1, "", f"midus edit list: failed: {said}".split())
    assert re.fullmatch(re.escape(PLACE) + r'(  File ".*/json/decoder\.py", line \d+, in .*\n)?', places)
    assert (places != PLACE) is is_of_library
    assert ended("midus_hf.new", body, "midus train") == (1, "", "")  # a traceback


@pytest.mark.parametrize(
    "words", [["upscale", "--base", "~/b", "--method", "solar", "--dry-run"], ["midus flops", "~/b"]]
)
def test_path_in_unknown_home_is_refused(words, no_home, as_command):
    done = as_command(words[0])(*words[1:])
    assert (done.status, done.out) == (2, "")
    assert done.err == f"{words[0]}: a path begins with '~', and there is no such home folder. Give the whole path.\n"


@pytest.mark.parametrize("command", ["midus edit", "midus train"])
def test_full_disk_is_one_line_with_the_room_left(command, room, as_command, monkeypatch):
    function, words = WORK[command]
    monkeypatch.setattr(function, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    status, out, err = as_command(command)(*words)
    assert (status, out, err.count("\n")) == (1, "", 1)
    said = rf": a file could not be written: No space left on device \(.*{re.escape(str(room))} has .* MB free"
    assert re.search(said, err)


def test_forked_process_ends_silently_at_sigterm(monkeypatch, capfd):
    """Pools of processes are ended so, when their work is done."""

    def work(*arguments, **options):
        child = os.fork()
        if not child:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        ended.append(os.waitpid(child, 0)[1])
        raise RuntimeError

    ended: list[int] = []
    function, words = WORK["midus edit"]
    monkeypatch.setattr(function, work)
    assert run_in_process("midus edit", words, monkeypatch) == 1
    assert [os.WTERMSIG(status) for status in ended] == [signal.SIGTERM]
    assert capfd.readouterr().err.count("\n") == 3


def test_sigterm_that_is_ignored_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        function, words = WORK["midus edit"]
        monkeypatch.setattr(function, lambda *_, **__: signal.raise_signal(signal.SIGTERM) or 1 / 0)
        assert run_in_process("midus edit", words, monkeypatch) == 1
    finally:
        signal.signal(signal.SIGTERM, before)


INTERRUPTED_WHILE_IMPORTING = """
import signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, getattr(signal, sys.argv.pop(1)))
sys.meta_path.insert(0, Interrupting())
from midus_hf.cli import entry_points
name = sys.argv.pop(1).split()
sys.argv[0], sys.argv[1:1] = name[0], name[1:]
sys.exit(getattr(entry_points, name[0])())
"""


@pytest.mark.parametrize(("command", "handler", "status", "said"), [
    *((name, "default_int_handler", 130, f"{name}: interrupted\n") for name in ("upscale", "midus train")),
    ("midus flops", "SIG_IGN", 2, "midus flops: No such option: --no-such-option. See 'midus flops --help'.\n"),
])  # fmt: skip
def test_interruption_among_imports_is_one_line(command, handler, status, said):
    words = [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTING, handler, command, "--no-such-option"]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)


MOC = REPOSITORY / "configs" / "models" / "moc-371m.json"
EMBEDDINGS = 768 * json.loads(MOC.read_text())["vocab_size"]  # the head is tied to it


def test_flops_of_parts_and_sums_are_a_table(as_command):
    out = as_command("midus flops")(MOC).out
    rows = {row[0]: row[1:] for line in out.splitlines() if len(row := re.split(r"  +", line.strip())) == 3}
    flops = count_flops(json.loads(MOC.read_text()), 1024)
    expected = flops.parts | {"forward": flops.forward, "backward": flops.backward, "both": flops.total}
    assert {name: int(rows[name][0].replace(",", "")) for name in expected} == expected
    assert (rows["chapters: attention"][1], rows["forward"][1]) == ("22.4%", "100.0%")
    printed = " ".join(out.split())
    assert "371,292,932 parameters: 147,874,560 of the backbone, 201,375,744 values" in printed
    # A token reads 65 chapters of 64 tokens of width 768 in each of four layers.
    assert f"{147_874_560 + 22_042_628 + 4 * 65 * 64 * 768:,} activated by a token" in printed
    assert f"without embeddings {371_292_932 - EMBEDDINGS:,}, activated {182_696_708 - EMBEDDINGS:,}" in printed


def test_flops_name_the_bank(as_command):
    out = as_command("midus flops")(REPOSITORY / "configs" / "scratch" / "hier-ffn.json").out
    block = 3 * 192 * 8  # a hidden unit of all layers
    assert (
        f"bank: {(8 * 96 + 64 * 20) * block:,} parameters beside the checkpoint; a text fetches {(96 + 20) * block:,}"
        in out
    )


def test_flops_of_a_folder_and_of_other_sizes_are_json(tmp_path, as_command):
    shutil.copy(MOC, tmp_path / "config.json")
    report = json.loads(as_command("midus flops")(tmp_path, "--sequence-length", 128, "--batch", 2, "--json").out)
    flops = count_flops(json.loads(MOC.read_text()), 128, 2)
    assert (report["sequence_length"], report["batch"]) == (128, 2)
    assert (report["parts"], report["forward"], report["total"]) == (flops.parts, flops.forward, 3 * flops.forward)
    assert report["parameters"]["activated_without_embeddings"] == 182_696_708 - EMBEDDINGS


def test_flops_of_an_unknown_type_are_refused_without_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    code = "assert not {'torch', 'transformers', 'midus_hf.models'} & {*sys.modules}"
    done = run_alone("midus flops", [str(tmp_path)], afterwards=code)
    message = "midus flops: config has model_type = 'gpt2'; expected one of: llama"
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"upscale": {"trainable": "new"}}))
    return str(tmp_path / "model")


def read(*words, kind=TrainArguments):
    return read_arguments(kind, words)


def test_texts_get_keys_for_a_short_run_which_a_line_names(model, tmp_path, capsys):
    arguments = read("notes", "--model", model, "--output", str(tmp_path / "out"))
    assert (arguments.corpus, arguments.model_name_or_path) == ("notes", model)
    assert (arguments.sequence_length, arguments.num_train_epochs, arguments.learning_rate) == (256, None, None)
    assert arguments.eval_share == 0.05
    assert capsys.readouterr().err == (
        "for a short run: sequence_length=256, num_train_epochs=3 (more for fewer than 100 steps), "
        "per_device_train_batch_size=4, logging_steps=0.05, eval_share=0.05, learning_rate=measured\n"
    )


def test_texts_that_are_given_are_measured_in_place_of_a_share(model):
    arguments = read("notes", "--model", model, "--output", "o", "--eval_text", "held.txt")
    assert (arguments.eval_share, arguments.eval_on_start) == (0, True)


@pytest.mark.parametrize(
    ("trainable", "value_rate"), [("auto", 1e-2), ("new", 1e-2), ("[value]", 1e-2), ("all", None)]
)
def test_what_trains_decides_the_rate_of_values(trainable, value_rate, model):
    words = ["--model_name_or_path", model, "--output_dir", "o", "--trainable", trainable]
    given = read("notes", *words, "--learning_rate", "2e-3")
    assert (given.learning_rate, given.value_learning_rate) == (2e-3, value_rate)
    measured = read("notes", *words)
    assert (measured.learning_rate, measured.value_learning_rate) == (None, None)


def test_flags_replace_the_keys_of_a_short_run(model, capsys):
    words = ["--model", model, "--output", "o", "--learning_rate", "0.5", "--max_steps", "7", "--sequence_length", "8"]
    arguments = read("notes", *words)
    assert (arguments.learning_rate, arguments.max_steps, arguments.sequence_length) == (0.5, 7, 8)
    assert " learning_rate=" not in capsys.readouterr().err
    for flag in ("--num_train_epochs=2", "--max_steps=7"):
        assert read("notes", flag, *words[:4]).num_train_epochs is not None
        assert "num_train_epochs" not in capsys.readouterr().err, flag


def test_steps_of_a_recipe_count_before_epochs_which_a_line_says(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{corpus: c, model_name_or_path: m, output_dir: o, max_steps: 3}")
    arguments = read(str(recipe), "--num_train_epochs", "2", "--model", "other: one", "--output", "p")
    assert (arguments.model_name_or_path, arguments.output_dir, arguments.max_steps) == ("other: one", "p", 3)
    line = "max_steps=3 overrides num_train_epochs; pass --max_steps -1 to use epochs\n"
    assert capsys.readouterr().err == line
    arguments = read(str(recipe), "--num_train_epochs", "2", "--max_steps", "-1")
    assert (arguments.max_steps, arguments.num_train_epochs, capsys.readouterr().err) == (-1, 2, "")


def test_chats_are_fine_tuned_on_likewise(model):
    arguments = read("chats.jsonl", "--model", model, "--output", "o", kind=SftArguments)
    assert (arguments.dataset_name, arguments.max_length, arguments.learning_rate) == ("chats.jsonl", 256, None)
    assert arguments.eval_share == 0.05

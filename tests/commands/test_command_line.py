"""Every command ends by one table of exit statuses, and says in one line what is wrong with a request."""

import os
import signal
import subprocess
import sys

import pytest
from commands.installed import COMMANDS, REPOSITORY, run_alone, run_in_process

MISSING_FILE = {
    "upscale": ["--config", "absent"],
    "midus train": ["absent"],
    "midus sft": ["absent"],
    "midus eval": ["model", "--config", "absent"],
    "midus edit": ["import", "model", "absent", "--output", "out"],
    "midus flops": ["absent.json"],
    "midus cluster": ["report", "--tree", "absent"],
    "midus bank": ["list", "absent"],
    "midus look": ["heads", "model", "--tasks", "piqa", "--data", "absent"],
    "midus reproduce": ["midus", "1", "--root", "absent"],
    "midus compare": ["absent"],
}
# What does the work of a command, and a request for it.
WORK = {
    "upscale": ("upscalers.runs.upscale.upscale", ["--base", "model", "--method", "solar", "--output", "out"]),
    "midus train": ("midus_hf.training.run.train.prepare", ["run.yaml"]),
    "midus sft": ("midus_hf.sft.run.prepare", ["sft.yaml"]),
    "midus eval": ("midus_hf.evaluation.evaluate.evaluate", ["model", "--text", "text.txt"]),
    "midus edit": ("upscalers.chapters.listing.list_chapters", ["list", "model"]),
    "midus flops": ("upscalers.checkpoint.base_model.read_config_file", ["config.json"]),
    "midus cluster": ("midus_hf.clusters.run.open_build", ["report", "--tree", "tree"]),
    "midus bank": ("upscalers.banks.listing.list_bank", ["list", "model"]),
    "midus look": ("midus_hf.evaluation.harness.Tasks", ["heads", "model", "--tasks", "piqa", "--data", "."]),
    "midus reproduce": ("midus_hf.compare.reproduce.repository.Repository.tables", []),
    "midus compare": ("midus_hf.compare.running.Running.run", ["compare.yaml"]),
}
STATUS_OF_WORK = {RuntimeError: 1, OSError: 1, EOFError: 1, KeyboardInterrupt: 130}
WITH_TRACEBACK = ("midus train", "midus sft")


@pytest.fixture(autouse=True)
def room(tmp_path, monkeypatch):
    """A working directory with the files that requests name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text.")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.yaml").write_text("model_name_or_path: model\ncorpus: text.txt\noutput_dir: out\n")
    (tmp_path / "compare.yaml").write_text(
        "base: model\noutput_dir: out\nvariants: {full: {}}\ntrain: {corpus: text.txt, max_steps: 1}\ndomain: {text: text.txt}\n"
    )
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "sft.yaml").write_text("model_name_or_path: model\ndataset_name: chats.jsonl\noutput_dir: out\n")


def test_the_tables_have_every_command():
    assert set(MISSING_FILE) == set(WORK) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_option_is_2_and_one_line(command, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    done = run_alone(command, ["--no-such-option"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "No such option: --no-such-option" in done.stderr


@pytest.mark.parametrize("command", ["train", "sft"])
def test_the_package_exits_as_its_command(command):
    words = [sys.executable, "-m", "midus_hf", command, "--no-such-option"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"midus {command}: No such option: --no-such-option See 'midus {command} --help'.\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_file_is_2_and_one_line(command, monkeypatch, capsys):
    assert run_in_process(command, MISSING_FILE[command], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "absent" in err


@pytest.mark.parametrize("error", STATUS_OF_WORK)
@pytest.mark.parametrize("command", COMMANDS)
def test_work_that_does_not_get_done_is_1_or_130(command, error, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise error("broken")

    function, words = WORK[command]
    monkeypatch.setattr(function, fail)
    status = STATUS_OF_WORK[error]
    assert run_in_process(command, words, monkeypatch) == status
    out, err = capsys.readouterr()
    raised = status == 1 and command in WITH_TRACEBACK
    assert (out, err.count("\n")) == ("", 0 if raised else 1)
    if not raised:
        assert ("interrupted" if status == 130 else f"{error.__name__}: broken") in err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("words", "what"),
    [(["--text", ""], "--text"), (["--text="], "--text"), ([""], "an argument"), (["list", ""], "an argument")],
    ids=["option", "joined", "argument", "second"],
)
def test_an_empty_word_is_refused_by_every_command(command, words, what, monkeypatch, capsys):
    assert run_in_process(command, words, monkeypatch) == 2
    told = capsys.readouterr().err
    assert told.startswith(command) and f": {what} is ''; expected a value. Fill it in" in told


@pytest.mark.parametrize("command", COMMANDS)
def test_work_that_is_terminated_is_143_and_may_clean_up(command, monkeypatch, capsys):
    before, cleaned = signal.getsignal(signal.SIGTERM), []

    def terminated(*arguments, **options):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(command)

    function, words = WORK[command]
    monkeypatch.setattr(function, terminated)
    assert run_in_process(command, words, monkeypatch) == 143
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), cleaned) == ("", 1, [command]) and "interrupted" in err
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_that_a_command_forked_ends_at_sigterm_and_says_nothing(monkeypatch, capfd):
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
    function, words = WORK["midus bank"]
    monkeypatch.setattr(function, work)
    assert run_in_process("midus bank", words, monkeypatch) == 1
    assert [os.WTERMSIG(status) for status in ended] == [signal.SIGTERM] and capfd.readouterr().err.count("\n") == 1


def test_sigterm_that_is_ignored_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        function, words = WORK["midus bank"]
        monkeypatch.setattr(function, lambda *_, **__: signal.raise_signal(signal.SIGTERM) or 1 / 0)
        assert run_in_process("midus bank", words, monkeypatch) == 1
    finally:
        signal.signal(signal.SIGTERM, before)

"""The notebooks run from top to bottom, and their kept outputs are what their code gives, but for numbers."""

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from commands.installed import main_of
from compare.small_comparison import compare_in_this_process
from evaluation.byte_models import save_byte_model
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient
from pairs import by_default
from training.tiny_run import write_corpus

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
IDENTITY = "Identity(checked='logits', max_abs_diff=0.0)"
CLAIMS = {
    "first_steps": [IDENTITY, *["True"] * 4],
    "train_and_look_inside": [IDENTITY, *["True"] * 3],
    "compare": ["{'midus-hml': True, 'llama-pro': True, 'full': True}"],
}
"""What cells of each notebook show, in this order, whatever the base is."""
SMALLER = {
    "first_steps": {'"max_new_tokens": 32': '"max_new_tokens": 4'},
    "train_and_look_inside": {
        "num_new_layers=10": "num_new_layers=2",
        "sequence_length=256,\n": "sequence_length=32,\n",
        "max_steps=40": "max_steps=2",
        '"sequence_length": 256, "max_tokens": 2048': '"sequence_length": 32, "max_tokens": 64',
        "dict(sequence_length=256, max_tokens=1000)": "dict(sequence_length=32, max_tokens=64)",
        "--max-tokens 1000 --sequence-length 256": "--max-tokens 64 --sequence-length 32",
        "--max-tokens 500 --sequence-length 256": "--max-tokens 64 --sequence-length 32",
    },
    "compare": {
        '"max_steps": 16': '"max_steps": 2',
        '"sequence_length": 256': '"sequence_length": 32',
        '"eval_steps": 4': '"eval_steps": 1',
        '"num_new_layers": 10': '"num_new_layers": 2',
        '"num_new_layers": 3': '"num_new_layers": 2',
    },
}
"""What of each notebook's code is replaced, so that a tiny base takes seconds."""
NUM_LAYERS = {"first_steps": 5, "train_and_look_inside": 4, "compare": 4}
"""Of the tiny base: new layers are as many as divide it."""

Output = dict[str, str]
"""Data of an output by their types; of what is printed, the name of the stream is the type."""

_PATH_OF_A_MACHINE = re.compile(r"(?<![\w.~*:/])/(root|home|work|tmp|usr|dev|mnt|opt|Users|var)\b")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e-?\d+)?[%kMB]?")


def read(name: str) -> Any:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def make_smaller(notebook: Any, name: str) -> None:
    for old, new in SMALLER[name].items():
        (cell,) = [cell for cell in code_cells(notebook) if old in cell.source]
        cell.source = cell.source.replace(old, new)


def kept_outputs(notebook: Any) -> list[list[Output]]:
    """Return what each cell of code shows."""
    return [
        [{output.name: output.text} if output.output_type == "stream" else output["data"] for output in cell.outputs]
        for cell in code_cells(notebook)
    ]


class ThisProcess:
    """Runs cells as a kernel does, without a process of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.outputs: list[list[Output]] = []
        self._names: dict[str, Any] = {}
        monkeypatch.setattr("IPython.display.display", self._show)

    def run(self, notebook: Any) -> list[list[Output]]:
        """Run all cells, and return what each of them shows."""
        for cell in code_cells(notebook):
            self.outputs.append([])
            printed = io.StringIO()
            magic, _, script = cell.source.partition("\n")
            with contextlib.redirect_stdout(printed):
                if magic == "%%bash":
                    for line in script.replace("\\\n", " ").strip().splitlines():
                        run_command(shlex.split(os.path.expandvars(line)))
                else:
                    self._run_python(script if magic == "%%capture" else cell.source)
            if magic == "%%capture":
                self.outputs[-1].clear()
            elif printed.getvalue():
                self.outputs[-1].insert(0, {"stdout": printed.getvalue()})
        return self.outputs

    def _run_python(self, source: str) -> None:
        *statements, last = ast.parse(source).body
        if not isinstance(last, ast.Expr):
            statements.append(last)
        exec(compile(ast.Module(statements, []), "cell", "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), self._names)
            if value is not None:
                self._show(value)

    def _show(self, value: Any) -> None:
        self.outputs[-1].append(DisplayFormatter().format(value)[0])


def run_command(words: list[str]) -> None:
    """Run a command of a cell, one of ours in this process; it may say something on standard error only where that goes to a file."""
    files = {sign: words[words.index(sign) + 1] for sign in (">", "2>") if sign in words}
    words = words[: min([len(words), *(words.index(sign) for sign in files)])]
    if words[0] != "midus":
        print(subprocess.run(words, check=True, capture_output=True, text=True).stdout, end="")
        return
    printed, warned, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = words
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(warned):
            status = main_of("midus")()
    except SystemExit as stopped:
        status = stopped.code
    finally:
        sys.argv = before
    assert not status, warned.getvalue()
    assert "2>" in files or not warned.getvalue(), warned.getvalue()
    if ">" in files:
        Path(files[">"]).write_text(printed.getvalue())
    else:
        print(printed.getvalue(), end="")


def kind(output: Output) -> str:
    """Return what of an output does not depend on the base: of a table the title and the head, of a text all but its numbers."""
    if "image/png" in output:
        return "picture"
    if "text/markdown" in output:
        return _NUMBER.sub("N", re.split(r"\n\| ?---", output["text/markdown"])[0])
    if "stdout" in output:
        return "printed"
    return _NUMBER.sub("N", output["text/plain"])


def kinds(outputs: list[list[Output]]) -> list[list[str]]:
    return [list(map(kind, of_cell)) for of_cell in outputs]


def assert_claims_hold(name: str, outputs: list[list[Output]]) -> None:
    texts = [output.get("text/plain") for of_cell in outputs for output in of_cell]
    assert [text for text in texts if text in CLAIMS[name]] == CLAIMS[name]


@pytest.fixture
def tiny_room(tmp_path, monkeypatch) -> Path:
    """Return a folder for tiny bases and what is made of them, in place of what notebooks fetch; comparisons run in this process."""
    texts = SimpleNamespace(train=write_corpus(tmp_path / "train"), held_out=write_corpus(tmp_path / "held_out"))
    articles = write_corpus(tmp_path / "articles")
    monkeypatch.setattr("material.addresses.addresses", lambda: texts)
    monkeypatch.setattr("material.articles.articles", lambda: articles)
    monkeypatch.setattr("material.excerpts.address_excerpts", lambda: texts.held_out)
    monkeypatch.setattr("material.excerpts.article_excerpts", lambda: articles)
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    compare_in_this_process(monkeypatch)
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    monkeypatch.setenv("BASE", str(tmp_path / "base"))
    for variable in ("HELD_OUT", "OTHER", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.setenv(variable, "")  # cells set them: they are put back
    return tmp_path


@pytest.mark.parametrize("name", by_default(["first_steps", "train_and_look_inside"], CLAIMS))
def test_a_tiny_base_gives_outputs_of_the_kept_kinds(name, tiny_room, monkeypatch):
    save_byte_model("llama", tiny_room / "base", num_hidden_layers=NUM_LAYERS[name])
    notebook = read(name)
    kept = kept_outputs(notebook)
    make_smaller(notebook, name)
    outputs = ThisProcess(monkeypatch).run(notebook)
    assert_claims_hold(name, outputs)
    assert kinds(outputs) == kinds(kept)


@pytest.mark.parametrize("name", CLAIMS)
def test_kept_outputs_are_of_one_whole_run(name):
    notebook = read(name)
    outputs = kept_outputs(notebook)
    assert_claims_hold(name, outputs)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(outputs) + 1))
    assert any("image/png" in output for of_cell in outputs for output in of_cell)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    texts = [
        text for of_cell in outputs for output in of_cell for type_, text in output.items() if type_ != "image/png"
    ]
    assert not any("stderr" in output for of_cell in outputs for output in of_cell)
    assert not any("\x1b" in text or _PATH_OF_A_MACHINE.search(text) for text in texts)


def test_every_notebook_is_run_and_its_links_lead_to_files():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(CLAIMS)
    for name in CLAIMS:
        texts = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
        links = [link for text in texts for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        assert links and [link for link in links if not (NOTEBOOKS / link).is_file()] == []


@pytest.mark.material
@pytest.mark.product
@pytest.mark.parametrize("name", CLAIMS)
def test_it_runs_in_jupyter_on_the_base_that_it_fetches(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WORK", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = read(name)
    kept = kept_outputs(notebook)
    position = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=3600, coalesce_streams=True, resources=position).execute()
    outputs = [[one for one in of_cell if "stderr" not in one] for of_cell in kept_outputs(notebook)]
    assert_claims_hold(name, outputs)
    assert kinds(outputs) == kinds(kept)

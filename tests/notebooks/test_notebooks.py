"""The notebooks run from top to bottom, and their kept outputs are what their code gives, except numbers."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from compare.fake_results import BASE, comparison, result
from evaluation.byte_models import save_byte_model
from nbclient import NotebookClient
from pairs import by_default

from midus_hf.compare.report import advice, cautions, findings, plan_table, variants_table, write_report

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
IDENTITY = "Identity(checked='logits', max_abs_diff=0.0)"
# What cells of each notebook show, in this order, whatever the base is.
CLAIMS = {
    "tour": [IDENTITY, "True", IDENTITY, "True"],
    "train_and_look_inside": [IDENTITY, *["True"] * 3],
    "compare": ["{'midus-hml': True, 'llama-pro': True, 'full': True}"],
}
# What of a notebook's code is replaced, so that a base of five layers takes seconds.
SMALLER = {
    r"(num_new_layers(=|\": ))\d+": r"\g<1>5",
    r"str\(TEXTS\.train\)": "str(TEXTS.held_out)",
    r"str\(TRAIN\)": "str(HELD_OUT)",
    r"str\(addresses\(\)\.train\)": "str(addresses().held_out)",
    r"(max_steps(=|\": ))\d+": r"\g<1>2",
    r"(sequence.length(=|\": | ))256": r"\g<1>32",
    r"(max.tokens(=|\": | ))\d+": r"\g<1>64",
    r'"max_new_tokens": 32': '"max_new_tokens": 4',
}

# Data of an output by their types; of what is printed, the name of the stream is the type.
Output = dict[str, str]

_PATH_OF_A_MACHINE = re.compile(r"(?<![\w.~*:/])/(root|home|work|tmp|usr|dev|mnt|opt|Users|var)\b")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e-?\d+)?[%kMB]?")
_FILE = re.compile(r"[\w-]+\.(?:html|jsonl?|md|png|safetensors|txt|yaml)\b")


def read(name: str) -> Any:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kept_outputs(notebook: Any) -> list[list[Output]]:
    """Return what each cell of code shows."""
    return [
        [{output.name: output.text} if output.output_type == "stream" else output["data"] for output in cell.outputs]
        for cell in code_cells(notebook)
    ]


def executed(notebook: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Output]]:
    """Run a notebook in Jupyter, whose cells write to `work`; return what each cell of code shows, except messages."""
    monkeypatch.setenv("WORK", str(work))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    position = {"metadata": {"path": str(NOTEBOOKS)}}
    NotebookClient(notebook, timeout=3600, coalesce_streams=True, resources=position).execute()
    return [[one for one in of_cell if "stderr" not in one] for of_cell in kept_outputs(notebook)]


def heading(text: str) -> list[str]:
    """Return the words of a printed table's title and head, sorted, since rows say where a head breaks; nothing of other text."""
    above, *below = re.split(r"^[┡─].*$", text, maxsplit=1, flags=re.MULTILINE)
    return sorted(re.findall(r"[^\s┏┳━┓┃]+", above)) if below else []


def kind(output: Output) -> str:
    """Return what of an output does not depend on the base: titles and heads of tables, named files, a text without its numbers."""
    if "image/png" in output:
        return "image/png"
    if "stdout" in output:
        return " ".join([*heading(output["stdout"]), *_FILE.findall(output["stdout"])])
    if "text/markdown" in output:
        return _NUMBER.sub("N", re.split(r"\n\| ?---", output["text/markdown"])[0])
    return _NUMBER.sub("N", output["text/plain"])


def kinds(outputs: list[list[Output]]) -> list[list[str]]:
    return [[*map(kind, of_cell)] for of_cell in outputs]


def assert_claims_hold(name: str, outputs: list[list[Output]]) -> None:
    texts = [output.get("text/plain") for of_cell in outputs for output in of_cell]
    assert [text for text in texts if text in CLAIMS[name]] == CLAIMS[name]


@pytest.mark.material
@pytest.mark.parametrize("name", by_default(["tour", "train_and_look_inside"], CLAIMS))
def test_notebook_runs_on_a_tiny_base(name, tmp_path, monkeypatch):
    notebook = read(name)
    kept = kept_outputs(notebook)
    for cell in code_cells(notebook):
        for pattern, instead in SMALLER.items():
            cell.source = re.sub(pattern, instead, cell.source)
    base = save_byte_model("llama", tmp_path / "smollm2-135m-instruct-float32", num_hidden_layers=5)
    monkeypatch.setenv("BASE", str(base))
    outputs = executed(notebook, tmp_path / "work", monkeypatch)
    assert_claims_hold(name, outputs)
    assert kinds(outputs) == kinds(kept)


@pytest.mark.parametrize("name", CLAIMS)
def test_kept_outputs_are_of_one_whole_run(name):
    notebook = read(name)
    outputs = kept_outputs(notebook)
    assert_claims_hold(name, outputs)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(outputs) + 1))
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    data = [item for of_cell in outputs for output in of_cell for item in output.items()]
    types, texts = {type_ for type_, _ in data}, [text for type_, text in data if type_ != "image/png"]
    assert "image/png" in types
    assert "stderr" not in types
    assert not any("\x1b" in text or _PATH_OF_A_MACHINE.search(text) for text in texts)


def test_comparison_shows_the_report_of_today(tmp_path):
    texts = [output.get("stdout", "") for of_cell in kept_outputs(read("compare")) for output in of_cell]
    plan, printed = filter(heading, texts)
    runs = [result("midus-hml", [0.5]), result("llama-pro", [0.25]), result("full", [0.75])]
    found = findings(comparison([run.variant for run in runs], validation={}), BASE, runs, {})
    for text, table in ((plan, plan_table([])), (printed, variants_table(found))):
        assert heading(text) == sorted(" ".join([table.title, *table.head]).split())
    assert _FILE.findall(printed) == [write_report(tmp_path, found).name]
    beginnings = [" ".join(sentence.split()[:2]) for sentence in (*cautions(found), *advice(found))]
    assert re.findall("|".join(beginnings), printed) == beginnings


def test_notebooks_are_run_and_link_to_files():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(CLAIMS)
    for name in CLAIMS:
        texts = [cell.source for cell in read(name).cells if cell.cell_type == "markdown"]
        links = [link for text in texts for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)]
        assert links
        assert [link for link in links if not (NOTEBOOKS / link).is_file()] == []


@pytest.mark.material
@pytest.mark.product
@pytest.mark.parametrize("name", CLAIMS)
def test_notebook_runs_on_the_base_it_fetches(name, tmp_path, monkeypatch):
    notebook = read(name)
    kept = kept_outputs(notebook)
    outputs = executed(notebook, tmp_path, monkeypatch)
    assert_claims_hold(name, outputs)
    assert kinds(outputs) == kinds(kept)

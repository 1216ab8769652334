"""The notebook runs from top to bottom, and shows what it says it shows."""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from evaluation.byte_models import save_byte_model
from nbclient import NotebookClient
from training.tiny_run import write_corpus

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


def shown_here(notebook: Any) -> list[str]:
    """What cells show that are run in this process."""
    shown: list[str] = []
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            *statements, last = ast.parse(cell.source).body
            if not isinstance(last, ast.Expr):
                statements.append(last)
            exec(compile(ast.Module(statements, []), str(NOTEBOOK), "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
                shown += [] if value is None else [repr(value)]
    return shown


def assert_claims_hold(shown: list[str]) -> None:
    assert "Identity(checked='logits', max_abs_diff=0.0)" in shown
    assert shown.count("True") == 4


def test_its_claims_hold_of_a_tiny_base(tmp_path, monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("WORK", str(tmp_path))
    monkeypatch.setenv("BASE", str(save_byte_model("llama", tmp_path / "base", num_hidden_layers=5)))
    texts = SimpleNamespace(held_out=write_corpus(tmp_path / "texts"))
    monkeypatch.setattr("material.addresses.addresses", lambda: texts)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert_claims_hold(shown_here(notebook))


@pytest.mark.material
@pytest.mark.product
def test_it_runs_in_jupyter_on_the_base_that_it_fetches(tmp_path, monkeypatch):
    monkeypatch.setenv("WORK", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert_claims_hold(
        [
            output["data"]["text/plain"]
            for cell in notebook.cells
            if cell.cell_type == "code"
            for output in cell.outputs
            if output.output_type == "execute_result"
        ]
    )

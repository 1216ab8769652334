"""The notebook runs from top to bottom, and shows what it says it shows."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


@pytest.mark.material
def test_the_quickstart_runs_and_its_claims_hold(tmp_path, monkeypatch):
    monkeypatch.setenv("WORK", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    results = [
        output["data"]["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]
    assert "Identity(checked='logits', max_abs_diff=0.0)" in results
    assert results.count("True") == 4

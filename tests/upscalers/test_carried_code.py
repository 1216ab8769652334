"""`upscale inspect` says whether the code that a checkpoint carries is what the installed version generates."""

import pytest
from training.tiny_run import save_upscaled

from midus_hf.version import __version__
from upscalers.runs.inspection import inspect_code


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_upscaled("llama", tmp_path_factory.mktemp("carried"))


@pytest.fixture
def code(model):
    """Return the carried file, and put its text back afterwards."""
    path = model / "modeling_midus.py"
    text = path.read_text()
    yield path
    path.write_text(text)


def test_generated_code_is_known_as_such(model, command):
    assert inspect_code(model) == {"file": "modeling_midus.py", "version": __version__, "as_generated": True}
    told = " ".join(command("inspect", model).out.split())
    assert f"carried code modeling_midus.py, as midus-hf {__version__} generates it" in told


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "import torch\n",
            "import torch\nimport socket\n",
            f"is NOT what midus-hf {__version__} generates: read it before",
        ),
        (
            f"midus-hf {__version__} wrote",
            "midus-hf 9.9.9 wrote",
            "written by midus-hf 9.9.9; install that version to compare it",
        ),
        (f"midus-hf {__version__} wrote", "Somebody wrote", f"is NOT what midus-hf {__version__} generates"),
    ],
    ids=["a line more", "another version", "no header"],
)
def test_changed_code_is_told(model, code, command, old, new, line):
    code.write_text(code.read_text().replace(old, new, 1))
    assert inspect_code(model)["as_generated"] is False
    assert line in " ".join(command("inspect", model).out.split())


def test_a_checkpoint_without_code_has_none_to_tell_of(model, code, command):
    code.unlink()
    assert inspect_code(model) is None
    assert "carried code" not in command("inspect", model).out

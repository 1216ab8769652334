"""Test files are chosen by what they import; in doubt they are chosen."""

from pathlib import Path

import pytest

from scripts import imports
from scripts.imports import tests_of as chosen_by

FILES = {
    "midus_hf/__init__.py": "import importlib\ndef __getattr__(name): return importlib.import_module(f'midus_hf.{name}')\n",
    "midus_hf/__main__.py": "from midus_hf import cli\n",
    "midus_hf/cli.py": "import importlib\ndef main(name): importlib.import_module('midus_hf.data.' + name)\n",
    "midus_hf/data/__init__.py": "", "midus_hf/data/rows.py": "def read():\n    from midus_hf.data import table\n",
    "midus_hf/data/table.py": "", "midus_hf/data/table.json": "{}", "midus_hf/ops.py": "",
    "tests/conftest.py": "from helper import made\n", "tests/helper.py": "", "tests/data/conftest.py": "",
    "tests/data/test_rows.py": "from midus_hf.data.rows import read\n", "tests/test_ops.py": "from midus_hf import ops\n",
    "tests/test_recipes.py": "from pathlib import Path\nCONFIGS = Path(__file__).parent / 'configs' / '.'\n",
    "tests/test_import_layers.py": "from scripts.imports import ROOT\nROOMS = (ROOT / 'midus_hf').iterdir()\n",
    "tests/test_program.py": "run('from midus_hf.data import table', '-m midus_hf')\n",
    "tests/test_docs.py": "pages = ROOT.glob('*.md')\n", "configs/a.yaml": "", "README.md": "", "Makefile": "",
}  # fmt: skip
EVERY = {name for name in FILES if "/test_" in name}


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "ROOT", tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for cached in (imports._modules, imports.files_of):
        cached.cache_clear()
    yield tmp_path
    for cached in (imports._modules, imports.files_of):
        cached.cache_clear()


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("midus_hf/__init__.py", {"data/test_rows", "test_ops", "test_program"}),  # every import of the package runs
        ("midus_hf/data/table.py", {"data/test_rows", "test_program"}),
        ("midus_hf/data/table.json", {"data/test_rows", "test_program"}),
        ("midus_hf/ops.py", {"test_ops", "test_program"}),
        ("midus_hf/cli.py", {"test_program"}),
        ("tests/data/conftest.py", {"data/test_rows"}),
        ("tests/test_ops.py", {"test_ops"}),
        ("configs/a.yaml", {"test_recipes"}),
        ("README.md", set()),
    ],
)
def test_tests_are_chosen_by_what_they_reach(changed, tests, repository):
    chosen = {str(file.relative_to(repository)) for file in chosen_by([repository / changed])}
    rooms = {"test_import_layers"} if changed.startswith("midus_hf") else set()
    assert chosen == {f"tests/{name}.py" for name in tests | rooms | {"test_docs"}}


@pytest.mark.parametrize("changed", ["Makefile", "tests/helper.py", "midus_hf/gone.py"])
def test_shared_and_removed_files_choose_every_test(changed, repository):
    assert {str(file.relative_to(repository)) for file in chosen_by([repository / changed])} == EVERY
    assert chosen_by([]) == []


def test_changes_since_a_branch_include_untracked_files(repository):
    def git(*words: str) -> None:
        line = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        imports.subprocess.run(line, cwd=repository, check=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "first")
    git("checkout", "-qb", "other")
    git("commit", "-qam", "second", "--allow-empty")
    git("mv", "README.md", "READ.md")
    Path(repository, "new.py").touch()
    assert {file.name for file in imports.changed_since("main")} == {"README.md", "READ.md", "new.py"}

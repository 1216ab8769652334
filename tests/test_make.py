"""`make test` names what failed, and `make test-all` draws a setting that can be drawn again."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from midus_hf.ops.dispatch import private_torch
from midus_hf.version import NEWEST_TRIED_TRANSFORMERS
from scripts.newest_release import newest_releases

ROOT = Path(__file__).parent.parent
CONSTRAINTS = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
PYTHON = """#!/bin/sh
case "$*" in
*"-m pytest"*) echo "ran $0 threads=$OMP_NUM_THREADS aten=$ATEN_CPU_CAPABILITY onednn=$ONEDNN_MAX_CPU_ISA $*" >> "$LOG";;
*random.choice*) exec "$REAL" "$@";;
*imports.py*) echo "$SELECTED"; exit;;
*newest_release*) echo "$NEWEST"; [ -n "$NEWEST" ]; exit $?;;
*"-m pip install"*) echo "$*" >> "$LOG.pip"; exit;;
*) exit 0;;
esac
while [ $# -gt 0 ]; do [ "$1" = --failed-to ] && list=$2; shift; done
case "$0" in *"$FAILING") echo "tests/test_a.py::test_b[1]" >> "$list"; exit 1;; esac
"""
ENVIRONMENTS = {"VENV": "newest", "OLDEST": "oldest", "RELEASE": "release"}
UNSET = ("MAKE", "MFLAGS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "LOT", "FAILURES", "CHANGED")


@pytest.fixture
def make(tmp_path):
    """Run `make` with environments whose Python notes what it is told; a part fails with those in `failing`."""
    for name in ENVIRONMENTS.values():
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").write_text(PYTHON, encoding="utf-8")
        (tmp_path / name / "bin" / "python").chmod(0o755)
        (tmp_path / name / "installed").touch()

    def run(*words: str, failing: str = "no/bin/python", newest: str = "", changed: str = "") -> tuple:
        log = tmp_path / "log"
        log.write_text("")
        told = {"LOG": str(log), "REAL": sys.executable, "FAILING": failing, "NEWEST": newest, "SELECTED": changed}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(UNSET)}
        command = ["make", *words, *(f"{key}={tmp_path / name}" for key, name in ENVIRONMENTS.items()), "WORKERS=1"]
        done = subprocess.run(command, cwd=ROOT, env=inherited | told, capture_output=True, text=True)
        return done.returncode, done.stdout.splitlines(), log.read_text().splitlines()

    return run


def test_make_test_names_what_failed(make):
    status, report, ran = make("test")
    assert status == 0
    assert len(ran) == 1
    assert not any("Failed" in line for line in report)
    status, report, ran = make("test", failing="newest/bin/python")
    assert status != 0
    assert [Path(line.split()[1]).parts[-3] for line in ran] == ["newest"]
    assert report[-2:] == ["Failed: test-newest", "test-newest:tests/test_a.py::test_b[1]"]


def test_changed_files_choose_the_tests(make):
    status, _, (ran,) = make("test", "CHANGED=1", changed="tests/test_a.py tests/ops/test_b.py")
    assert status == 0
    assert ran.endswith(" tests/test_a.py tests/ops/test_b.py")
    assert make("test", "CHANGED=1")[::2] == (0, [])


@pytest.mark.parametrize(("lot", "setting"), [
    ("avx2", "threads=1 aten=avx2 onednn=AVX2"),
    ("sse41", "threads=1 aten= onednn=SSE41 "),
    ("two-threads", "threads=2 aten= onednn= "),
    ("seed-17", "--hypothesis-seed=17 "),
])  # fmt: skip
def test_lot_can_be_chosen(lot, setting, make):
    status, report, (ran,) = make("test-lot", f"LOT={lot}")
    assert status == 0
    assert setting in ran
    assert any(f"make test-lot LOT={lot}" in line for line in report)


def test_make_test_all_ends_with_a_lot(make):
    status, report, ran = make("test-all", failing="oldest/bin/python")
    assert status != 0
    assert len(ran) == 3
    assert "--product" in ran[0]
    assert sum(line.startswith("The lot fell on ") for line in report) == 1
    assert report[-2:] == ["Failed: test-oldest-pairs", "test-oldest-pairs:tests/test_a.py::test_b[1]"]
    status, report, ran = make("test-lot", "LOT=avx3")
    assert status != 0
    assert not ran
    assert "LOT is 'avx3'; expected avx2, sse41, two-threads or seed-NUMBER." in report


def test_make_test_hub_runs_all_of_the_day(make):
    status, _, (ran,) = make("test-hub")
    assert status == 0
    assert ran.endswith(" --product tests/hub")


PINNED = {name: CONSTRAINTS[name] for name in ("torch", "transformers")}
NEWER = {"torch": "2.99.1", "transformers": "5.99.0"}


# Packages that are asked for, the newest of each, and the torch that is installed.
@pytest.mark.parametrize(("asked", "found", "torch"), [
    ("torch transformers", NEWER, NEWER["torch"]),
    ("torch transformers", PINNED | {"torch": NEWER["torch"]}, NEWER["torch"]),
    ("torch transformers", NEWER | {"torch": PINNED["torch"]}, PINNED["torch"]),
    ("transformers", {"transformers": NEWER["transformers"]}, PINNED["torch"]),
])  # fmt: skip
def test_newer_release_runs_what_depends_on_it(asked, found, torch, make, tmp_path):
    failures = tmp_path / "failures"
    words = ("test-newest-release", f"RELEASED={asked}", f"FAILURES={failures}")
    newest = "\n".join(f"{name}=={version}" for name, version in found.items())
    status, _, (ran,) = make(*words, newest=newest, failing="release/bin/python")
    assert status != 0
    assert "release/bin/python" in ran
    assert all(folder in ran for folder in ("tests/models", "tests/sites", "tests/memory", "tests/carried"))
    assert ("tests/ops" in ran) == ("torch" in asked)
    installs = (tmp_path / "log.pip").read_text().splitlines()
    assert [f" torch=={torch}" in line for line in installs] == [True, True]
    assert failures.read_text() == "tests/test_a.py::test_b[1]\n"


NO_NEWER = {
    "\n".join(f"{name}=={version}" for name, version in PINNED.items()): "constraints.txt has the newest: torch==",
    f"transformers=={PINNED['transformers']}": "constraints.txt has the newest: transformers==",
    "": "the registry does not answer",
}


@pytest.mark.parametrize(("newest", "line"), NO_NEWER.items())
def test_missing_newer_release_gives_one_line(newest, line, make):
    status, report, ran = make("test-newest-release", newest=newest)
    assert status == 0
    assert len(report) == 1
    assert line in report[0]
    assert not ran


def test_newest_releases_are_those_pip_would_install(monkeypatch):
    report = {"install": [{"metadata": {"name": "torch", "version": "2.99.1+cu130"}}]}
    pip = Mock(return_value=subprocess.CompletedProcess([], 0, stdout=json.dumps(report)))
    monkeypatch.setattr(subprocess, "run", pip)
    assert newest_releases(["torch"]) == ["torch==2.99.1"]
    assert [each for each in pip.call_args.args[0] if each.startswith("torch")] == re.findall(
        r'"(torch>=[^"]*)"', PYPROJECT
    )
    pip.side_effect = subprocess.CalledProcessError(1, "pip")
    assert newest_releases(["torch"]) is None


def test_files_name_the_same_tried_versions():
    assert PINNED["transformers"].startswith(f"{NEWEST_TRIED_TRANSFORMERS}.")
    tried = {}
    for name in PINNED:
        oldest = re.search(rf"^{name}==(\d+\.\d+)", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE)[1]
        ((requirement, tried[name]),) = re.findall(rf'"{name}>=([\d.]+)[^"]*",  # tried: (\S+ to \S+)', PYPROJECT)
        assert requirement == oldest == tried[name].split()[0]
    assert tried["transformers"].endswith(f" to {NEWEST_TRIED_TRANSFORMERS}")
    assert f"Transformers {tried['transformers']} and torch {tried['torch']}" in (ROOT / "README.md").read_text()
    assert f"checked with {tried['torch']};" in inspect.getdoc(private_torch)


def test_constraints_have_digests():
    def versions(name: str, ends: str = "") -> set[str]:
        lines = re.findall(rf"^([\w.-]+==[^\s;]+).*{ends}$", (ROOT / name).read_text(), re.MULTILINE)
        return {line.lower().replace("_", "-") for line in lines}

    digested = versions("constraints-hashed.txt", r"\\\n    --hash=sha256:[0-9a-f]{64}.*")
    torch = {line for line in versions("constraints.txt") if line.startswith("torch==")}
    remedy = "run the command at the top of constraints-hashed.txt"
    assert torch, remedy
    assert digested == versions("constraints-hashed.txt") == versions("constraints.txt") - torch, remedy


def test_mutants_name_files_that_exist():
    """A path that is gone would leave a file to tests that never run it."""
    tree = ast.parse((ROOT / "scripts" / "mutants.py").read_text())
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paths = {path for text in strings for path in re.findall(r"\b(?:midus_hf|upscalers|tests)/[\w/.]*[\w]", text)}
    assert len(paths) > 20
    assert not {path for path in paths if not (ROOT / path).exists()}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (table,) = [ast.literal_eval(node.value) for node in assigned if "UPSCALERS" in ast.dump(node.targets[0])]
    assert table.keys() <= {file.stem for file in (ROOT / "upscalers").rglob("*.py")}
    for name in " ".join(table.values()).split():
        path = ROOT / "tests" / "upscalers" / name
        assert path.is_dir() or path.with_name(f"test_{path.name}.py").is_file(), name

"""The site that `make docs` builds: without a warning or a dead link, and with every public name."""

import ast
import importlib
import os
import re
import subprocess
import zlib
from pathlib import Path

import pytest
from processes.warm import run_warm

ROOT = Path(__file__).parents[2]
for _package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(_package)


def sphinx(source: Path, output: Path, builder: str) -> subprocess.CompletedProcess:
    (options,) = re.findall(r"-m sphinx (.*--write-all)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    code = "import sys; from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))"
    words = [*options.split(), "--builder", builder, "--conf-dir", ROOT / "docs", source, output]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return run_warm(code, *words, timeout=900, PYTHONPATH=path)


def public_names() -> set[str]:
    names = set()
    for package in ("midus_hf", "upscalers"):
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                    names |= {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    return names


@pytest.mark.product
def test_site_builds_with_every_public_name(tmp_path):
    result = sphinx(ROOT, tmp_path, "html")
    assert (result.returncode, result.stderr) == (0, "")
    *_, inventory = (tmp_path / "objects.inv").read_bytes().split(b"\n", 4)
    entries = (line.split(" ") for line in zlib.decompress(inventory).decode().splitlines())
    documented, names = {name for name, kind, *_ in entries if kind.startswith("py:")}, public_names()
    assert {"upscalers.upscale", "midus_hf.training.set_trainable", "midus_hf.memories"} <= names
    assert names - documented == set(), "name them on a page of docs/reference"


LISTED = "# Documentation\n\n**Use**\n\n- An [other](other.md) page\n"
DEAD_LINKS = {
    "[page](absent.md)": "cross-reference target not found: 'absent.md'",
    "[heading](README.md#absent)": "local id not found in doc 'docs/README': 'absent'",
    "[heading](#absent)": "cross-reference target not found: 'absent'",
    "[file](../absent.csv)": "cross-reference target not found: '../absent.csv'",
    "[folder](../absent)": "cross-reference target not found: '../absent'",
    "![picture](absent.png)": "image file not readable: docs/absent.png",
}


def test_dead_links_and_unlisted_pages_fail_the_build(tmp_path):
    readmes = {"docs/README.md": f"{LISTED}- [Methods](methods/README.md)\n", "docs/methods/README.md": "# Methods\n"}
    unlisted, links = dict.fromkeys(("docs/new.md", "docs/methods/new.md"), "# New\n"), "\n\n".join(DEAD_LINKS)
    result = built(tmp_path, {**readmes, "docs/other.md": f"# Other\n\n{links}\n", **unlisted})
    assert result.returncode == 1
    assert [warning for warning in DEAD_LINKS.values() if warning not in result.stderr] == []
    for page in unlisted:
        assert f"{page}: WARNING: document isn't included in any toctree" in result.stderr
        with (tmp_path / page).with_name("README.md").open("a", encoding="utf-8") as readme:
            readme.write("\nA [new](new.md) page.\n")
    # Links to pages, headings, files and folders that are there.
    links = "[a](README.md) [b](../README.md#first) [c](#there) [d](../configs) [e](../configs/one.yaml)"
    alive = {"docs/other.md": f"# Other\n\n## There\n\n{links}\n", "configs/one.yaml": "a: 1\n"}
    result = built(tmp_path, alive)
    assert (result.returncode, result.stderr) == (0, "")


def built(folder: Path, pages: dict[str, str]) -> subprocess.CompletedProcess:
    project = {"README.md": "# Project\n\n## First\n", "CHANGELOG.md": "# Changes\n", "experiments/LOG.md": "# Log\n"}
    for name, text in {**project, **pages}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return sphinx(folder, folder / "outputs", "dummy")

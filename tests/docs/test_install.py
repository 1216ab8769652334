"""How this package is installed is said in one place, the README, by a way that works: from a clone."""

import re
from pathlib import Path

from midus_hf.config.wording import install_extra

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FROM_A_REGISTRY = re.compile(r"midus[-_]hf\[[a-z,]+\]|pip install [^.]*midus[-_]hf")
# Commands that the README shows, and the extra that each needs.
NEEDED = {"midus train": "train", "midus eval": "eval", "midus cluster": "clusters", "midus look": "look"}


def test_nothing_tells_to_install_the_package_from_a_registry():
    texts = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    texts += [
        file for folder in ("midus_hf", "upscalers", "scripts", "demo") for file in ROOT.glob(f"{folder}/**/*.py")
    ]
    assert not [str(file) for file in texts if FROM_A_REGISTRY.search(file.read_text())]


def test_messages_name_extras_that_exist_as_the_readme_installs_them():
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    files = [file for folder in ("midus_hf", "upscalers") for file in ROOT.glob(f"{folder}/**/*.py")]
    named = {extra for file in files for extra in re.findall(r"install_extra\([\"'](\w+)[\"']\)", file.read_text())}
    assert named and named <= extras
    assert install_extra("ot") == "in the clone of midus_hf, run: pip install -c constraints.txt -e '.[ot]'"


def test_what_the_first_page_installs_is_what_it_uses():
    extras = set(re.search(r"pip install -c constraints\.txt -e '\.\[([\w,]+)\]'", README).group(1).split(","))
    use = README.partition("## Use")[2].partition("## Methods")[0]
    assert {extra for command, extra in NEEDED.items() if command in use} == extras


def test_pages_say_what_works_in_the_clone_alone():
    """Look at every page but that of benchmarks, which quotes commands of this repository throughout."""
    pages = {*ROOT.glob("docs/*.md"), *ROOT.glob("docs/methods/*.md"), ROOT / "README.md"}
    for page in pages - {ROOT / "docs" / "benchmarks.md"}:
        text = page.read_text(encoding="utf-8")
        shell = "".join(re.findall(r"^```(?:sh|console)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE))
        if re.search(r"(configs|scripts)/|python -m (material|demo|benchmarks)", shell):
            assert "root of the clone" in text, page

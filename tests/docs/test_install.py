"""How this package is installed is said in one place, the README, by a way that works: from a clone."""

import re
from pathlib import Path

from midus_hf.config.wording import install_extra

ROOT = Path(__file__).parents[2]
FROM_A_REGISTRY = re.compile(r"midus[-_]hf\[[a-z,]+\]|pip install [^.]*midus[-_]hf")


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
    assert "pip install -c constraints.txt -e '.[" in (ROOT / "README.md").read_text()
    assert install_extra("ot") == "in the clone of midus_hf, run: pip install -c constraints.txt -e '.[ot]'"

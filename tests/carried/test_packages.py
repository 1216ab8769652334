"""Sources of other packages that go along: what they define is theirs, and what cannot be taken along is refused."""

import sys

import pytest

from midus_hf.carried.module import Closure, Name


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write modules of a package, and return what a root of them needs as one source."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "of_others"
    package.mkdir()
    (package / "__init__.py").touch()

    def write(root: str, stand_ins=None, **sources: str) -> str:
        for name, source in sources.items():
            (package / f"{name}.py").write_text(source)
        module, _, name = root.rpartition(".")
        return Closure([Name(f"of_others.{module}", name)], {"of_others"}, stand_ins or {}).text()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "of_others"]:
        del sys.modules[name]


SCALE = "def scale(x): return 2 * x\n"
DOUBLED = "from of_others.aa import scale as doubled\ndef {}(x): return doubled(x)\n"
TABLES = {"tables": "SIZE = 3\n"}
TWICE = "from of_others.aa import doubled\ndef scale(x): return 3 * x\ndef apply(x): return scale(x) + doubled(x)\n"
OTHER = "from of_others.bb import other\ndef doubled(x): return x + x\ndef apply(x): return doubled(x) + other(x)\n"
NAMELESS = ["try: import json as fast\nexcept ImportError: fast = None", "NAMES = []\nNAMES += ['b']"]
NAMELESS += ["TABLE = {}\nTABLE['a'] = 1", "for number in range(3): pass"]
MODULES = ["from of_others import tables", "from . import tables", "import of_others.tables as tables"]
# Sources by module, and what is said of them.
REFUSALS = {
    "two definitions of one name": (
        {"aa": f"{SCALE}def doubled(x): return scale(x)\n", "zz": TWICE},
        r"of_others\.aa and of_others\.zz both define scale",
    ),
    "a name that another definition has as another name": (
        {"aa": SCALE, "bb": DOUBLED.format("other"), "zz": OTHER},
        r"of_others\.zz and of_others\.aa both define doubled",
    ),
}
for each in NAMELESS:
    sources = {"zz": f"{each}\ndef apply(x): return x\n"}
    REFUSALS[each] = (sources, "neither an import, nor a call, nor the only definition of a name")
for each in MODULES:
    sources = {**TABLES, "zz": f"{each}\ndef apply(): return tables.SIZE\n"}
    REFUSALS[each] = (sources, r"of_others\.zz reads tables, .* Import names from")


@pytest.mark.parametrize("case", REFUSALS)
def test_inexact_copies_are_refused(case, written):
    sources, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        written("zz.apply", **sources)


LOCAL = (
    "from of_others.aa import scale\ndef added(scale): return scale + 1\ndef apply(x): return added(x) + scale(x)\n"
)
FORMS = {"tables": "SIZE = 3\nUNUSED = 4\n", "more": "from .tables import SIZE\ndef size(): return SIZE\n"}
FORMS["zz"] = (
    "from of_others.more import size\nfrom .tables import SIZE as AGAIN\ndef apply(x): return size() + AGAIN\n"
)
# Sources by module, and the value for 1.
COMPUTE = {
    "a variable with the name of a definition": ({"aa": SCALE, "zz": LOCAL}, 4),
    "imported under another name": ({"aa": SCALE, "zz": DOUBLED.format("apply")}, 2),
    "named like a stand-in": ({"zz": "def module_of(x): return x + 1\ndef apply(x): return module_of(x)\n"}, 2),
    "either form of import": (FORMS, 6),
}


@pytest.mark.parametrize("case", COMPUTE)
def test_definitions_compute_as_before(case, written):
    (sources, expected), scope = COMPUTE[case], {"__name__": "carried"}
    source = written("zz.apply", {"module_of": Name("midus_hf.carried.standins", "module_of")}, **sources)
    exec(source, scope)
    assert "UNUSED" not in source
    assert scope["apply"](1) == expected


def test_classes_are_kept_whole(written):
    reader = (
        "class Reader:\n    def __call__(self):\n        return 'up'\n\n    def _reset(self):\n        return None\n"
    )
    assert "_reset" in written("zz.Reader", zz=reader)

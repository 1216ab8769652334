"""Sources of other packages that go along: what they define is theirs, and what cannot be taken along is refused."""

import sys
from textwrap import dedent

import pytest

from midus_hf.carried.module import Closure
from midus_hf.carried.sources import Name


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write modules of a package, and return what a root of them needs as one source."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "of_others"
    package.mkdir()
    (package / "__init__.py").touch()

    def write(root: str, stand_ins=None, **sources: str) -> str:
        for name, source in sources.items():
            (package / f"{name}.py").write_text(dedent(source))
        module, _, name = root.rpartition(".")
        return Closure([Name(f"of_others.{module}", name)], {"of_others"}, stand_ins or {}).text()

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "of_others"]:
        del sys.modules[name]


SCALE = "def scale(x):\n    return 2 * x\n"
DOUBLED = "from of_others.aa import scale as doubled\n\n\ndef {}(x):\n    return doubled(x)\n"
# Sources by module, and what is said of them.
REFUSALS = {
    "two definitions of one name": (
        {
            "aa": f"{SCALE}\n\ndef doubled(x):\n    return scale(x)\n",
            "zz": """
            from of_others.aa import doubled

            def scale(x):
                return 3 * x

            def apply(x):
                return scale(x) + doubled(x)
            """,
        },
        r"of_others\.aa and of_others\.zz both define scale",
    ),
    "a name that another definition has as another name": (
        {
            "aa": SCALE,
            "bb": DOUBLED.format("other"),
            "zz": """
            from of_others.bb import other

            def doubled(x):
                return x + x

            def apply(x):
                return doubled(x) + other(x)
            """,
        },
        r"of_others\.zz and of_others\.aa both define doubled",
    ),
    **{
        f"statement without a name: {statement}": (
            {"zz": f"{statement}\n\ndef apply(x):\n    return x\n"},
            "neither an import, nor a call, nor the only definition of a name",
        )
        for statement in (
            *("try:\n    import json as fast\nexcept ImportError:\n    fast = None\n", "NAMES = []\nNAMES += ['b']\n"),
            *("TABLE = {}\nTABLE['a'] = 1\n", "for number in range(3):\n    pass\n"),
        )
    },
    **{
        f"imported module: {form}": (
            {"tables": "SIZE = 3\n", "zz": f"{form}\n\n\ndef apply():\n    return tables.SIZE\n"},
            r"of_others\.zz reads tables, .* Import names from",
        )
        for form in ("from of_others import tables", "from . import tables", "import of_others.tables as tables")
    },
}


@pytest.mark.parametrize("case", REFUSALS)
def test_inexact_copies_are_refused(case, written):
    sources, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        written("zz.apply", **sources)


COMPUTE = {
    "a variable with the name of a definition": (
        {
            "aa": SCALE,
            "zz": """
            from of_others.aa import scale

            def added(scale):
                return scale + 1

            def apply(x):
                return added(x) + scale(x)
            """,
        },
        4,
    ),
    "imported under another name": ({"aa": SCALE, "zz": DOUBLED.format("apply")}, 2),
    "named like a stand-in": (
        {"zz": "def module_of(x):\n    return x + 1\n\n\ndef apply(x):\n    return module_of(x)\n"},
        2,
    ),
    "either form of import": (
        {
            "tables": "SIZE = 3\nUNUSED = 4\n",
            "more": "from .tables import SIZE\n\n\ndef size():\n    return SIZE\n",
            "zz": """
            from of_others.more import size
            from .tables import SIZE as AGAIN

            def apply(x):
                return size() + AGAIN
            """,
        },
        6,
    ),
}


@pytest.mark.parametrize("case", COMPUTE)
def test_definitions_compute_as_before(case, written):
    (sources, expected), scope = COMPUTE[case], {"__name__": "carried"}
    source = written("zz.apply", {"module_of": Name("midus_hf.carried.standins", "module_of")}, **sources)
    exec(source, scope)
    assert "UNUSED" not in source and scope["apply"](1) == expected


def test_classes_are_kept_whole(written):
    reader = (
        "class Reader:\n    def __call__(self):\n        return 'up'\n\n    def _reset(self):\n        return None\n"
    )
    assert "_reset" in written("zz.Reader", zz=reader)

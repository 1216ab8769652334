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


def computed(source: str, call: str):
    scope: dict = {"__name__": "carried"}
    exec(source, scope)
    return eval(call, scope)


def test_two_definitions_of_one_name_are_refused(written):
    with pytest.raises(
        ValueError, match=r"of_others\.aa and of_others\.zz both define scale, and the code of a checkpoint needs"
    ):
        written(
            "zz.apply",
            aa="def scale(x):\n    return 2 * x\n\n\ndef doubled(x):\n    return scale(x)\n",
            zz="""
            from of_others.aa import doubled

            def scale(x):
                return 3 * x

            def apply(x):
                return scale(x) + doubled(x)
            """,
        )


def test_variables_may_have_the_name_of_a_definition(written):
    source = written(
        "zz.both",
        aa="def scale(x):\n    return 2 * x\n",
        zz="""
        from of_others.aa import scale

        def apply(scale):
            return scale + 1

        def both(x):
            return apply(x) + scale(x)
        """,
    )
    assert computed(source, "both(1)") == 4


def test_a_definition_may_be_imported_under_another_name(written):
    source = written(
        "zz.apply",
        aa="def scale(x):\n    return 2 * x\n",
        zz="from of_others.aa import scale as doubled\n\n\ndef apply(x):\n    return doubled(x)\n",
    )
    assert computed(source, "apply(1)") == 2


def test_modules_may_import_names_of_one_another_in_either_form(written):
    source = written(
        "zz.apply",
        tables="SIZE = 3\nUNUSED = 4\n",
        more="from .tables import SIZE\n\n\ndef size():\n    return SIZE\n",
        zz="""
        from of_others.more import size
        from .tables import SIZE as AGAIN

        def apply():
            return size() + AGAIN
        """,
    )
    assert "UNUSED" not in source and computed(source, "apply()") == 6


@pytest.mark.parametrize(
    "form", ["from of_others import tables", "from . import tables", "import of_others.tables as tables"]
)
def test_a_module_that_is_imported_itself_is_refused(form, written):
    with pytest.raises(
        ValueError, match=r"of_others\.zz reads tables, which no module of of_others defines .* Import names from"
    ):
        written("zz.apply", tables="SIZE = 3\n", zz=f"{form}\n\n\ndef apply():\n    return tables.SIZE\n")


def test_a_name_that_another_definition_has_is_refused_as_another_name(written):
    with pytest.raises(ValueError, match=r"of_others\.zz and of_others\.aa both define doubled, and the code"):
        written(
            "zz.apply",
            aa="def scale(x):\n    return 2 * x\n",
            bb="from of_others.aa import scale as doubled\n\n\ndef other(x):\n    return doubled(x)\n",
            zz="""
            from of_others.bb import other

            def doubled(x):
                return x + x

            def apply(x):
                return doubled(x) + other(x)
            """,
        )


def test_what_stands_for_definitions_of_ours_stands_for_none_of_others(written):
    stands = {"module_of": Name("midus_hf.carried.standins", "module_of")}
    source = written(
        "zz.apply", stands, zz="def module_of(x):\n    return x + 1\n\n\ndef apply(x):\n    return module_of(x)\n"
    )
    assert computed(source, "apply(1)") == 2


@pytest.mark.parametrize(
    "statement",
    [
        "try:\n    import json as fast\nexcept ImportError:\n    fast = None\n",
        "NAMES = []\nNAMES += ['b']\n",
        "TABLE = {}\nTABLE['a'] = 1\n",
        "for number in range(3):\n    pass\n",
    ],
    ids=["try", "augmented", "subscript", "loop"],
)
def test_statements_that_nobody_would_know_to_be_needed_are_refused(written, statement):
    with pytest.raises(ValueError, match="which is neither an import, nor a call, nor the only definition of a name"):
        written("zz.apply", zz=f"{statement}\n\ndef apply(x):\n    return x\n")


READER = """
class Reader:
    def __call__(self):
        return "up"

    def _reset(self):
        return None
"""


def test_classes_are_kept_whole(written):
    assert "_reset" in written("zz.Reader", zz=READER)

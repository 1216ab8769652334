"""Docstrings open with what a function does, and say it so that a newcomer reads it once."""

from pathlib import Path

import pytest

from scripts.docstrings import check_file, main, python_files

ROOT = Path(__file__).parents[2]
PACKAGES = ["midus_hf", "upscalers", "scripts", "benchmarks", "docs"]


def checked_files():
    return list(python_files([ROOT / package for package in PACKAGES]))


def test_docstrings_follow_the_rules():
    findings = [str(finding) for path in checked_files() for finding in check_file(path)]
    assert not findings, "\n".join(findings)


def messages(tmp_path, source):
    path = tmp_path / "module.py"
    path.write_text(source)
    return [finding.message for finding in check_file(path)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            'def rows():\n    """What heads read."""',
            "rows: the docstring opens with 'What'; expected an imperative verb",
        ),
        ('class Rows:\n    """What heads read."""', "Rows: the docstring opens with 'What'; expected a noun phrase"),
        (
            'class A:\n    @property\n    def b(self):\n        """Of a."""',
            "b: the docstring opens with 'Of'; expected a noun",
        ),
        ('"""Read a bank and all of it."""', "'of it' in the docstring; say the noun again"),
        ('"""Read such rows."""', "'such' in the docstring; say the noun again"),
        (
            '"""Take what the reader makes of it."""',
            "'what the reader makes of' in the docstring; say 'the result of'",
        ),
        ('"""Read k slots a head."""', "'slots a head' in the docstring; write 'per'"),
        (
            'def f(x):\n    """Read x.\n\n    Args:\n        x: Of the bank.\n    """',
            "argument x: 'Of the bank.'; say shape",
        ),
        ('def f(x):\n    """Read x.\n\n    Args:\n        x: Rows.\n    """', "argument x: 'Rows.'; say shape"),
        ('rows = 1\n"""Rows of a bank."""', "a string after an assignment; write a comment above it"),
        ("found = 1", "'found' names a variable; name what the variable holds"),
        ("def f(told): ...", "'told' names a variable; name what the variable holds"),
        ("def f(what): ...", "'what' names a variable; name what the variable holds"),
    ],
)
def test_what_breaks_a_rule_is_named(tmp_path, source, message):
    assert any(message in each for each in messages(tmp_path, source))


def test_what_follows_the_rules_is_silent(tmp_path, capsys):
    source = '''
"""Rows such as the bank's."""

class Rows:
    """Rows of a bank, `[N, d]`."""

    @property
    def count(self):
        """Number of rows."""

def read(rows):
    """Return the rows that each head reads.

    Args:
        rows: Row numbers per head, `[H, k]`, int64.
    """

def undocumented(): ...
'''
    assert messages(tmp_path, source) == []
    assert main([str(tmp_path)]) == 0


def test_the_command_prints_findings_with_their_lines(tmp_path, capsys):
    (tmp_path / "module.py").write_text("\nplace = 1\n")
    assert main([str(tmp_path)]) == 1
    assert (
        capsys.readouterr().out
        == f"{tmp_path / 'module.py'}:2: 'place' names a variable; name what the variable holds\n"
    )

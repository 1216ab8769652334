"""`midus reproduce`: the tables that there are, the rows of one, and what it refuses."""

import json

import pytest


@pytest.fixture
def run(as_command):
    return as_command("midus reproduce")


def test_without_a_paper_it_lists_tables(run):
    told = run("--json")
    assert told.status == 0
    assert {"paper": "midus", "table": "1", "title": "Llama-3.2-1B, FineWeb-Edu"} in json.loads(told.out)["tables"]


@pytest.mark.material
@pytest.mark.parametrize("names", ["MIDUS-HML;Llama Pro", "MIDUS-HML; Llama-Pro"], ids=["the table's", "the plan's"])
def test_rows_are_named_as_in_the_table_or_as_in_the_plan(names, run, tmp_path):
    told = run("midus", "1", "--scale", "tiny", "--rows", names, "--dry-run", "--json", "--output", tmp_path / "out")
    assert told.status == 0, told.err
    assert [row["variant"] for row in json.loads(told.out)["rows"]] == ["MIDUS-HML", "Llama-Pro"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["midus"], "no table of midus is named; expected one. 'midus reproduce' without arguments lists all tables."),
        (["midus", "1", "--rows", "HML"], "rows names 'HML'; expected some of: Base; SOLAR; Llama Pro; LESA;"),
    ],
)
def test_what_it_cannot_find_is_refused_in_a_line(words, message, run):
    told = run(*words)
    assert told.status == 2 and told.out == ""
    (line,) = told.err.strip().splitlines()
    assert message in line

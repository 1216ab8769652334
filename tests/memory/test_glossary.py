"""Glossaries: rows that are entries, files, and entries that are added, removed and replaced by any form of a name."""

import pytest
from models.pack_models import tiny_tokenizer

from midus_hf.memories.packs.glossary import (
    Entry,
    Glossary,
    entry_of,
    found_in,
    joined,
    read_glossary,
    write_glossary,
)

IRON = Entry(("Iron ore", "Fe"), "A metal.")
WRONG_ROWS = [
    ({"text": "x"}, "row 1 has the name None; expected a name, or a list of names. Write one, or remove the row."),
    ({"name": " ", "text": "x"}, "row 1 has the name ' '; expected a name, or a list of names."),
    ({"name": [], "text": "x"}, "row 1 has the name []; expected a name, or a list of names."),
    ({"name": ["a", 3], "text": "x"}, "row 1 has the name ['a', 3]; expected a name, or a list of names."),
    ({"name": "a", "text": " "}, "row 1 has the text ' '; expected what is to be known of 'a'. Write it, or remove"),
    ({"name": "a"}, "row 1 has the text None; expected what is to be known of 'a'."),
    ({"name": "a", "text": "x", "exact": "yes"}, "row 1 has exact = 'yes'; expected true or false."),
    ({"name": "a; b", "text": "x"}, "the name 'a; b'; did you mean several names? Expected a list, \"name\": ["),
    ({"name": "a|b", "text": "x"}, "the name 'a|b'; did you mean several names?"),
    ({"name": '["a", "b"]', "text": "x"}, "did you mean several names?"),
    (
        {"name": "a\x00b", "text": "x"},
        "the name 'a\\x00b', which no text can have; expected characters that are seen.",
    ),
    ({"name": "\u200b", "text": "x"}, "which no text can have; expected characters that are seen."),
]


@pytest.mark.parametrize(("row", "message"), WRONG_ROWS, ids=str)
def test_rows_that_are_no_entries(row, message):
    with pytest.raises(ValueError) as refused:
        entry_of(row, "row 1")
    assert message in str(refused.value)


def test_an_entry_has_each_name_once_as_it_was_given():
    assert entry_of({"name": " a b ", "text": " x "}, "row 1") == Entry(("a b",), " x ")
    assert entry_of({"name": ["a", "b", "a"], "text": "x", "exact": True}, "row 1") == Entry(("a", "b"), "x", True)


def test_texts_of_the_same_names_are_joined_and_names_of_two_entries_are_refused():
    again, other = IRON._replace(text="Heavy."), Entry(("iron ore",), "A rock.")
    assert joined([("row 1", IRON), ("row 2", again)]) == [IRON._replace(text="A metal.\nHeavy.")]
    with pytest.raises(
        ValueError, match=r"row 2 has the name 'iron ore', which row 1 has beside other names; expected"
    ):
        joined([("row 1", IRON), ("row 2", other)])
    cased = [Entry(("Mercury",), "A planet.", True), Entry(("mercury",), "A metal.")]
    assert joined([("row 1", cased[0]), ("row 2", cased[1])]) == cased


def test_two_names_of_one_entry_may_be_the_same_as_they_are_compared():
    (entry,) = joined([("row 1", Entry(("Iron ore", "iron ore", "IRON ORE"), "A metal."))])
    glossary = Glossary(tiny_tokenizer(), [entry])
    assert {found.entry for found in found_in(glossary.table, "In IRON ORE.")} == {1}
    glossary.remove("iron ore")
    assert not glossary.table.by_folded


def test_a_file_is_read_as_it_was_written_and_can_be_read_by_people(tmp_path):
    entries = [IRON, Entry(("Café",), "Line.\nAnother\u2028one.", True)]
    write_glossary(tmp_path, entries)
    assert read_glossary(tmp_path) == entries
    first = (tmp_path / "glossary.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert first == '{"name": ["Iron ore", "Fe"], "text": "A metal."}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            None,
            r"there is no glossary.jsonl in .*, without which no name would be known; expected one beside the weights",
        ),
        (
            '{"name": "a", "text": "x"}\n{',
            r"row 2 of .*glossary.jsonl is no JSON \(.*\); expected a name and a text. Copy",
        ),
        ("[1]\n", r"row 1 of .*glossary.jsonl is \[1\]; expected a name and a text. Copy the file again."),
        ('{"name": "a", "text": ""}\n', r"row 1 of .*glossary.jsonl has the text ''"),
    ],
)
def test_files_that_are_no_glossary(content, message, tmp_path):
    if content is not None:
        (tmp_path / "glossary.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_glossary(tmp_path)


def test_entries_are_added_removed_and_replaced_by_any_form_of_a_name():
    glossary = Glossary(tiny_tokenizer(), [IRON])
    glossary.add(["New York", "Big Apple"], "A city.")
    glossary.replace("New\u00a0 York", "A large city.")
    assert [*glossary] == [IRON, Entry(("New York", "Big Apple"), "A large city.")]
    assert glossary.remove("iron  ore") == IRON and len(glossary) == 1
    assert [found.entry for found in found_in(glossary.table, "Fe, Iron ore and the Big Apple")] == [3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda entries: entries.add("iron ore", "x"),
            "the name 'iron ore' has an entry; expected a new name. Use replace",
        ),
        (lambda entries: entries.add("a;b", "x"), "the new entry has the name 'a;b'; did you mean several names?"),
        (
            lambda entries: entries.add("Łódź", "x"),
            "the new entry has the name 'Łódź', which the model's tokens do not spell",
        ),
        (
            lambda entries: entries.add("a b", "ö" * 99),
            f"the new entry has the text '{'ö' * 60}...', which the model's tok",
        ),
        (lambda entries: entries.remove("Iron or"), "no entry has the name 'Iron or'; did you mean 'Iron ore'?"),
        (lambda entries: entries.remove("zinc"), "no entry has the name 'zinc'; expected a name of the glossary."),
        (lambda entries: entries.remove("fe"), "no entry has the name 'fe'"),
        (
            lambda entries: entries.replace("zinc", "x"),
            "no entry has the name 'zinc'; expected a name of the glossary.",
        ),
        (
            lambda entries: entries.replace("Fe", " "),
            "the entry 'Iron ore' has the text ' '; expected what is to be known",
        ),
        (lambda entries: entries.replace("Fe", "ö"), "has the text 'ö', which the model's tokens do not spell"),
    ],
)
def test_changes_that_are_refused_change_nothing(change, message):
    glossary = Glossary(tiny_tokenizer(), [IRON])
    with pytest.raises(ValueError) as refused:
        change(glossary)
    assert message in str(refused.value) and [*glossary] == [IRON]
    assert [found.entry for found in found_in(glossary.table, "Fe")] == [1]


def test_names_in_a_text_in_its_order_and_links_to_other_entries():
    entries = [IRON, Entry(("York",), "Near Iron ore."), Entry(("New York",), "Of York, New York and Fe, Iron ore.")]
    glossary = Glossary(tiny_tokenizer(), entries)

    def named(text):
        return glossary.named(glossary.spelling.ids(text))

    assert named("New York, iron ore, York, Fe") == [3, 1, 2] and named("New Yorkers York") == [2] and named("") == []
    assert [glossary.linked(number) for number in (1, 2, 3)] == [(), (1,), (2, 1)]
    glossary.remove("Fe")
    assert [glossary.linked(number) for number in (1, 2, 3)] == [(), (), (2,)]


def test_near_names():
    glossary = Glossary(tiny_tokenizer(), [IRON, Entry(("New York",), "A city.")])
    assert glossary.near("Where is Nev York?") == ["New York"] and glossary.near("What is it?") == []

"""Reading benchmarks, articles and elements as their packages write them."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from material import factbook
from material.benchmarks import boolq_row, multiple_choice_row, parse_choices, parse_rows
from material.dictionaries import parse_synset
from material.elements import fact_texts, question_row

choice_texts = st.text(string.ascii_lowercase + " .?", min_size=1, max_size=20).map(str.strip).filter(bool)


@given(texts=st.lists(choice_texts, min_size=2, max_size=10), data=st.data())
def test_gold_index_is_the_answers(texts, data):
    gold, letters = data.draw(st.integers(0, len(texts) - 1)), string.ascii_uppercase
    options = [f"{letter}. {text}" for letter, text in zip(letters, texts, strict=False)]
    options = data.draw(st.sampled_from(["", "\n"])) + "\n".join(options)
    row = {"question": " What? ", "options": options, "answer": f"{letters[gold]}. {texts[gold]}"}
    assert multiple_choice_row(row, len(texts)) == {"question": "What?", "choices": texts, "gold": gold}


CONTRADICTIONS = [("options", text) for text in ("A. x\nB. y\nC. z", "A. x", "", "A. x\nB. ")]
CONTRADICTIONS += [("answer", text) for text in ("C. z", "B. z", "y", "")]


@pytest.mark.parametrize(("key", "text"), CONTRADICTIONS)
def test_row_that_contradicts_itself_is_malformed(key, text):
    row = {"question": "?", "options": "A. x\nB. y", "answer": "B. y", "passage": " Once. "}
    assert multiple_choice_row(row, 2) == {"question": "?", "choices": ["x", "y"], "gold": 1, "passage": "Once."}
    assert multiple_choice_row({**row, key: text}, 2) is None
    assert parse_choices("A. one\nC. still one\nB. two\nA. still two") == ["one\nC. still one", "two\nA. still two"]


def test_malformed_lines_are_dropped_and_counted():
    good = {"question": "?", "options": "A. x\nB. y", "answer": "B. y"}
    lines = [json.dumps(good), "{broken", json.dumps({"question": "?"}), json.dumps({**good, "answer": "?"})]
    rows, dropped = parse_rows(lines, lambda row: multiple_choice_row(row, 2))
    assert ([row["gold"] for row in rows], dropped) == ([1], 3)
    for answer, gold in (("True", 1), ("False", 0), (True, 1), (False, 0), (None, None)):
        row = {"question": "is it", "title": "It", "passage": "It is.", "answer": answer}
        expected = {"question": "is it", "choices": ["no", "yes"], "gold": gold, "passage": "It -- It is."}
        assert boolq_row(row) == (None if gold is None else expected)
        assert boolq_row({**row, "passage": " "}) is None
    line = '02087384 05 n 02 dog 0 domestic_dog 0 001 @ 02085998 n 0000 | a member of the genus Canis; "it barked"  \n'
    assert parse_synset(line) == {
        "text": 'dog, domestic dog: a member of the genus Canis; "it barked"',
        "topic": "animal",
    }


SODIUM = {"name": "Sodium", "symbol": "Na", "atomic_number": 11, "period": 3, "atomic_weight": 22.98976928}
SODIUM |= {"electronic_configuration": "[Ne] 3s"}


@pytest.mark.parametrize(("group", "position"), [(1, "in period 3 and group 1."), (None, "in period 3.")])
def test_facts_differ_from_the_questions(group, position):
    element = {**SODIUM, "group_id": group}
    expected = {"name": "sodium", "symbol": "Na", "number": 11, "names": ["sodium", "natrium"]}
    assert question_row(element) == expected
    texts = fact_texts(element)
    assert texts[1] == f"Sodium (Na) is element 11 of the periodic table, {position} Its atomic weight is 22.99."
    assert all("11" in text and "sodium" in text.lower() for text in texts)
    assert not any("the atomic number of sodium is" in text.lower() for text in texts)


NAMES = {"short": "none", "long": "Republic of X"}
COUNTRY = {
    "Introduction": {"Background": {"text": "An old  country; ++ it is."}},
    "Geography": {"Elevation extremes": {"highest point": {"text": "Mount Fogo (Pico) 2,829 m"}}},
    "Government": {
        "Country name": {f"conventional {form} form": {"text": text} for form, text in NAMES.items()},
        "Capital": {"name": {"text": "Kyiv (Kiev)"}, "note": {"text": ""}},
    },
    "Economy": {"Exchange rates": {"text": "X dollars (XXD) per US dollar - ++ 5.3 (2014 est.) ++ 5.2 (2013 est.)"}},
    "Communications": {
        "Telephone system": {"international": {"text": "country code - 1-684; a cable"}},
        "Internet country code": {"text": ".xx"},
    },
}


def test_country_lines_begin_with_its_name():
    lines = factbook.country_lines("X", COUNTRY)
    assert lines[:2] == [
        "X / Introduction / Background: An old country; it is.",
        "X / Geography / Elevation extremes / highest point: Mount Fogo (Pico) 2,829 m",
    ]
    assert "X / Economy / Exchange rates: X dollars (XXD) per US dollar; 5.3 (2014 est.); 5.2 (2013 est.)" in lines
    assert not any("note" in line for line in lines)


@pytest.mark.parametrize(("names", "name"), [
    ({"conventional short form": {"text": "France"}}, "France"),
    (COUNTRY["Government"]["Country name"], "Republic of X"),
    ({"conventional short form": {"text": "Svalbard (sometimes referred to as Spitsbergen)"}}, "Svalbard"),
    ({"conventional short form": {"text": "Baker Island; Howland Island"}}, None),
    ({}, None),
])  # fmt: skip
def test_country_goes_by_its_short_name(names, name):
    assert factbook.country_name({"Government": {"Country name": names}}) == name
    assert factbook.country_name({}) is None


def test_country_questions_take_every_spelling():
    answers = {row["field"]: row["answers"] for row in factbook.question_rows("X", COUNTRY)}
    assert answers == {
        "capital": ["Kyiv", "Kiev"], "internet country code": [".xx", "xx"], "telephone country code": ["1-684", "1 684", "1684"],
        "currency code": ["XXD"], "highest point": ["Mount Fogo", "Pico", "Fogo"],
    }  # fmt: skip
    assert list(factbook.question_rows("X", {})) == []


@pytest.mark.parametrize(("parse", "text", "answers"), [
    (factbook.capitals, "Nicosia (Lefkosia/Lefkosa)", ["Nicosia", "Lefkosia", "Lefkosa"]),
    (factbook.capitals, "Chisinau in Romanian (Kishinev in Russian)", ["Chisinau", "Kishinev"]),
    (factbook.capitals, "Suva (on Viti Levu)", []),
    (factbook.capitals, "Washington, DC", []),
    (factbook.capitals, "Amsterdam; note - The Hague is the seat of government", []),
    (factbook.internet_codes, ".fi; note - Aland Islands assigned .ax", []),
    (factbook.telephone_codes, "landing point for a cable", []),
    (factbook.currency_codes, "Belarusian rubles (BYB/BYR) per US dollar - ++ 10,685", []),
    (factbook.summits, "unnamed elevation 805 m", []),
    (factbook.summits, "Mount Everest 8,850 m (highest peak in Asia)", []),
])  # fmt: skip
def test_ambiguous_answers_are_not_asked(parse, text, answers):
    assert parse(text) == answers

"""Reading benchmarks, articles and elements as their packages write them."""

import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from material.benchmarks import boolq_row, multiple_choice_row, parse_choices, parse_rows
from material.elements import fact_texts, question_row
from material.glosses import parse_synset

choice_texts = st.text(string.ascii_lowercase + " .?", min_size=1, max_size=20).map(str.strip).filter(bool)


@given(texts=st.lists(choice_texts, min_size=2, max_size=10), data=st.data())
def test_the_gold_index_is_that_of_the_answer(texts, data):
    gold = data.draw(st.integers(0, len(texts) - 1))
    letters = string.ascii_uppercase
    row = {
        "question": " What? ",
        "options": data.draw(st.sampled_from(["", "\n"]))
        + "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=False)),
        "answer": f"{letters[gold]}. {texts[gold]}",
    }
    assert multiple_choice_row(row, len(texts)) == {"question": "What?", "choices": texts, "gold": gold}


def test_a_line_that_begins_with_another_letter_stays_in_its_choice():
    assert parse_choices("A. one\nC. still one\nB. two\nA. still two") == ["one\nC. still one", "two\nA. still two"]


@pytest.mark.parametrize(
    "change",
    [
        {"options": "A. x\nB. y\nC. z"},
        {"options": "A. x"},
        {"options": ""},
        {"options": "A. x\nB. "},
        {"answer": "C. z"},
        {"answer": "B. z"},
        {"answer": "y"},
        {"answer": ""},
    ],
)
def test_a_row_that_contradicts_itself_is_malformed(change):
    row = {"question": "?", "options": "A. x\nB. y", "answer": "B. y"}
    assert multiple_choice_row(row, 2) == {"question": "?", "choices": ["x", "y"], "gold": 1}
    assert multiple_choice_row({**row, **change}, 2) is None


def test_a_passage_is_kept():
    row = {"question": "?", "options": "A. x\nB. y", "answer": "A. x", "passage": " Once. "}
    assert multiple_choice_row(row, 2)["passage"] == "Once."


@pytest.mark.parametrize(("answer", "gold"), [("True", 1), ("False", 0), (True, 1), (False, 0)])
def test_yes_and_no_become_choices(answer, gold):
    row = {"question": "is it", "title": "It", "passage": "It is.", "answer": answer}
    assert boolq_row(row) == {"question": "is it", "choices": ["no", "yes"], "gold": gold, "passage": "It -- It is."}


def test_yes_and_no_questions_without_an_answer_or_a_passage_are_malformed():
    row = {"question": "is it", "title": "It", "passage": "It is.", "answer": "True"}
    assert boolq_row({**row, "answer": None}) is None
    assert boolq_row({**row, "passage": " "}) is None


def test_malformed_lines_are_dropped_and_counted():
    good = {"question": "?", "options": "A. x\nB. y", "answer": "B. y"}
    lines = [json.dumps(good), "{broken", json.dumps({"question": "?"}), json.dumps({**good, "answer": "?"})]
    rows, dropped = parse_rows(lines, lambda row: multiple_choice_row(row, 2))
    assert [row["gold"] for row in rows] == [1]
    assert dropped == 3


def test_a_synset_has_its_words_its_gloss_and_its_topic():
    line = '02087384 05 n 02 dog 0 domestic_dog 0 001 @ 02085998 n 0000 | a member of the genus Canis; "it barked"  \n'
    expected = {"text": 'dog, domestic dog: a member of the genus Canis; "it barked"', "topic": "animal"}
    assert parse_synset(line) == expected
    ten = (
        "00000001 28 n 0a "
        + " ".join(f"w{place} 0" for place in range(10))
        + " 000 | words are counted in hexadecimal"
    )
    assert parse_synset(ten)["text"].startswith("w0, w1, w2, w3, w4, w5, w6, w7, w8, w9: words")
    assert parse_synset(ten)["topic"] == "time"


SODIUM = {
    "name": "Sodium",
    "symbol": "Na",
    "atomic_number": 11,
    "period": 3,
    "group_id": 1,
    "atomic_weight": 22.98976928,
    "electronic_configuration": "[Ne] 3s",
}


def test_an_element_is_asked_for_by_its_first_name_and_goes_by_all():
    assert question_row(SODIUM) == {"name": "sodium", "symbol": "Na", "number": 11, "names": ["sodium", "natrium"]}


@pytest.mark.parametrize(("group", "place"), [(1, "in period 3 and group 1."), (None, "in period 3.")])
def test_facts_say_the_number_in_other_words_than_the_question(group, place):
    texts = fact_texts({**SODIUM, "group_id": group})
    assert texts[1] == f"Sodium (Na) is element 11 of the periodic table, {place} Its atomic weight is 22.99."
    assert all("11" in text and "sodium" in text.lower() for text in texts)
    assert not any("the atomic number of sodium is" in text.lower() for text in texts)

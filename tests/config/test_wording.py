"""Phrases of messages."""

import pytest

from midus_hf.config.wording import first_line


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("one\ntwo", "one"),
        ("", "ValueError"),
        (
            "Couldn't instantiate the backend tokenizer from one of:\n(1) a serialization file, \n(2) a slow one. \n\nYou need more.",
            "Couldn't instantiate the backend tokenizer from one of: (1) a serialization file, (2) a slow one.",
        ),
        ("refused:\n\n  this\nand that", "refused: this and that"),
        ("refused:", "refused:"),
        ("many: a\nb", "many: a"),
        ("many:\n" + "word " * 200, "many: " + "word " * 78 + "..."),
    ],
)
def test_a_first_line_that_ends_at_a_colon_says_what_it_announces(message, expected):
    assert first_line(ValueError(message)) == expected
    assert len(expected) <= 400

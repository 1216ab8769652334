"""Whether a text has an answer: the rule of tasks, `midus look` and experiments."""

import decimal
import functools
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from typing import Literal

import regex

# Letters and digits of scripts with spaces between words (UAX 29). Hangul is apart: Korean writes particles directly after words.
SPACED = r"[[\p{WB=ALetter}\p{WB=Hebrew_Letter}\p{WB=Numeric}]--\p{Hangul}]"
# Around each number of a folded text, so that no part of a number is found; for private use, so that no text has them.
_OPEN, _CLOSE = "\ue000", "\ue001"


def _between(*joints: tuple[str, str]) -> "regex.Pattern[str]":
    """Return a pattern of the places between what the first and the second pattern of a pair match."""
    return regex.compile("|".join(f"(?<={before})(?={after})" for before, after in joints), regex.V1)


# An answer does not begin at these places, nor end at those: the name goes on.
_NO_BEGINNING = _between(
    (rf"{SPACED}\p{{M}}*_*", SPACED),
    (r"(?<![.\w])\.", SPACED),  # .NET
    (r"\p{Hangul}", r"\p{Hangul}"),
)
_NO_END = _between(
    ("", r"\p{M}"),
    (rf"{SPACED}\p{{M}}*", rf"_*{SPACED}|\p{{No}}|[.,]\d"),
    (_CLOSE, rf"(?!(?:st|nd|rd|th)(?!{SPACED}))_*{SPACED}"),  # 5GB, but not 5th
    (r"[\p{L}\p{M}+#♯\-]", rf"\+\+|\+(?![\w{_OPEN}])|[#♯]|-(?![\w{_OPEN}\-])"),  # C++, C#, A-; not a dash
)
_BETWEEN_WORDS = rf"[^\w{_OPEN}]*"
_TO_FIRST_CHARACTER = regex.compile(rf"{_BETWEEN_WORDS}(?:(?i:an?|the)\b{_BETWEEN_WORDS})?.", regex.V1)
_ARTICLE = regex.compile(r"^(?i:an?|the) (?=.)")
_PUNCTUATION_AFTER_WORD = regex.compile(rf"(?<=[\w{_CLOSE}])\p{{Terminal_Punctuation}}+(?=\s|$)")
_EXPONENT = r"(?:[eE][+\-]?\d{1,3}(?!\w))?"
_NUMBER = regex.compile(
    rf"""
    (?:(?<!{SPACED}|[\p{{M}}_)\]+\-])(?P<sign>[+\-]))?
    (?P<currency>\p{{Sc}}?)
    (?<!{SPACED}\p{{M}}*_*)(?<!\d[.,])                                              # not within a word or a number
    (?P<digits>(?>
        \d+(?:[.,]\d+|['_\u00a0\u2009\u202f]\d{{3}}(?!\d))*{_EXPONENT}              # with as many separators as there are
        |(?<![.\w])\.\d+{_EXPONENT}
    ))
    (?![\p{{M}}\p{{No}}十百千万萬亿億兆천억])                                            # not before a power of ten (10², 5万)
    """,
    regex.V1 | regex.VERBOSE,
)
_PLAIN_NUMBER = regex.compile(rf"(?:0|[1-9]\d*)?(?:\.\d+)?{_EXPONENT}")
_POINT_FOR_FRACTIONS = regex.compile(r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}(?:\.\d+)?")
_COMMA_FOR_FRACTIONS = regex.compile(r"[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})|\d+,\d+")
_PLAIN_CHARACTERS = {
    **dict.fromkeys("\u2018\u2019\u02bc\u2032", "'"),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"),
    **{"\u066b": ".", "\u066c": ","},  # Arabic separators
}


def has_answer(
    text: str, answer: str, place: Literal["anywhere", "start", "whole"] = "anywhere", *, match_case: bool = False
) -> bool:
    """Return whether a text has an answer.

    An answer is not found within a longer word: at each end, a boundary is asked for between two letters or digits of scripts that
    write spaces between words (UAX 29; of Korean at the beginning only). Numbers are compared as numbers: 1,000 is 1000 and neither 1
    nor 0, 1.0 is 1 and not 10, -5 is not 5. A comma before groups of three digits separates thousands, another single comma is a
    decimal one; a point is decimal, unless several separate groups of three or a comma follows. Digits with a leading zero, or that
    read as no number (10.0.0.1), are compared as written. Signs of a name count: C is not found in C++, nor NET in .NET. Width, forms
    of quotes and dashes, white space, and punctuation after a word do not count.

    Args:
        text: What a model wrote.
        answer: The answer.
        place: `anywhere`, at the `start`, or as the `whole` text. The latter two ignore punctuation and an English article before it,
            `whole` also punctuation after it. Default: anywhere.
        match_case: Whether the case of letters counts. Default: False.
    """
    folded, wanted = _fold(text, match_case), _fold(answer, match_case)
    if place == "whole":
        wanted = _ARTICLE.sub("", wanted)
    start = folded.find(wanted) if wanted else -1
    while start >= 0:
        end = start + len(wanted)
        is_apart = not _NO_BEGINNING.match(folded, start) and not _NO_END.match(folded, end)
        is_first = place == "anywhere" or _TO_FIRST_CHARACTER.fullmatch(folded, 0, start + 1)
        is_last = place != "whole" or regex.fullmatch(_BETWEEN_WORDS, folded, pos=end)
        if is_apart and is_first and is_last:
            return True
        start = folded.find(wanted, start + 1)
    return False


def read_numbers(text: str) -> Iterator[Decimal]:
    """Yield the numbers of a text, as `has_answer` reads them."""
    for found in _NUMBER.finditer(_plain_text(text)):
        for _, value in _read_parts(found):
            if value is not None:
                yield value


def _fold(text: str, match_case: bool) -> str:
    """Return a text as it is compared, with each number in one form between marks."""
    plain = _plain_text(text)
    folded = plain if match_case else unicodedata.normalize("NFC", plain.casefold())

    def mark(found: "regex.Match[str]") -> str:
        return found["currency"] + ",".join(f"{_OPEN}{part}{_CLOSE}" for part, _ in _read_parts(found))

    return " ".join(_PUNCTUATION_AFTER_WORD.sub("", _NUMBER.sub(mark, folded)).split())


def _plain_text(text: str) -> str:
    return unicodedata.normalize("NFC", "".join(map(_plain_character, unicodedata.normalize("NFC", text))))


@functools.cache
def _plain_character(character: str) -> str:
    """Return the plain form of a character: a digit of ASCII, full width as half, no format characters."""
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.category(character) == "Cf":
        return ""
    # The wide comma is between items of a list, not between digits.
    if unicodedata.east_asian_width(character) in "FH" and character != "\uff0c":
        return unicodedata.normalize("NFKC", character)
    return _PLAIN_CHARACTERS.get(character, character)


def _read_parts(found: "regex.Match[str]") -> Iterator[tuple[str, Decimal | None]]:
    """Yield the numbers in digits with separators, in one form and as a number (None: no number)."""
    digits = regex.sub(r"['_\s]", "", found["digits"])
    sign = "-" if found["sign"] == "-" else ""
    for part in [digits] if _read_number(digits) is not None else digits.split(","):
        value = _read_number(part)
        if value is None:
            yield sign + part, None
        else:
            if not value:
                value = Decimal(0)
            elif sign:
                value = value.copy_negate()
            yield str(value.normalize(decimal.Context(prec=len(part)))), value
        sign = ""


def _read_number(digits: str) -> Decimal | None:
    if _POINT_FOR_FRACTIONS.fullmatch(digits):
        digits = digits.replace(",", "")
    elif _COMMA_FOR_FRACTIONS.fullmatch(digits):
        digits = digits.replace(".", "").replace(",", ".")
    return Decimal(digits) if _PLAIN_NUMBER.fullmatch(digits) else None

"""Whether a text has an answer: boundaries of words in scripts with and without spaces, numbers, and signs of names."""

import pytest

from midus_hf.evaluation.answers import has_answer, read_numbers

# Texts, and answers that they have.
FOUND = [
    ("青隼网关由北仓团队维护。", "北仓团队"), ("ｶﾞｲﾄﾞです", "ガイド"), ("เมืองหลวงคือกรุงเทพมหานคร", "กรุงเทพ"), ("由abc维护", "abc"),
    ("수도는 서울입니다.", "서울"), ("Merlin은 무엇인가?", "Merlin"),  # particles
    ("端口8443\uff0c由", "8443"), ("포트 8443을 사용한다", "8443"), ("พอร์ต๘๔๔๓ค่ะ", "8443"), ("気温は-5度", "-5"),
    ("\uff13\uff0e\uff11\uff14です", "3.14"), ("\u0663\u066b\u0661\u0664", "3.14"),
    ("the STORAGE team", "Storage team"), ("Wim's", "wim"), ("l\u2019Ankara", "Ankara"), ("**Paris** and _Rome_", "rome"),
    ("Rome.The", "Rome"), ("Kyiv--the capital", "Kyiv"), ("St. Helier", "St Helier"), ("e\u0301t\u00e9", "été"),
    ("Straße", "STRASSE"), ("Kyi\u00adv\u200b\u00a0Oblast", "Kyiv Oblast"),
    ("1,000 people", "1000"), ("1000", "1,000"), ("12,34,567", "1234567"), ("1.234.567", "1234567"), ("1.000,5", "1000.5"),
    ("1'000", "1000"), ("1_000", "1000"), ("1\u202f000 km", "1000"), ("3,14", "3.14"), ("0,125", "0.125"), ("1.0", "1"),
    (".5", "0.5"), ("1e-06", "0.000001"), ("\u22125 °C", "-5"), ("-$5", "-5"), ("$5", "5"), ("5%", "5"), ("5th", "5"),
    ("3-5", "5"), ("COVID-19", "19"), ("80,443,8443", "443"), ("1,000kg", "1000kg"), ("10.0.0.1:8443", "8443"),
    ("at 10.0.0.1", "10.0.0.1"), ("agent 007", "007"),
    ("C++!", "c++"), ("C++17", "C++"), ("C/C++", "C"), ("ASP.NET", ".NET"), ("C#.", "C#"), ("A-, B", "A-"),
]  # fmt: skip
NOT_FOUND = [
    ("Annapolis", "Ann"), ("storages", "storage"), ("merlin_cache", "cache"), ("병원", "원"), ("กุ", "ก"), ("e\u0301", "e"),
    ("H2O", "2"), ("18443", "8443"), ("8443.5", "8443"), ("8,443", "443"), ("1,000 people", "1"), ("1,000 people", "0"),
    ("3.14", "3"), ("1,5", "5"), ("3.11.2", "3.11"), ("1.5GB", "5GB"), ("v1.5", "v1"), ("v1.5", "5"), ("10²", "10"),
    ("5万人", "5"), ("1e-6", "6"), ("1.0", "10"), ("3.14", "314"), ("-5", "5"), ("\u22125", "5"), ("-$5", "5"), ("5", "-5"),
    ("3-1", "31"), ("007", "7"), ("1" + 30 * "0" + "1", "1" + 30 * "0" + "2"),
    ("C++", "C"), ("C#", "C"), (".NET", "NET"), ("A-", "A"), ("Na+ ions", "Na"), ("m²", "m"), ("text", ""), ("text", "\u200b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "answer", "is_found"), [*((*row, True) for row in FOUND), *((*row, False) for row in NOT_FOUND)]
)
def test_text_has_an_answer(text, answer, is_found):
    assert has_answer(text, answer) == is_found


@pytest.mark.parametrize(
    ("text", "answer", "starts", "is_whole"),
    [
        ("Saint Helier in Jersey", "Saint Helier", True, False),
        (' "the Saint Helier".', "saint helier", True, True),
        ("Hague", "The Hague", False, True),
        ("in Saint Helier", "Saint Helier", False, False),
        ("Grade A.", "A", False, False),
        ("A.", "A", True, True),
        ("1,000 people", "1000", True, False),
        ("北京市", "北京", True, False),
        ("Kyiv!", "Kyiv.", True, True),
    ],
)
def test_place_restricts_where_an_answer_is_found(text, answer, starts, is_whole):
    assert has_answer(text, answer, "start") == starts
    assert has_answer(text, answer, "whole") == is_whole


def test_case_counts_if_asked():
    assert has_answer(" na", "Na", "start") and not has_answer(" na", "Na", "start", match_case=True)
    assert has_answer("1E3 Na", "Na", match_case=True) and has_answer("1E3", "1000", match_case=True)


def test_numbers_are_read_in_order_of_the_text():
    text = "the 11th of 12, 1,000.5 kg, -7, not 10.0.0.1, 007, v2 or 5万, but 80,443,8443 and 3km"
    assert [*map(float, read_numbers(text))] == [11, 12, 1000.5, -7, 80, 443, 8443, 3]

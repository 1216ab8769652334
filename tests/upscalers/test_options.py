"""Options of methods, the table of methods, and sizes as people write them."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from midus_hf.config.memories import MEMORY_TYPES
from midus_hf.config.memories.headwise import HeadwiseOptions
from midus_hf.config.memories.hierarchical import HierFFNOptions
from midus_hf.config.memory_types import MemoryOptions
from midus_hf.config.options import describe_options, option
from midus_hf.config.wording import near_matches
from upscalers.methods.contract import METHODS, get_method, register_method
from upscalers.request.errors import RequestError
from upscalers.request.options import parse_options
from upscalers.runs.upscale import parse_size


@dataclass
class Sample:
    count: int = option(3, "how many")
    rate: float = option(0.5, "how fast")
    kind: Literal["a", "b"] = option("a", "which")
    name: str | None = option(None, "called")
    flag: bool = option(False, "whether")
    table: dict | None = None
    anything: Any = None


def test_values_of_the_right_kind_are_taken():
    given = {"count": 4, "rate": 2, "kind": "b", "name": "x", "flag": True, "table": {"y": 1}, "anything": [1]}
    parsed = parse_options(Sample, given, "sample")
    assert vars(parsed) == given
    assert isinstance(parsed.rate, float)
    assert parse_options(Sample, {"name": None}, "sample") == Sample()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cuont": 1}, "sample has no option 'cuont'. Did you mean 'count'"),
        ({1: 1}, "sample has no option '1'"),
        ({"count": 1.5}, "count is 1.5; expected a whole number"),
        ({"count": True}, "count is True; expected a whole number"),
        ({"count": None}, "count is None; expected a whole number"),
        ({"rate": "fast"}, "rate is 'fast'; expected a number"),
        ({"kind": "c"}, "kind is 'c'; expected one of: a, b"),
        ({"name": 5}, "name is 5; expected a string"),
        ({"flag": 1}, "flag is 1; expected true or false"),
        ({"table": [1]}, r"table is \[1\]; expected a mapping"),
    ],
)
def test_values_of_the_wrong_kind_and_unknown_keys_are_refused(given, message):
    with pytest.raises(RequestError, match=message):
        parse_options(Sample, given, "sample")


@pytest.mark.parametrize("value", [[768, 256, 16, 0], "768,256,16,0", "768, 256, 16, 0", "768,2.56e2,16,0"], ids=str)
def test_numbers_of_a_list_may_stand_in_one_line(value):
    options = parse_options(HierFFNOptions, {"sizes": value}, "method hier-ffn")
    assert options.sizes == [768, 256, 16, 0] and all(type(size) is int for size in options.sizes)


@pytest.mark.parametrize("value", ["768;256", "768,x", 768, "768,1.5"], ids=str)
def test_what_is_no_list_of_numbers_is_refused_with_forms_that_are_accepted(value):
    message = r"sizes is .*; expected a list, each item of it a whole number, such as \[4, 2\] or 4,2\."
    if value == "768,1.5":
        message = r"sizes\[1\] is 1.5; expected a whole number\."
    with pytest.raises(RequestError, match=message):
        parse_options(HierFFNOptions, {"sizes": value}, "method hier-ffn")


def test_options_are_described_for_people():
    described = {row["name"]: row for row in describe_options(Sample)}
    assert described["count"] == {"name": "count", "type": "a whole number", "default": 3, "help": "how many"}
    assert described["kind"]["type"] == "a | b"
    assert described["name"]["type"] == "a string | null"


def test_each_memory_type_is_given_by_a_method():
    get_method("midus-hml")
    given = [method.options_class for method in METHODS.values() if issubclass(method.options_class, MemoryOptions)]
    assert {options.type for options in given} == set(MEMORY_TYPES)


def test_at_most_three_near_matches_are_named_the_nearest_first():
    known = ["abcd--", "abcde-", "abcdef", "abcdex", "xyz"]
    assert near_matches("abcdef", known) == "Did you mean 'abcdef' or 'abcdex' or 'abcde-'?"


def test_an_unknown_method_is_refused_with_near_matches():
    with pytest.raises(RequestError, match=r"method 'midus-hmm' is unknown\. Did you mean 'midus-hml'"):
        get_method("midus-hmm")
    with pytest.raises(RequestError, match=r"method 'zzz' is unknown\. Expected one of: .*midus-hml"):
        get_method("zzz")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("midus-hml", "method 'midus-hml' is already registered; choose another name"),
        ("Midus", "method name is 'Midus'; expected lower case words joined by hyphens"),
        ("midus_x", "method name is 'midus_x'; expected lower case words"),
        ("", "method name is ''; expected lower case words"),
        ("midus--x", "method name is 'midus--x'; expected lower case words"),
        ("-midus", "method name is '-midus'; expected lower case words"),
    ],
)
def test_methods_are_registered_under_plain_names_of_their_own(name, message):
    get_method("midus-hml")
    before = dict(METHODS)
    with pytest.raises(ValueError, match=message):
        register_method(name)
    assert before == METHODS


@pytest.mark.parametrize(
    ("text", "expected"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5 kb", 1500), ("2GiB", 2**31), ("7", 7), (1234, 1234), ("1B", 1)],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-5GB", "5XB", "GB", "five", "1e9", None, "5GB/s"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RequestError, match=r"max-shard-size is .*; expected a positive size such as 5GB or 500MB"):
        parse_size(text)


@dataclass
class Presets:
    """Options with a preset."""

    presets: ClassVar[dict[str, dict[str, Any]]] = {"fast": {"steps": 1, "rate": 0.5}}

    steps: int = option(10, "steps")
    rate: float = option(0.1, "rate")
    scale: Any = option({"down": 0.5}, "scale", type="a mapping")


def test_a_preset_sets_several_options_and_given_ones_win():
    for given in ({"preset": "fast", "rate": 0.9}, {"rate": 0.9, "preset": "fast"}):
        chosen = parse_options(Presets, given, "method x")
        assert (chosen.steps, chosen.rate) == (1, 0.9)
    assert parse_options(Presets, {}, "method x").steps == 10
    assert parse_options(Presets, {"preset": None}, "method x").steps == 10


def test_an_unknown_preset_is_refused():
    with pytest.raises(RequestError, match="preset is 'slow'; expected one of: fast"):
        parse_options(Presets, {"preset": "slow"}, "method x")
    with pytest.raises(RequestError, match="method midus-hml has no option 'preset'"):
        parse_options(HeadwiseOptions, {"preset": "fast"}, "method midus-hml")


def test_presets_and_words_for_types_are_described():
    described = {row["name"]: row for row in describe_options(Presets)}
    assert described["preset"]["help"] == "several options at once (fast: steps=1, rate=0.5)"
    assert (described["scale"]["type"], described["scale"]["default"]) == ("a mapping", {"down": 0.5})


def test_a_mutable_default_is_not_shared():
    parse_options(Presets, {}, "method x").scale["down"] = 1.0
    assert parse_options(Presets, {}, "method x").scale == {"down": 0.5}

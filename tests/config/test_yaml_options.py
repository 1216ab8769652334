"""Options come from YAML files and settings `key=value`; others are refused with a remedy."""

import dataclasses
import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from midus_hf import RequestError
from midus_hf.config.errors import as_request_error, name_in_request_errors
from midus_hf.config.options import read_options
from midus_hf.config.yaml_options import from_mapping, options_from_files, read_mapping, read_yaml, write_yaml
from midus_hf.sources.tokenizers import check_ids, load_tokenizer


@dataclasses.dataclass(kw_only=True)
class Text:
    path: str
    column: str = "text"


class Pace(enum.Enum):
    NO = "no"
    STEPS = "steps"


@dataclasses.dataclass(kw_only=True)
class Settings:
    model: str
    text: Text
    rate: float = 1e-3
    steps: int | None = None
    tasks: list[str] = dataclasses.field(default_factory=list)
    rates: list[float] | None = None
    precision: Literal["bf16", "fp32"] = "bf16"
    mask: bool = False
    resume: bool | str = False
    table: dict | None = None
    pace: Pace | str = "no"
    name: str | None = None


@dataclasses.dataclass(kw_only=True)
class Named:
    texts: dict[str, Text]
    free: dict[str, Any] | str | None = None


NEEDED = {"model": "m", "text": "t"}


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_settings_override_a_file(tmp_path):
    path = write(tmp_path, "model: m\ntext: t\nrate: 0.5\nsteps: 7\ntasks: [a, b]\n")
    settings = options_from_files(Settings, [path], ["steps=9", "rate=0", "resume=true", "precision=fp32"])
    expected = {"rate": 0.0, "steps": 9, "tasks": ["a", "b"], "resume": True, "precision": "fp32"}
    assert settings == Settings(model="m", text=Text(path="t"), **expected)


# What plain words of YAML are: numbers of YAML 1.2, with digits in groups, but true, false and null of YAML 1.1.
PLAIN = {
    **{"010": 10, "0123": 123, "08": 8, "00": 0, "+12": 12, "-7": -7, "1_000": 1000, "0x10": 16, "0o10": 8},
    **{"1e-6": 1e-6, "1e6": 1e6, "1E+3": 1e3, ".5": 0.5, "1.": 1.0, "-.5e3": -500.0, "1_000.5": 1000.5, "0.10": 0.1},
    **{".inf": float("inf"), "-.INF": -float("inf"), "1:30": "1:30", "1:30.5": "1:30.5", "0b11": "0b11", "-0x10": "-0x10"},
    **{"1__0": "1__0", "1_": "1_", "1e": "1e", ".": ".", "-.": "-.", "inf": "inf", "nan": "nan", "'010'": "010"},
    **{"2024-01-01": "2024-01-01", "2024-13-45": "2024-13-45", "=": "=", "None": "None", "y": "y", "True": True},
    **{"yes": True, "On": True, "no": False, "OFF": False, "~": None, "Null": None, "": None},
}  # fmt: skip


@pytest.mark.parametrize("word", PLAIN)
def test_plain_word_is_the_same_at_any_depth(word, tmp_path):
    value, read = PLAIN[word], read_mapping(write(tmp_path, f"free:\n  x: {word}\n  y: [{word}]\nz: {word}\n"))
    assert repr(read) == repr({"free": {"x": value, "y": [value] if word else []}, "z": value})
    assert repr(options_from_files(Named, [], ["texts={}", f"free.x={word}"]).free) == repr({"x": value})


@pytest.mark.parametrize("text", [*(word for word, value in PLAIN.items() if value is not None), "<<", "!a", "- b"])
def test_written_yaml_is_read_alike_by_yaml_1_1(text):
    for value in (text, PLAIN.get(text)):
        written = write_yaml({"a": value, "b": [value]}, None)
        assert repr(read_yaml(written, "text")) == repr(yaml.safe_load(written)) == repr({"a": value, "b": [value]})


def test_keys_of_mappings_are_text(tmp_path):
    read = read_mapping(write(tmp_path, "{no: 1, on: {off: 2}, 010: 3, 1e-4: 4, ~: 5}"))
    assert read == {"no": 1, "on": {"off": 2}, "010": 3, "1e-4": 4, "~": 5}
    path = write(tmp_path, "a: &a {x: 1, y: 2}\nb: &b {<<: *a, y: 3}\nc: {<<: *b}\n")  # merged keys
    assert read_mapping(path)["b"] == read_mapping(path)["c"] == {"x": 1, "y": 3}
    assert str(read_yaml("{a: .NaN}", "text")["a"]) == "nan"


def test_values_are_converted_to_the_types_of_their_keys(tmp_path):
    path = write(tmp_path, "model: m\ntext: t\nrate: 3e-5\nsteps: 1e3\nrates: [1e-4, 2]")
    settings = options_from_files(Settings, [path])
    assert (settings.rate, settings.steps) == (3e-5, 1000)
    assert isinstance(settings.steps, int)
    assert from_mapping(Settings, {**NEEDED, "steps": 2**60 + 1}).steps == 2**60 + 1
    assert settings.rates == [1e-4, 2.0]
    assert all(isinstance(rate, float) for rate in settings.rates)
    path = write(tmp_path, "model: m\ntext: t\nsteps: 3\nrates: null")  # which only optional keys take
    assert options_from_files(Settings, [path], ["steps=null"]) == Settings(model="m", text=Text(path="t"))
    with pytest.raises(ValueError, match=r"tasks is None; expected a list, each item of it a string\."):
        options_from_files(Settings, [path], ["tasks=null"])
    words = ["text.path=t", "text.column=body"]  # of a group, of which a scalar is the first key
    assert options_from_files(Settings, [write(tmp_path, "model: m")], words).text == Text(path="t", column="body")
    assert from_mapping(Settings, {**NEEDED, "text": {"path": "a", "column": "b"}}).text == Text(path="a", column="b")


@pytest.mark.parametrize(("values", "message"), [
    *(({"model": "m", "text": "t", key: ...}, f"config has no '{key}'; give it.") for key in NEEDED),
    ({"rat": 1}, "config has no option 'rat'. Expected one of: model, text, rate, steps, "),
    ({"text": {"path": "t", "colum": "x"}}, "config has no option 'text.colum'. Expected one of: path, column."),
    ({"text": {"column": "x"}}, "config has no 'text.path'; give it."),
    ({"text": None}, "text is None; expected a mapping with path, column."),
    ({"name": False}, "expected a string or null. Put text that YAML reads as another value, such as no"),
    ({"pace": False}, "expected one of: no, steps. Put text that YAML reads as another value, such as no"),
    ({"rate": 10**400}, "expected a number."),
    ({"tasks": ["a", 1]}, "tasks[1] is 1; expected a string."),
])  # fmt: skip
def test_wrong_value_is_refused(values: dict[Any, Any], message):
    given = {key: value for key, value in {**NEEDED, **values}.items() if value is not ...}
    with pytest.raises(ValueError, match=re.escape(message)):
        from_mapping(Settings, given)


@pytest.mark.parametrize(("config", "word", "message"), [
    (Settings, "steps", "--set is 'steps'; expected key=value."),
    (Settings, "text.=3", "--set is 'text.=3'; expected key=value."),
    (Settings, "model.path=3", "--set model.path is given, but 'model' is 'm', which has no keys; expected a mapping."),
    (Settings, "nothing.path=3", "config has no option 'nothing'."),
    (Settings, "model=[", "--set 'model=[' is not YAML: "),
    (Settings, "model=!!int x", "is not YAML: it has a tag that its value does not fit, or a number of too many digits. C"),
    (Settings, f"steps={'1' * 5000}", "is not YAML: it has a tag that its value does not fit, or a number of too many"),
    (Named, "texts.a.column=b", "--set texts.a.column is given, but 'a' is 'a.txt', which has no keys; expected a mapping."),
    (Named, "free.x.y=1", "but 'x' is 3, which has no keys; expected a mapping. Give all of it."),
])  # fmt: skip
def test_wrong_setting_is_refused(tmp_path, config, word, message):
    text = "model: m\ntext: t" if config is Settings else "texts: {a: a.txt}\nfree: {x: 3, z: [1]}"
    with pytest.raises(ValueError, match=re.escape(message)):
        options_from_files(config, [write(tmp_path, text)], [word])


@pytest.mark.parametrize(("word", "expected"), [
    ("texts.b.path=b.txt", Named(texts={"a": Text(path="a.txt"), "b": Text(path="b.txt")})),
    ("free.x=1", Named(texts={"a": Text(path="a.txt")}, free={"x": 1})),
    ("free.x.y.z=1", Named(texts={"a": Text(path="a.txt")}, free={"x": {"y": {"z": 1}}})),
])  # fmt: skip
def test_settings_reach_inside_named_groups(tmp_path, word, expected):
    assert options_from_files(Named, [write(tmp_path, "texts: {a: a.txt}")], [word]) == expected


@pytest.mark.parametrize(("key", "word", "value"), [
    *((key, word, word == "True") for key in ("mask", "resume") for word in ("True", "False")),
    ("resume", "auto", "auto"),
    ("name", "True", "True"),
    ("name", "None", None),
    ("steps", "None", None),
    ("model", "None", "None"),
])  # fmt: skip
def test_quoted_word_of_python_counts_where_a_key_takes_it(key, word, value):
    assert getattr(from_mapping(Settings, {**NEEDED, key: word}), key) == value


def test_file_without_a_mapping_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"which cannot be read \(No such file or directory\); give a YAML file"):
        read_mapping(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match=r"is not YAML: .*Correct it there"):
        read_mapping(write(tmp_path, "model: [m"))
    with pytest.raises(ValueError, match=r"holds a list; expected a mapping of keys to values"):
        read_mapping(write(tmp_path, "- model"))
    assert read_mapping(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(("text", "words", "message"), [
    ("model: m\ntext: t\nrate: 1\nrate: 2\n", [], "has 'rate' twice, in lines 3 and 4; expected each key once. Leave one"),
    ("model: m\n", ["text={path: a, path: b}"], "--set 'text={path: a, path: b}' has 'path' twice"),
    ("model: m\ntext: t\n", ["rate=1", "rate=3"], "--set rate is given twice; expected each key once. Leave one out."),
    ("model: m\ntext: ''\n", [], "text.path is ''; expected a value. Fill it in, or leave it out."),
    ("model: m\ntext: t\n", ["model=''"], "model is ''; expected a value. Fill it in, or leave it out."),
])  # fmt: skip
def test_repeated_key_or_empty_value_is_refused(text, words, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)):
        options_from_files(Settings, [write(tmp_path, text)], words)


def test_later_files_change_keys_within_mappings(tmp_path):
    first = write(tmp_path, "texts: {a: {path: a.txt, column: body}}\nfree: {x: 1, y: 2}\n")
    second = tmp_path / "second.yaml"
    second.write_text("texts: {a: {path: b.txt}}\nfree: {y: 3}\n")
    read = options_from_files(Named, [first, second], ["free.z=4"])
    assert read == Named(texts={"a": Text(path="b.txt", column="body")}, free={"x": 1, "y": 3, "z": 4})


@dataclass
class Options:
    a: int = 0


def test_subject_stands_only_before_request_errors():
    with pytest.raises(RequestError, match=r"^variants\.a: keys has no option"), name_in_request_errors("variants.a"):
        read_options(Options, {"b": 1}, "keys")
    with pytest.raises(json.JSONDecodeError, match=r"^Expecting value"), name_in_request_errors("variants.a"):
        json.loads("no")


def test_library_error_becomes_a_request_error_with_a_prefix():
    with pytest.raises(RequestError, match=r"^there is none: [^\n]+$"), as_request_error("there is none", OSError):
        load_tokenizer("absent/model")
    with pytest.raises(RequestError, match=r"^no: first$"), as_request_error("no", KeyError, OSError):
        raise OSError("first\nsecond")
    first = {"reason": lambda error: error.args[0]}
    with pytest.raises(RequestError, match=r"^no: a b$"), as_request_error("no", KeyError, **first):
        raise KeyError("a b")
    with pytest.raises(RequestError, match=r"^the tokenizer yields id 3"), as_request_error("no", ValueError):
        check_ids(3, 2)  # a RequestError itself
    with pytest.raises(RuntimeError, match=r"^other$"), as_request_error("no", OSError):
        raise RuntimeError("other")

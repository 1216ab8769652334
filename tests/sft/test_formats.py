"""Rows of every format become chats, or prompts and completions; what a format is, columns say."""

import gzip
import json
import re

import pytest
from datasets import Dataset
from sft.tiny_chats import write_rows
from training.tiny_run import refused

from midus_hf.sft.chat_dataset import iterate_rows
from midus_hf.sft.formats import FORMATS, Chat, Completion, detect_format, format_named, read_example
from midus_hf.sft.options import SftConfig
from midus_hf.topics.text_files import DocumentError

ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALLED = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"where": "up"}}}
FOUND = {"role": "tool", "tool_call_id": "1", "content": "sky"}


@pytest.mark.parametrize(
    ("name", "row", "example"),
    [
        ("messages", {"messages": [ASKED, SAID], "id": 3}, Chat([ASKED, SAID])),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            Chat([{"role": "system", "content": "s"}, ASKED, SAID]),
        ),
        ("sharegpt", {"conversations": [ASKED, SAID]}, Chat([ASKED, SAID])),
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, Chat([ASKED, SAID])),
        ("alpaca", {"instruction": "q", "output": "a"}, Chat([ASKED, SAID])),
        (
            "alpaca",
            {"instruction": "q", "input": "i", "output": "a"},
            Chat([{"role": "user", "content": "q\n\ni"}, SAID]),
        ),
        (
            "dolly",
            {"instruction": "q", "context": "c", "response": "a", "category": "x"},
            Chat([{"role": "user", "content": "q\n\nc"}, SAID]),
        ),
        (
            "messages",
            {
                "messages": [
                    {**ASKED, "tool_calls": None},
                    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                    {**FOUND, "tool_calls": None},
                    SAID,
                ],
                "tools": json.dumps([TOOL]),
            },
            Chat([ASKED, {"role": "assistant", "content": "", "tool_calls": [CALLED]}, FOUND, SAID], [TOOL]),
        ),
        (
            "messages",  # as OpenAI writes arguments
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "look", "arguments": '{"where": "up"}'}]}]},
            Chat([{"role": "assistant", "content": "", "tool_calls": [CALLED["function"]]}]),
        ),
        ("prompt-completion", {"prompt": "p", "completion": "c"}, Completion("p", "c")),
        ("prompt-completion", {"prompt": [ASKED], "completion": [SAID]}, Chat([ASKED, SAID])),
    ],
)
def test_a_row_is_detected_by_its_columns_and_read(name, row, example):
    known = detect_format(row, "row 1")
    assert known is format_named(name) and read_example(known, row, "row 1") == example


def test_every_format_is_read_above():
    assert set(FORMATS) == {"messages", "sharegpt", "alpaca", "dolly", "prompt-completion"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "t"},
            "row 1 has the columns text; expected those of a format (messages: messages; sharegpt: conversations;",
        ),
        ([1], "row 1 has a list; expected those of a format"),
    ],
)
def test_columns_of_no_format_are_refused(row, message):
    with refused(re.escape(message), DocumentError):
        detect_format(row, "row 1")


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("messages", "x", "row 1 is a str; expected an object with messages."),
        (
            "alpaca",
            {"messages": []},
            "row 1 has no 'instruction', only messages; expected the columns of format 'alpaca'. Add it, or set dataset_format.",
        ),
        ("messages", {"messages": []}, "row 1, messages is empty; expected messages."),
        ("messages", {"messages": "hi"}, "row 1, messages is a str; expected messages."),
        (
            "messages",
            {"messages": [ASKED, {"role": "assistant", "content": None}]},
            "message 2 of row 1, messages is no text with a role; expected role and content, or from and value.",
        ),
        ("alpaca", {"instruction": "q", "output": 3}, "row 1 has a int under 'output'; expected text."),
        (
            "messages",
            {"messages": [{"role": "usr", "content": "q"}, SAID]},
            "message 1 of row 1, messages has the role 'usr', which no template knows. Did you mean 'user'",
        ),
        (
            "sharegpt",
            {"conversations": [{"from": "humann", "value": "q"}, SAID]},
            "message 1 of row 1, conversations has the role 'humann', which no template knows. Did you mean 'human'",
        ),
        (
            "messages",
            {"messages": [ASKED, {"role": "assistant", "content": " \n"}]},
            "message 2 of row 1, messages is an empty answer; expected text. Fill it in, or take the row out.",
        ),
        ("dolly", {"instruction": "q", "response": ""}, "row 1 has an empty answer under 'response'; expected text."),
        ("prompt-completion", {"prompt": "p", "completion": " "}, "row 1 has an empty answer under 'completion'"),
        (
            "messages",
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {}}]}]},
            "message 1 of row 1, messages calls a tool that has no name; expected a list of objects with function: name and",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "tool_calls": "look"}]},
            "message 1 of row 1, messages has tool_calls that are no calls; expected",
        ),
        (
            "messages",
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "message 1 of row 1, messages calls 'f' with arguments that are not JSON: ",
        ),
        ("messages", {"messages": [ASKED, SAID], "tools": "["}, "row 1 has tools that are not JSON: "),
        (
            "messages",
            {"messages": [ASKED, SAID], "tools": {"a": 1}},
            "row 1 has a dict under 'tools'; expected a list of",
        ),
    ],
)
def test_a_row_that_is_not_of_its_format_is_refused(name, row, message):
    with refused(re.escape(message), DocumentError):
        read_example(format_named(name), row, "row 1")


def test_a_format_that_does_not_exist_is_refused():
    message = (
        "dataset_format is 'chat'; expected one of 'messages', 'sharegpt', 'prompt-completion', 'alpaca', 'dolly'."
    )
    with refused(re.escape(message)):
        format_named("chat")


def rows_of(path, **options) -> list:
    return [row for _, row in iterate_rows(SftConfig(model_name_or_path="m", dataset_name=str(path), **options))]


def test_rows_are_read_from_every_kind_of_file_and_from_folders(tmp_path):
    rows = [{"n": 1}, {"n": 2}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.json").write_text(lines)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(lines.encode()))
    Dataset.from_list(rows).to_parquet(tmp_path / "e.parquet")
    (tmp_path / "notes.txt").write_text("no rows")
    files = sorted(path for path in tmp_path.iterdir() if path.suffix != ".txt")
    assert len(files) == 5 and all(rows_of(file) == rows for file in files)
    assert rows_of(tmp_path) == rows * 5


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absent/of/all", {}, "which does not exist; expected a file, a folder or a dataset id."),
        ("absent.jsonl", {}, "which does not exist; expected a file, a folder or a dataset id."),
        ("text.txt", {}, "expected a file ending in .jsonl, .json, .parquet."),
        ("folder", {}, "a folder without rows; expected files ending in .jsonl, .json, .parquet."),
        ("broken.json", {}, "is not JSON: "),
        ("broken.jsonl", {}, "line 1 of "),
        ("rows.jsonl", {"dataset_config": "x"}, "which is local; dataset_config is for datasets of the Hub."),
    ],
)
def test_what_holds_no_rows_is_refused(tmp_path, name, options, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "broken.jsonl").write_text("{")
    write_rows(tmp_path / "rows.jsonl", [{}])
    with refused(re.escape(message), DocumentError):
        rows_of(tmp_path / name, **options)

"""Rows of every format become the chat that they hold; what would be dropped or read otherwise is refused by key and row."""

import re

import pytest
from datasets import Dataset

from midus_hf.training.sft.formats import read_row, unread_keys

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": {"c": 2}}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}

CHATS = {
    "messages": ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        [USER, ANSWER],
    ),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, ANSWER]),
    "Alpaca with input": (
        {"instruction": "Add", "input": "1 2", "output": "3"},
        [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    "Dolly": ({"instruction": "Hi", "context": None, "response": "Hello", "category": "x"}, [USER, ANSWER]),
    "prompt of messages": ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
    "system of Alpaca": ({"instruction": "Hi", "output": "Hello", "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
    "system of ShareGPT": ({"conversations": [USER, ANSWER], "system": "Be brief."}, [SYSTEM, USER, ANSWER]),
    "history": (
        {"instruction": "Hi", "output": "Hello", "history": [["a", "b"]], "system": "Be brief."},
        [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER, ANSWER],
    ),
    "reasoning": (
        {"messages": [USER, {**ANSWER, "reasoning_content": "well"}]},
        [USER, {**ANSWER, "reasoning_content": "well"}],
    ),
    "reasoning twice": (
        {"messages": [USER, {**ANSWER, "reasoning": "well", "reasoning_content": "well"}]},
        [USER, {**ANSWER, "reasoning_content": "well"}],
    ),
    "weights of one": ({"messages": [{**USER, "train": True}, {**ANSWER, "weight": 1}]}, [USER, ANSWER]),
    "function_call": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": {"c": 2}}}'},
                {"from": "observation", "value": "3"},
            ]
        },
        [USER, CALLING, {"role": "tool", "content": "3"}],
    ),
    "arguments as JSON": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": {"c": 2}}'}}],
                },
            ]
        },
        [USER, CALLING],
    ),
}


@pytest.mark.parametrize("case", CHATS)
def test_a_row_becomes_its_chat(case):
    row, messages = CHATS[case]
    assert read_row(row, "row 1")["messages"] == messages


def test_calls_that_a_table_stored_have_their_own_arguments(tmp_path):
    other = {"type": "function", "function": {"name": "look", "arguments": {"where": "here"}}}
    rows = [{"messages": [USER, {**CALLING, "tool_calls": [call]}]} for call in (CALL, other)]
    Dataset.from_list(rows).to_parquet(tmp_path / "calls.parquet")
    read = [read_row(row, "row") for row in Dataset.from_parquet(str(tmp_path / "calls.parquet"))]
    assert [example["messages"][1]["tool_calls"] for example in read] == [[CALL], [other]]


def test_texts_tools_and_keys_of_templates_are_kept():
    assert read_row({"prompt": "a", "completion": "b"}, "row") == {"prompt": "a", "completion": "b"}
    row = {
        "messages": [USER, ANSWER],
        "tools": '[{"name": "add", "x": null}]',
        "chat_template_kwargs": {"think": False},
    }
    example = read_row({**row, "id": 3}, "row")
    assert example["tools"] == [{"name": "add"}] and example["chat_template_kwargs"] == {"think": False}


def test_columns_and_keys_that_are_not_read_are_named():
    rows = Dataset.from_list([{"messages": [{**USER, "id": 1}, ANSWER], "system": "x", "source": "y"}])
    assert unread_keys(rows.column_names, rows.features) == ["source", "messages.id"]
    alpaca = Dataset.from_list([{"instruction": "a", "input": "b", "output": "c", "text": "d"}])
    assert unread_keys(alpaca.column_names, alpaca.features) == ["text"]


REFUSED = {
    "has text with a value; expected the columns of a format (messages; conversations;": {"text": "a", "output": ""},
    "row 7 has 'system', and a system message. Leave one": {"messages": [SYSTEM, USER, ANSWER], "system": "x"},
    "row 7 has 'history', which only instructions": {"messages": [USER, ANSWER], "history": [["a", "b"]]},
    "row 7 has 'history', which is no list of pairs": {"instruction": "a", "output": "b", "history": ["a"]},
    "message 2 of row 7, messages has 'weight', 0, which": {"messages": [USER, {**ANSWER, "weight": 0}]},
    "message 1 of row 7, messages has 'train', false, which": {"messages": [{**USER, "train": False}, ANSWER]},
    "has 'role', 'Assistent', which no template knows": {"messages": [USER, {**ANSWER, "role": "Assistent"}]},
    "has 'function_call', which is not JSON": {"messages": [USER, {"role": "function_call", "content": "add"}]},
    "has 'tool_calls', not all with a name": {"messages": [USER, {**ANSWER, "tool_calls": [{"arguments": "{}"}]}]},
    "has 'arguments of add', which is not JSON": {
        "messages": [USER, {**ANSWER, "tool_calls": [{"name": "add", "arguments": "{"}]}]
    },
    "has 'tool_calls', and the role 'user'": {"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]},
    "message 2 of row 7, messages is an empty answer": {"messages": [USER, {**ANSWER, "content": " "}]},
    "message 2 of row 7, messages has 'thinking', and 'reasoning_content' with another text; a template reads one": {
        "messages": [USER, {**ANSWER, "thinking": "a", "reasoning_content": "b"}]
    },
    "has no answer; expected a message of the assistant": {"messages": [USER]},
    "is no text with a role": {"messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]},
    "row 7, messages is a str; expected messages": {"messages": "Hi"},
    "has 'instruction', a int; expected text": {"instruction": 1, "output": "a"},
    "has 'output', an empty answer": {"instruction": "a", "output": " "},
    "has 'tools', which is not JSON": {"messages": [USER, ANSWER], "tools": "["},
    "has 'tools', a dict; expected another kind": {"messages": [USER, ANSWER], "tools": {"a": 1}},
    "has 'system', which only chats have": {"prompt": "a", "completion": "b", "system": "c"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_template_would_not_get_is_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_row(REFUSED[message], "row 7")

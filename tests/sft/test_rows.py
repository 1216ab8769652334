"""Rows of every format become what TRL reads; what would be lost is refused by row and key, and what is not read is named."""

import json
import types

import pytest
from datasets import Dataset
from sft.tiny_chats import character_tokenizer, write_rows

from midus_hf.training.sft_rows import CHATML, read_chats

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def read(data, tokenizer=None, template="chatml"):
    options = {"dataset_name": str(data), "dataset_train_split": None, "dataset_config": None}
    arguments = types.SimpleNamespace(**options, chat_template_path=template, assistant_only_loss=False)
    return read_chats(arguments, tokenizer or character_tokenizer())


CHATS = {
    "messages": ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    "ShareGPT": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}, [USER, ANSWER]),
    "roles in conversations": ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, ANSWER]),
    "Alpaca with input": (
        {"instruction": "Add", "input": "1 2", "output": "3"},
        [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
    ),
    "what other rows lack": (
        {"conversations": [{"from": "human", "value": "Hi", "weight": 1}, {"role": "gpt", "content": "Hello", "id": 7}]},
        [{**USER, "weight": 1}, {**ANSWER, "id": 7}],
    ),
    "a column system": ({"messages": [USER, ANSWER], "system": "Be kind"}, [SYSTEM, USER, ANSWER]),
    "Alpaca with system and history": (
        {"instruction": "Bye", "output": "Ciao", "system": "Be kind", "history": [["Hi", "Hello"]]},
        [SYSTEM, USER, ANSWER, {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Ciao"}],
    ),
    "texts": ({"prompt": "12", "completion": "null", "id": 3}, {"prompt": "12", "completion": "null"}),
    "Dolly": ({"instruction": "Hi", "context": None, "response": "Hello", "category": "x"}, [USER, ANSWER]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
def test_a_row_becomes_its_chat(case, tmp_path):
    row, expected = CHATS[case]
    (chat,) = read(write_rows(tmp_path / "x.jsonl", [row]))
    assert (chat if case == "texts" else chat["messages"]) == expected


# Reading JSON is tested with corpora; here a table has every key of a column in each row, null where the row has none.
ARGUMENTS = {
    "a null that means something": [{"n": None, "m": 1}, {"n": 2, "m": 1}],
    "values of several types": [{"n": 3, "b": "null"}, {"n": 2.5, "a": 2**53 + 1}],
    "others in each call": [{"a": 1}, {"b": 1}],
}


@pytest.mark.parametrize(
    ("case", "ending"),
    [*((case, ending) for case in ARGUMENTS for ending in ("jsonl", "json")), ("others in each call", "parquet")],
)
def test_arguments_of_calls_are_what_json_says(case, ending, tmp_path):
    data, own = tmp_path / f"x.{ending}", tmp_path / "own.jinja"
    own.write_text("{{ messages[1].tool_calls }}{{ tools }}" + CHATML)
    calls = [[{"function": {"name": "f", "arguments": arguments}}] for arguments in ARGUMENTS[case]]
    rows = [
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": call}], "tools": call}
        for call in calls
    ]
    if ending == "parquet":
        Dataset.from_list(rows).to_parquet(data)
    elif ending == "json":
        data.write_text(json.dumps(rows))
    else:
        write_rows(data, rows)
    chats = list(read(data, template=str(own)))
    for chat, call in zip(chats, calls, strict=True):
        assert chat["messages"][1] == {"role": "assistant", "content": "", "tool_calls": call}
        assert repr(chat["messages"][1]["tool_calls"]) == repr(chat["tools"]) == repr(call)


def test_json_text_is_parsed_and_keeps_its_nulls(tmp_path):
    """A template that gets arguments as text encodes them again."""
    own = tmp_path / "own.jinja"
    own.write_text("{{ tools }}{{ loud }}{{ messages[0].tool_calls }}" + CHATML)
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "tools": '[{"name": "add", "x": null}]'}
    rows = [{**row, "chat_template_kwargs": '{"loud": true}'}, {"messages": [USER, ANSWER]}]
    first, second = read(write_rows(tmp_path / "x.jsonl", rows), template=str(own))
    assert first["messages"][1]["tool_calls"] == [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]
    assert first["tools"] == [{"name": "add", "x": None}] and first["chat_template_kwargs"] == {"loud": True}
    assert second["tools"] is None and second["chat_template_kwargs"] == {}
    row = {"prompt": [USER], "completion": [ANSWER], "tools": '[{"name": "add"}]'}
    (apart,) = read(write_rows(tmp_path / "x.jsonl", [row]), template=str(own))
    assert apart == {**row, "tools": [{"name": "add"}]}


def test_columns_and_keys_that_are_not_read_are_named(tmp_path, capsys):
    rows = [{"messages": [{**USER, "id": 1}, ANSWER], "category": "x", "source": "y"}]
    read(write_rows(tmp_path / "x.jsonl", rows))
    assert "not read: category, source, messages.id" in capsys.readouterr().err

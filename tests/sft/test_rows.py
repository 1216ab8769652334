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
    "texts": ({"prompt": "a", "completion": "b", "id": 3}, {"prompt": "a", "completion": "b"}),
    "Dolly": ({"instruction": "Hi", "context": None, "response": "Hello", "category": "x"}, [USER, ANSWER]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
def test_a_row_becomes_its_chat(case, tmp_path):
    row, expected = CHATS[case]
    (chat,) = read(write_rows(tmp_path / "x.jsonl", [row]))
    assert (chat if case == "texts" else chat["messages"]) == expected


ARGUMENTS = {
    "dates": [{"day": "2024-05-01"}, {"day": "2024-06-02"}],
    "a null that means something": [{"n": None, "m": 1}, {"n": 2, "m": 1}],
    "a fraction beside a whole number": [{"n": 3}, {"n": 2.5}],
    "fractions": [{"n": 0.1 + 0.2}, {"n": 1e22, "m": [1e-7]}],
    "large numbers": [{"n": 2**53 + 1}, {"n": -(2**63)}],
    "texts that are JSON": [{"n": "4"}, {"n": "null"}],
    "order": [{"b": 1, "a": 2}, {"a": 3, "b": 4}],
    "others in each call": [{"a": 1}, {"b": 1}],
}


@pytest.mark.parametrize(
    ("case", "ending"),
    [*((case, ending) for case in ARGUMENTS for ending in ("jsonl", "json")), ("others in each call", "parquet")],
)
def test_arguments_of_calls_are_what_json_says(case, ending, tmp_path):
    """A table has every key of a column in each row, null where the row has none."""
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


@pytest.mark.parametrize("answer", ["2004-01-25", "4", "007", "True", "null", "1e3"])
@pytest.mark.parametrize(("question", "ending"), [("prompt", "jsonl"), ("instruction", "csv")])
def test_answers_that_look_like_something_else_are_text(answer, question, ending, tmp_path):
    row = {question: "12", "completion" if question == "prompt" else "output": answer}
    data = tmp_path / f"x.{ending}"
    if ending == "csv":
        data.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n")
    else:
        write_rows(data, [row])
    chat = [{"role": "user", "content": "12"}, {"role": "assistant", "content": answer}]
    assert list(read(data)) == [row if question == "prompt" else {"messages": chat}]


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

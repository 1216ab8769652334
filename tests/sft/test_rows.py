"""Rows of every format become what TRL reads; what would be lost is refused by row and key, and what is not read is named."""

import json
import re
import types

import pytest
from datasets import Dataset
from sft.tiny_chats import character_tokenizer, write_rows
from training.tiny_run import refused, tiny_tokenizer

from midus_hf.training.sft_rows import CHATML, read_chats, set_template

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


REFUSED = {
    "dataset_name is 'DATA', whose rows have text; expected the columns of a format (messages; conversations;": {"text": "a"},
    "row 2 of 'DATA' has a message with weight: 0, which": {"messages": [USER, {**ANSWER, "weight": 0}]},
    "row 2 of 'DATA' has a message with weight: 0.5, which": {"messages": [USER, {**ANSWER, "weight": 0.5}]},
    "row 2 of 'DATA' has a message with train: False, which": {"messages": [{**USER, "train": False}, ANSWER]},
    "row 2 of 'DATA' has a message with loss: False, which": {"messages": [USER, {**ANSWER, "loss": False}]},
    "row 2 of 'DATA' has a message with loss_mask: 0, which": {"messages": [USER, {**ANSWER, "loss_mask": 0}]},
    "has 'system' and a system message. Leave one of them out": {"messages": [SYSTEM, USER, ANSWER], "system": "a"},
    "row 2 of 'DATA' has 'messages': 'Hi'; expected a list of messages. Correct it, or": {"messages": "Hi"},
    "row 2 of 'DATA' has 'messages': None; expected a list of messages": {"messages": None},
    "row 2 of 'DATA' has 'messages': [1]; expected a list of messages": {"messages": [1]},
    "has a message of the user with the content None; expected text": {"messages": [{"role": "user"}, ANSWER]},
    "has a message of the user with the content [{'type': 'text'}]; expected text": {
        "messages": [{"role": "user", "content": [{"type": "text"}]}, ANSWER]
    },
    "has 'tool_calls' in a message of the user; expected one of": {"messages": [{**USER, "tool_calls": [CALL]}, ANSWER]},
    "has the call {'arguments': '{}'} in 'tool_calls'; expected a name and": {
        "messages": [USER, {**ANSWER, "tool_calls": [{"arguments": "{}"}]}]
    },
    "row 2 of 'DATA' has 'arguments of add', which is not JSON: Expecting": {
        "messages": [USER, {**ANSWER, "tool_calls": [{"name": "add", "arguments": "{"}]}]
    },
    "row 2 of 'DATA' has 'tools', which is not JSON": {"messages": [USER, ANSWER], "tools": "["},
    "has 'chat_template_kwargs': ['a']; expected an object": {"messages": [USER, ANSWER], "chat_template_kwargs": '["a"]'},
    "has 'a(b', which the chat template does not write": {"messages": [USER, ANSWER], "chat_template_kwargs": {"a(b": 1}},
    "has the role 'usr', which no template knows; expected one of system,": {"messages": [{**USER, "role": "usr"}, ANSWER]},
    "row 2 of 'DATA' has an empty answer; expected text. Fill it in, or": {"messages": [USER, {**ANSWER, "content": " "}]},
    "row 2 of 'DATA' has no answer; expected a message of the assistant": {"messages": [USER]},
    "row 2 of 'DATA' has 'tools', which the chat template does not write": {"messages": [USER, ANSWER], "tools": '[{"name": "add"}]'},
    "row 2 of 'DATA' has 'tool_calls', which the chat template does not": {"messages": [USER, {**ANSWER, "tool_calls": [CALL]}]},
    "row 2 of 'DATA' has 'thinking', which the chat template does not": {"messages": [USER, {**ANSWER, "thinking": "hm"}]},
    "row 1 of 'DATA' has 'system', which only chats have": {"prompt": "a", "completion": "b", "system": "c"},
    "row 1 of 'DATA' has 'tools', which only chats have": {"prompt": "a", "completion": "b", "tools": "[{}]"},
    "row 1 of 'DATA' has 'completion': None; expected text": {"prompt": "a", "completion": None},
    "row 1 of 'DATA' has an empty answer; expected text. Fill it in": {"prompt": "a", "completion": " "},
    "row 1 of 'DATA' has 'completion': 'Hello'; expected a list of messages": {"prompt": [USER], "completion": "Hello"},
    "row 1 of 'DATA' has 'prompt': []; expected a list of messages": {"prompt": [], "completion": [ANSWER]},
    "row 1 of 'DATA' has 'instruction': 1; expected text": {"instruction": 1, "output": "a"},
    "row 1 of 'DATA' has an empty instruction; expected text": {"instruction": "", "output": "a"},
    "row 1 of 'DATA' has an empty answer": {"instruction": "a", "output": " "},
    "row 1 of 'DATA' has 'history': ['ab']; expected a list of pairs": {"instruction": "a", "output": "b", "history": ["ab"]},
    "row 1 of 'DATA' has a message with weight: 0, which": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "weight": 0}]
    },
    "row 1 of 'DATA' has 'reasoning_content', which the chat template": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello", "reasoning_content": "hm"}]
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_lossy_rows_are_refused(message, tmp_path):
    row = REFUSED[message]
    data = write_rows(tmp_path / "x.jsonl", [{"messages": [USER, ANSWER]}, row] if "messages" in row else [row])
    with refused(re.escape(message.replace("DATA", str(data)))):
        read(data)


def test_template_must_write_what_rows_hold(tmp_path):
    own, data = tmp_path / "own.jinja", tmp_path / "x.parquet"
    Dataset.from_list([{"messages": [{**USER, "thinking": ""}, {**ANSWER, "thinking": "hm"}]}]).to_parquet(data)
    own.write_text(
        "{# message.thinking #}<thinking>{% if thinking %}{% endif %}" + CHATML
    )  # text and comments write nothing
    with refused(r"has 'thinking', which the chat template does not write\. Set chat_template_path"):
        read(data, template=str(own))
    tokenizer = character_tokenizer()
    own.write_text(CHATML.replace("message['content'] +", "message.thinking + message['content'] +"))
    assert len(read(data, tokenizer, str(own))) == 1 and tokenizer.chat_template == own.read_text()
    for tokenizer, template, message in (
        (character_tokenizer(), None, "tokenizer has no chat template; set chat_template_path to chatml"),
        (character_tokenizer(), "absent", "chat_template_path is 'absent'; expected chatml, or a file"),
        (tiny_tokenizer(), "chatml", "whose tokens .* this tokenizer lacks"),
    ):
        with refused(message):
            set_template(tokenizer, template)

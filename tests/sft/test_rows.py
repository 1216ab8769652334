"""Rows of every format become what TRL reads; what would be lost is refused by row and key, and what is not read is named."""

import json
import types

import pyarrow.parquet
import pytest
from datasets import Dataset
from sft.tiny_chats import character_tokenizer, chat, prepared, write_rows
from training.tiny_run import refused, tiny_tokenizer

from midus_hf.training.sft.rows import CHATML, read_chats, set_template
from midus_hf.training.sft.run import SftArguments

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
    "an answer first": ({"messages": [ANSWER, USER, ANSWER]}, [ANSWER, USER, ANSWER]),
    "texts": ({"prompt": "12", "completion": "null", "id": 3}, {"prompt": "12", "completion": "null"}),
    "Dolly": ({"instruction": "Hi", "context": None, "response": "Hello", "category": "x"}, [USER, ANSWER]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHATS)
def test_a_row_becomes_its_chat(case, tmp_path):
    row, expected = CHATS[case]
    (chat,) = read(write_rows(tmp_path / "x.jsonl", [row]))
    assert (chat if case == "texts" else chat["messages"]) == expected


@pytest.mark.parametrize("kind", ["large_string", "string_view"])
def test_texts_of_every_type_of_arrow_get_no_template(kind, tmp_path):
    columns = {"prompt": pyarrow.array(["12"], kind), "completion": pyarrow.array(["3"], kind)}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet")
    assert [*read(tmp_path / "x.parquet", template=None)] == [{"prompt": "12", "completion": "3"}]


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
    for made, call in zip(read(data, template=str(own)), calls, strict=True):
        assert made["messages"][1] == {"role": "assistant", "content": "", "tool_calls": call}
        assert repr(made["messages"][1]["tool_calls"]) == repr(made["tools"]) == repr(call)


def test_json_text_is_parsed_and_keeps_its_nulls(tmp_path):
    """A template that gets arguments as text encodes them again."""
    own = tmp_path / "own.jinja"
    own.write_text("{{ tools }}{{ loud }}{{ messages[0].tool_calls }}" + CHATML)
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}], "tools": '[{"name": "add", "x": null}]'}
    rows = [{**row, "chat_template_kwargs": '{"loud": true}'}, {"messages": [USER, ANSWER]}]
    first, second = read(write_rows(tmp_path / "x.jsonl", rows), template=str(own))
    assert first["messages"][1]["tool_calls"] == [{**CALL, "function": {"name": "add", "arguments": {"a": 1}}}]
    assert first["tools"] == [{"name": "add", "x": None}]
    assert first["chat_template_kwargs"] == {"loud": True}
    assert second["tools"] is None
    assert second["chat_template_kwargs"] == {}
    row = {"prompt": [USER], "completion": [ANSWER], "tools": '[{"name": "add"}]'}
    (apart,) = read(write_rows(tmp_path / "x.jsonl", [row]), template=str(own))
    assert apart == {**row, "tools": [{"name": "add"}]}


def test_columns_and_keys_that_are_not_read_are_named(tmp_path, capsys):
    rows = [{"messages": [{**USER, "id": 1}, ANSWER], "category": "x", "source": "y"}]
    read(write_rows(tmp_path / "x.jsonl", rows))
    assert "not read: category, source, messages.id" in capsys.readouterr().err


NEEDED = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "bf16": False}
REFUSES = "{{% if {} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
SHARE_GPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def read_row(get, row):
    read(write_rows(get("tmp_path") / "x.jsonl", [{"messages": [USER, ANSWER]}, row] if "messages" in row else [row]))


def prepare_run(get, keys):
    own, row = get("tmp_path") / "own.jinja", keys.get("row")
    own.write_text(keys.get("template", CHATML))
    data = {} if row is None else {"data": write_rows(get("tmp_path") / "x.jsonl", [row])}
    options = {name: value for name, value in keys.items() if name not in ("template", "row")}
    prepared(get("config_for")(model=get("base")(), chat_template_path=str(own), **data, **options))


CALLS = {
    "row": read_row,
    "values": lambda get, keys: SftArguments(**NEEDED, **keys),
    "run": prepare_run,
    "bank": lambda get, keys: prepared(get("config_for")(model=get("base")("llama", "hier-ffn"), **keys)),
    "template": lambda get, keys: set_template(*keys),
}
# What is asked for, how, and what is said.
REQUESTS = [
    ("row", {"text": "a"}, r"whose rows have text; expected the columns of a format"),
    *(("row", {"messages": [USER, {**ANSWER, "weight": weight}]}, f"^row 2 of '.*' has a message with weight: {weight}, which")
      for weight in (0, 0.5)),
    ("row", {"messages": [{**USER, "train": False}, ANSWER]}, "a message with train: False, which"),
    ("row", {"messages": [USER, {**ANSWER, "loss": False}]}, "a message with loss: False, which"),
    ("row", {"messages": [USER, {**ANSWER, "loss_mask": 0}]}, "a message with loss_mask: 0, which"),
    ("row", {"messages": [{**USER, "role": "usr"}, ANSWER]}, "^row 2 of .* the role 'usr', which no template knows; expected"),
    ("row", {"prompt": "a", "completion": " "}, "^row 1 of .* has an empty answer; expected text"),
    ("row", {"prompt": [USER], "completion": "Hello"}, "has 'completion': 'Hello'; expected a list"),
    ("row", {"prompt": [], "completion": [ANSWER]}, r"has 'prompt': \[\]; expected a list"),
    ("row", {"instruction": 1, "output": "a"}, "has 'instruction': 1; expected text"),
    ("row", {"instruction": "", "output": "a"}, "has an empty instruction; expected text"),
    ("row", {"instruction": "a", "output": " "}, "has an empty answer"),
    ("row", {"instruction": "a", "output": "b", "history": ["ab"]}, r"has 'history': \['ab'\]; expected a list of pairs"),
    ("row", {"conversations": [SHARE_GPT[0], {**SHARE_GPT[1], "weight": 0}]}, "a message with weight: 0, which"),
    ("row", {"conversations": [SHARE_GPT[0], {**SHARE_GPT[1], "reasoning_content": "hm"}]}, "'reasoning_content', which the chat"),
    ("values", {"loss_type": "dft"}, "loss_type is 'dft'; expected 'nll'"),
    ("values", {"model_init_kwargs": {"a": 1}}, "model_init_kwargs is {'a': 1}; expected None"),
    ("values", {"trust_remote_code": True}, "trust_remote_code is True; expected False"),
    ("values", {"dataset_kwargs": {"skip_prepare_dataset": True}}, "dataset_kwargs is {.*}; expected None"),
    ("values", {"dataset_text_field": "body"}, "dataset_text_field is 'body'; expected 'text'"),
    ("values", {"eval_packing": False}, "eval_packing is False; expected None"),
    ("values", {"padding_free": True}, "padding_free is True; expected False: packing: true"),
    ("values", {"packing": True, "truncation_mode": "keep_end"}, "truncation_mode is 'keep_end', and packing"),
    ("run", {"template": UNMARKED}, "does not mark answers, .* Pass --chat_template_path chatml"),
    ("run", {"template": REFUSES.format("'say 3' in messages[0].content") + CHATML}, "row 4 of .* by the chat template: no. Correct"),
    ("run", {"template": CHATML.replace("assistant'", "Assistant'")}, "TRL refuses a row of it: .*has no assistant tokens"),
    ("run", {"row": {"messages": chat(1)}, "completion_only_loss": True}, "no completion; expected the columns prompt and"),
    ("run", {"row": {"messages": chat(1)}, "max_length": 4}, "no answer to learn from within 4 tokens"),
    # The one label of the data is the first token of a fragment, which nothing predicts.
    ("run", {"row": {"prompt": "a" * 8, "completion": "<eos>"}, "packing": True, "packing_strategy": "bfd_split", "max_length": 8},
     "within 8 tokens. Add data, or raise max_length"),
    ("bank", {"trainable": "auto"}, "only the bank's blocks, and chats fetch none"),
    ("template", (character_tokenizer(), None), "no chat template; set chat_template_path to chatml"),
    ("template", (character_tokenizer(), "absent"), "chat_template_path is 'absent'; expected chatml, or"),
    ("template", (tiny_tokenizer(), "chatml"), "whose tokens .* this tokenizer lacks"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "keys", "message"), REQUESTS)
def test_wrong_requests_are_refused_before_writing(call, keys, message, request, tmp_path):
    with refused(message):
        CALLS[call](request.getfixturevalue, keys)
    assert not (tmp_path / "out").exists()


def test_template_must_write_what_rows_hold(tmp_path):
    own, data = tmp_path / "own.jinja", tmp_path / "x.parquet"
    Dataset.from_list([{"messages": [{**USER, "thinking": ""}, {**ANSWER, "thinking": "hm"}]}]).to_parquet(data)
    # Text and comments write nothing.
    own.write_text("{# message.thinking #}<thinking>{% if thinking %}{% endif %}" + CHATML)
    with refused(r"has 'thinking', which the chat template does not write\. Set chat_template_path"):
        read(data, template=str(own))
    tokenizer = character_tokenizer()
    own.write_text(CHATML.replace("message['content'] +", "message.thinking + message['content'] +"))
    assert len(read(data, tokenizer, str(own))) == 1
    assert tokenizer.chat_template == own.read_text()

"""Chats become tokens of which answers, with the token that ends them, have a loss."""

import gzip
import json
import types

import pytest
from datasets import Dataset
from sft.tiny_chats import character_tokenizer, chat, write_rows
from trl.chat_template_utils import qwen2_5_chat_template

from midus_hf.training.sft.chats import CHATML, chat_examples, choose_template, encode

PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def arguments(data, **changes):
    options = {
        "dataset_name": str(data),
        "dataset_train_split": None,
        "dataset_config": None,
        "dataset_num_proc": None,
        "chat_template_path": "chatml",
        "max_length": 96,
        "truncation_mode": "keep_start",
        "packing": False,
        "packing_strategy": "bfd",
        "assistant_only_loss": True,
    }
    return types.SimpleNamespace(**{**options, **changes})


def examples(data, tokenizer=None, **changes):
    return chat_examples(arguments(data, **changes), tokenizer or character_tokenizer(), 128)


def answers(row, tokenizer=None):
    return (tokenizer or character_tokenizer()).decode([label for label in row["labels"] if label != -100])


def test_answers_and_the_tokens_that_end_them_have_a_loss(tmp_path):
    tokenizer = character_tokenizer()
    rows, last = examples(write_rows(tmp_path / "chats.jsonl", [{"messages": chat(3)}]), tokenizer)
    assert rows.column_names == ["input_ids", "labels"]
    assert answers(rows[0]) == "it is 3<|im_end|>4<|im_end|>"
    assert last == tokenizer.convert_tokens_to_ids("<|im_end|>")
    everything = examples(tmp_path / "chats.jsonl", assistant_only_loss=False)[0][0]
    assert everything["labels"] == everything["input_ids"] == rows[0]["input_ids"]


def test_completions_have_a_loss_and_an_end(tmp_path):
    rows, last = examples(write_rows(tmp_path / "x.jsonl", [{"prompt": "1 + 2 =", "completion": " 3"}]))
    assert answers(rows[0]) == " 3<eos>" and last is None


@pytest.mark.parametrize("name", ["list.json.gz", "list.json", "lines.ndjson", "lines.JSONL"])
def test_files_of_rows_are_read_by_their_kind(tmp_path, name):
    rows = [{"messages": chat(1)}, {"messages": chat(2)}]
    text = json.dumps(rows) if "list" in name else "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert len(examples(tmp_path / name)[0]) == 2


def test_a_downloaded_dataset_trains_its_train_split(tmp_path, capsys):
    for number, split in enumerate(("train", "validation", "test")):
        write_rows(tmp_path / f"{split}.jsonl", [{"messages": chat(number), "id": number}])
    assert answers(examples(tmp_path)[0][0]).startswith("it is 0")
    printed = capsys.readouterr().err
    assert "split 'train' is read, of test, train, validation" in printed and "not read: id" in printed


def encoded(row, template, tokenizer=None):
    return encode(row, 4, tokenizer or character_tokenizer(), template, True, "chats.jsonl")


def test_reasoning_has_the_key_that_the_template_reads():
    template = CHATML.replace(
        "message['content'] + '<|im_end|>' }}{% endg", "message.reasoning_content + message['content'] }}{% endg"
    )
    row = {"messages": [chat(1)[0], {**chat(1)[1], "thinking": "hm "}]}
    assert answers(encoded(row, template)) == "hm it is 1"
    with pytest.raises(
        ValueError, match=r"message 2 of row 5 of 'chats.jsonl' has 'thinking', which the chat template does not"
    ):
        encoded(row, "{% if enable_thinking %}{% endif %}" + CHATML)


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"messages": chat(1), "chat_template_kwargs": {"think": True}},
            "row 5 .* has 'think', which the chat template does not write",
        ),
        (
            {"messages": [chat(1)[0], {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
            "message 2 of row 5 of 'chats.jsonl' has 'tool_calls', which the chat template does not write. Set",
        ),
        (
            {"messages": chat(1), "tools": [{"name": "add"}]},
            "row 5 .* has 'tools', which the chat template does not write",
        ),
    ],
)
def test_what_a_template_does_not_write_is_refused(row, message):
    with pytest.raises(ValueError, match=message):
        encoded(row, CHATML)


def test_a_call_that_the_template_reads_and_leaves_out_of_answers_is_refused():
    """As templates do that write the calls of the last turn alone, or outside of their marks of answers."""
    call = "{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}"
    row = {"messages": [chat(1)[0], {"role": "assistant", "tool_calls": [{"name": "add"}, {"name": "look"}]}]}
    inside = CHATML.replace("{{ message['content'] + '<|im_end|>' }}{% endg", call + "{% endg")
    assert answers(encoded(row, inside)) == "addlook"
    message = r"message 2 of row 5 of 'chats.jsonl' has 'tool_calls', a call of '{}', which the .* into an answer. Set"
    with pytest.raises(ValueError, match=message.format("look")):
        encoded(row, inside.replace("in message.tool_calls", "in message.tool_calls[:1]"))
    outside = CHATML.replace("{% endgeneration %}", "{% endgeneration %}" + call)
    with pytest.raises(ValueError, match=message.format("add")):
        encoded(row, outside)
    encode(row, 4, character_tokenizer(), outside, False, "chats.jsonl")


def test_keys_of_the_template_reach_it_and_its_refusals_name_the_row():
    template = "{% if loud is defined %}{{ 'LOUD' }}{% endif %}" + CHATML
    ids = encoded({"messages": chat(1), "chat_template_kwargs": {"loud": True}}, template)["input_ids"]
    assert character_tokenizer().decode(ids).startswith("LOUD")
    with pytest.raises(ValueError, match=r"row 5 of 'chats.jsonl' is refused by the chat template: no"):
        encoded({"messages": chat(1)}, "{{ raise_exception('no') }}" + CHATML)


def test_templates_of_families_are_replaced_by_trls_training_versions():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = qwen2_5_chat_template
    template = choose_template(tokenizer, None, False, True)
    assert template != tokenizer.chat_template == qwen2_5_chat_template
    assert (
        answers(encoded({"messages": chat(3)}, template, tokenizer)).split() == "it is 3<|im_end|> 4<|im_end|>".split()
    )


def test_templates_that_cannot_train_are_refused_with_what_to_give(tmp_path):
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="tokenizer has no chat template; set chat_template_path to chatml"):
        choose_template(tokenizer, None, False, True)
    tokenizer.chat_template = PLAIN
    with pytest.raises(
        ValueError, match="does not mark answers, and TRL has no training version of it; set chat_template"
    ):
        choose_template(tokenizer, None, False, True)
    assert choose_template(tokenizer, None, False, False) == PLAIN
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML}
    assert choose_template(tokenizer, None, False, True) == CHATML
    with pytest.raises(
        ValueError, match="has the chat templates default, tool_use, and the data has tools; expected one"
    ):
        choose_template(tokenizer, None, True, True)
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(ValueError, match="has the chat templates rag, none of them default"):
        choose_template(tokenizer, None, False, True)
    with pytest.raises(ValueError, match="chat_template_path is 'absent'; expected chatml, alpaca, or a file"):
        choose_template(tokenizer, "absent", False, True)
    assert (
        answers(encoded({"messages": chat(3)}, choose_template(tokenizer, "alpaca", False, True)))
        == "it is 3<eos>4<eos>"
    )
    (tmp_path / "own.jinja").write_text(CHATML)
    assert choose_template(tokenizer, str(tmp_path / "own.jinja"), False, True) == tokenizer.chat_template == CHATML
    with pytest.raises(ValueError, match=r"whose tokens .* this tokenizer lacks"):
        from training.tiny_run import tiny_tokenizer

        choose_template(tiny_tokenizer(), "chatml", False, True)


def test_ids_that_the_model_does_not_embed_are_refused(tmp_path):
    data = tmp_path / "x.parquet"
    Dataset.from_list([{"messages": chat(1)}]).to_parquet(data)
    with pytest.raises(ValueError, match="embeds 50"):
        chat_examples(arguments(data), character_tokenizer(), 50)

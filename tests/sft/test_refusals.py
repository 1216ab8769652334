"""What fine-tuning is refused names the key or the row, and what to do, before anything is written."""

import pytest
from datasets import Dataset
from sft.test_rows import ANSWER, USER, read
from sft.tiny_chats import character_tokenizer, chat, prepared, write_rows
from training.tiny_run import refused, tiny_tokenizer

from midus_hf.training.sft import SftArguments
from midus_hf.training.sft_rows import CHATML, set_template

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
    assert len(read(data, tokenizer, str(own))) == 1 and tokenizer.chat_template == own.read_text()

"""Labels are exactly the tokens of answers, the one that ends each included."""

import re

import pytest
from sft.tiny_chats import character_tokenizer
from tokenizers import processors
from tokenizers.processors import TemplateProcessing

from midus_hf.documents import DocumentError
from midus_hf.sft.formats import Chat, Completion
from midus_hf.sft.labels import encode
from midus_hf.sft.templates import TEMPLATES, set_template

TURNS = Chat(
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "yes, one"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": " no "},
    ]
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}Q:{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def parts(tokenizer, example) -> list[tuple[bool, str]]:
    """The text of an example, cut where answers begin and end."""
    tokens, found = encode(tokenizer, example, "row 1"), []
    for token, inside in zip(tokens.ids, tokens.in_answer, strict=True):
        text = tokenizer.decode([token])
        if found and found[-1][0] == inside:
            found[-1] = (inside, found[-1][1] + text)
        else:
            found.append((inside, text))
    return found


def test_of_several_turns_all_answers_have_labels_and_nothing_else_has():
    tokenizer = character_tokenizer()
    set_template(tokenizer, "chatml")
    assert parts(tokenizer, TURNS) == [
        (False, "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "yes, one<|im_end|>"),
        (False, "\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n"),
        (True, " no <|im_end|>"),
        (False, "\n"),
    ]


def test_the_alpaca_template_ends_answers_with_the_end_token():
    tokenizer = character_tokenizer()
    set_template(tokenizer, "alpaca")
    assert parts(tokenizer, TURNS) == [
        (False, "be brief\n\n### Instruction:\none?\n\n### Response:\n"),
        (True, "yes, one<eos>"),
        (False, "\n\n### Instruction:\ntwo?\n\n### Response:\n"),
        (True, " no <eos>"),
        (False, "\n\n"),
    ]


def test_markers_of_a_template_are_taken_as_they_stand():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = MARKED
    assert parts(tokenizer, TURNS) == [
        (False, "Q:be briefQ:one?A:"),
        (True, "yes, one<eos>"),
        (False, "Q:two?A:"),
        (True, " no <eos>"),
    ]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_token_that_reaches_into_a_question_has_no_label(trim_offsets):
    """Where a prompt ends with a space, the first word of an answer may be one token with it."""
    tokenizer = character_tokenizer(merges=[("Ġ", "i"), ("Ġi", "t")])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    example = Chat([{"role": "user", "content": "q"}, {"role": "assistant", "content": "it is"}])
    assert parts(tokenizer, example) == [(False, "u qa it"), (True, " is")]


def test_completions_have_labels_and_an_end_and_prompts_have_neither():
    tokenizer = character_tokenizer()
    assert parts(tokenizer, Completion("2+2=", "4")) == [(False, "2+2="), (True, "4<eos>")]


def test_special_tokens_of_the_tokenizer_are_kept_and_its_end_is_not_doubled():
    tokenizer = character_tokenizer(bos_token="<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert parts(tokenizer, Completion("2+2=", "4")) == [(False, "<bos>2+2="), (True, "4<eos>")]
    set_template(tokenizer, "alpaca")
    assert parts(tokenizer, TURNS)[0][1].startswith("<bos>be brief")


BEGUN = Chat([{"role": "assistant", "content": "hello?"}, *TURNS.messages[1:3]])
OF_QUESTIONS = (  # as Mistral's, which has no words before an answer
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)
OF_TOOLS = (
    "{% if tools %}T{{ tools[0].name }}{% endif %}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("chatml", [(False, "<|im_start|>assistant\n"), (True, "hello?<|im_end|>")]),
        ("alpaca", [(False, "### Response:\n"), (True, "hello?<eos>")]),
        (OF_QUESTIONS, [(False, "<bos>"), (True, "hello?<eos>")]),
        (MARKED, [(False, "A:"), (True, "hello?<eos>")]),
    ],
    ids=["chatml", "alpaca", "questions", "marked"],
)
def test_a_chat_that_begins_with_an_answer_is_trained_on(template, expected):
    tokenizer = character_tokenizer(bos_token="<bos>")
    tokenizer.chat_template = TEMPLATES.get(template, template)
    found = parts(tokenizer, BEGUN)
    assert found[:2] == expected
    assert [text for inside, text in found if inside][1].startswith("yes, one")


def test_an_answer_at_the_beginning_that_a_template_leaves_out_is_refused_by_its_row():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if not loop.first %}{{ m['content'] }}{% endif %}{% endfor %}"
    message = (
        "row 1: it begins with an answer, which cannot be found in what the chat template makes of it; put a question"
    )
    with pytest.raises(DocumentError, match=re.escape(message)):
        encode(tokenizer, BEGUN, "row 1")


def test_calls_of_tools_are_written_by_the_template_and_have_labels():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = OF_TOOLS
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "it is blue"},
    ]
    found = parts(tokenizer, Chat(messages, [{"name": "look"}]))
    assert [text for inside, text in found if inside] == ['<look {"at": "sky"}><eos>', "it is blue<eos>"]
    assert found[0] == (False, "Tlooku:qa:")
    assert parts(tokenizer, Chat(messages[1:2], [{"name": "look"}]))[1][1] == '<look {"at": "sky"}><eos>'


@pytest.mark.parametrize("marked", [False, True])
def test_a_template_that_knows_no_calls_of_tools_is_refused_by_the_row(marked):
    tokenizer = character_tokenizer()
    set_template(tokenizer, "chatml")
    if marked:
        tokenizer.chat_template = (
            "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}<eos>{% endfor %}"
        )
    call = {"function": {"name": "look", "arguments": {}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    message = "row 1: the chat template does not write that message 2 calls 'look'; set chat_template to one that knows tool_calls"
    with pytest.raises(DocumentError, match=re.escape(message)):
        encode(tokenizer, Chat(messages), "row 1")


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages|length }}" + TEMPLATES["chatml"]
    message = "row 1: the chat template writes earlier messages differently once others follow"
    with pytest.raises(DocumentError, match=message):
        encode(tokenizer, TURNS, "row 1")


def test_a_template_that_stumbles_over_a_chat_names_its_row():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] + 3 }}"
    with pytest.raises(DocumentError, match="row 1 is not taken by the chat template: "):
        encode(tokenizer, TURNS, "row 1")


def test_a_chat_that_its_template_does_not_take_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    message = "row 1 is not taken by the chat template: roles must alternate. Correct it, or take it out."
    with pytest.raises(DocumentError, match=re.escape(message)):
        encode(tokenizer, TURNS, "row 1")


@pytest.mark.parametrize(
    ("tokenizer", "name", "message"),
    [
        ({}, None, "the model's tokenizer has no chat template; set chat_template to chatml, alpaca or a file"),
        (
            {},
            "absent.jinja",
            "chat_template is 'absent.jinja'; expected one of chatml, alpaca, or a file with a Jinja template.",
        ),
        (
            {"eos_token": None},
            "alpaca",
            "chat_template is 'alpaca', which ends answers with the end token, but this tokenizer",
        ),
    ],
)
def test_a_template_that_cannot_be_is_refused(tokenizer, name, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        set_template(character_tokenizer(**tokenizer), name)


def test_chatml_needs_its_tokens():
    from training.tiny_run import tiny_tokenizer

    with pytest.raises(ValueError, match=re.escape("whose tokens <|im_start|> and <|im_end|> this tokenizer lacks")):
        set_template(tiny_tokenizer(), "chatml")


def test_a_template_may_be_a_file_and_replaces_the_tokenizers_own(tmp_path):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = MARKED
    set_template(tokenizer, None)
    assert tokenizer.chat_template == MARKED
    (tmp_path / "own.jinja").write_text("own")
    set_template(tokenizer, str(tmp_path / "own.jinja"))
    assert tokenizer.chat_template == "own"

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


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages|length }}" + TEMPLATES["chatml"]
    with pytest.raises(ValueError, match="the chat template writes earlier messages differently once others follow"):
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

"""Labels are exactly the tokens of answers, the one that ends each included."""

import re

import pytest
from sft.tiny_chats import character_tokenizer
from tokenizers import processors
from tokenizers.processors import TemplateProcessing
from training.tiny_run import refused, tiny_tokenizer

from midus_hf.sft.formats import Chat, Completion
from midus_hf.sft.labels import TEMPLATES, encode, set_template
from midus_hf.topics.text_files import DocumentError

QUESTION = {"role": "user", "content": "q"}
TURNS = Chat(
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "yes, one"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": " no "},
    ]
)
BEGUN = Chat([{"role": "assistant", "content": "hello?"}, *TURNS.messages[1:3]])
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}A:{% generation %}{{ m['content'] + eos_token }}"
    "{% endgeneration %}{% else %}Q:{{ m['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
OF_QUESTIONS = (  # as Mistral's, which has no words before an answer
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
    "{% else %}[{{ m['content'] }}]{% endif %}{% endfor %}"
)
OF_TOOLS = (
    "{% if tools %}T{{ tools[0].name }}{% endif %}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def tokenizer_with(template: str, **options):
    """Return a tokenizer with a template, which is named or written out."""
    tokenizer = character_tokenizer(**options)
    if template in TEMPLATES:
        set_template(tokenizer, template)
    else:
        tokenizer.chat_template = template
    return tokenizer


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


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "chatml",
            [
                "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n",
                "yes, one<|im_end|>",
                "\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n",
                " no <|im_end|>",
                "\n",
            ],
        ),
        (
            "alpaca",
            [
                "be brief\n\n### Instruction:\none?\n\n### Response:\n",
                "yes, one<eos>",
                "\n\n### Instruction:\ntwo?\n\n### Response:\n",
                " no <eos>",
                "\n\n",
            ],
        ),
        (MARKED, ["Q:be briefQ:one?A:", "yes, one<eos>", "Q:two?A:", " no <eos>"]),
    ],
    ids=["chatml", "alpaca", "marked"],
)
def test_of_several_turns_all_answers_have_labels_and_nothing_else_has(template, expected):
    """Every other part is an answer, which ends as its template has it."""
    found = parts(tokenizer_with(template), TURNS)
    assert found == [(number % 2 == 1, text) for number, text in enumerate(expected)]


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
    found = parts(tokenizer_with(template, bos_token="<bos>"), BEGUN)
    assert found[:2] == expected
    assert [text for inside, text in found if inside][1].startswith("yes, one")


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_a_token_that_reaches_into_a_question_has_no_label(trim_offsets):
    """Where a prompt ends with a space, the first word of an answer may be one token with it."""
    template = (
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    tokenizer = tokenizer_with(template, merges=[("Ġ", "i"), ("Ġi", "t")])
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    example = Chat([QUESTION, {"role": "assistant", "content": "it is"}])
    assert parts(tokenizer, example) == [(False, "u qa it"), (True, " is")]


def test_completions_have_labels_and_an_end_and_prompts_have_neither():
    assert parts(character_tokenizer(), Completion("2+2=", "4")) == [(False, "2+2="), (True, "4<eos>")]


def test_special_tokens_of_the_tokenizer_are_kept_and_its_end_is_not_doubled():
    tokenizer = character_tokenizer(bos_token="<bos>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert parts(tokenizer, Completion("2+2=", "4")) == [(False, "<bos>2+2="), (True, "4<eos>")]
    set_template(tokenizer, "alpaca")
    assert parts(tokenizer, TURNS)[0][1].startswith("<bos>be brief")


def called(**arguments) -> dict:
    """Return an answer that calls a tool."""
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_calls_of_tools_are_written_by_the_template_and_have_labels():
    tokenizer, call = tokenizer_with(OF_TOOLS), called(at="sky")
    messages = [QUESTION, call, {"role": "tool", "content": "blue"}, {"role": "assistant", "content": "it is blue"}]
    found = parts(tokenizer, Chat(messages, [{"name": "look"}]))
    assert [text for inside, text in found if inside] == ['<look {"at": "sky"}><eos>', "it is blue<eos>"]
    assert found[0] == (False, "Tlooku:qa:")
    assert parts(tokenizer, Chat([call], [{"name": "look"}]))[1][1] == '<look {"at": "sky"}><eos>'


NO_CALLS = "row 1: the chat template does not write that message 2 calls 'look'; set chat_template to one that knows tool_calls"


@pytest.mark.parametrize(
    ("template", "example", "message"),
    [
        ("chatml", Chat([QUESTION, called()]), NO_CALLS),
        (
            "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}<eos>{% endfor %}",
            Chat([QUESTION, called()]),
            NO_CALLS,
        ),
        (
            "{% for m in messages %}{% if not loop.first %}{{ m['content'] }}{% endif %}{% endfor %}",
            BEGUN,
            "row 1: it begins with an answer, which cannot be found in the text that the chat template writes; put a question",
        ),
        (
            "{{ messages|length }}" + TEMPLATES["chatml"],
            TURNS,
            "row 1: the chat template writes earlier messages differently once others follow",
        ),
        ("{{ messages[0]['content'] + 3 }}", TURNS, "row 1 is refused by the chat template: "),
        (
            "{{ raise_exception('roles must alternate') }}",
            TURNS,
            "row 1 is refused by the chat template: roles must alternate. Correct it, or take it out.",
        ),
    ],
    ids=["calls", "marked-calls", "left-out", "rewritten", "stumbles", "raises"],
)
def test_a_row_that_a_template_does_not_write_is_refused(template, example, message):
    with refused(re.escape(message), DocumentError):
        encode(tokenizer_with(template), example, "row 1")


@pytest.mark.parametrize(
    ("tokenizer", "name", "message"),
    [
        (
            character_tokenizer,
            None,
            "the model's tokenizer has no chat template; set chat_template to chatml, alpaca or a",
        ),
        (
            character_tokenizer,
            "absent.jinja",
            "chat_template is 'absent.jinja'; expected one of chatml, alpaca, or a file with a Jinja template.",
        ),
        (
            lambda: character_tokenizer(eos_token=None),
            "alpaca",
            "chat_template is 'alpaca', which ends answers with the end token, but this tokenizer",
        ),
        (tiny_tokenizer, "chatml", "whose tokens <|im_start|> and <|im_end|> this tokenizer lacks"),
    ],
    ids=["none", "absent", "no-end", "no-tokens"],
)
def test_a_template_that_cannot_be_is_refused(tokenizer, name, message):
    with refused(re.escape(message)):
        set_template(tokenizer(), name)


def test_a_template_may_be_a_file_and_replaces_the_tokenizers_own(tmp_path):
    tokenizer = tokenizer_with(MARKED)
    set_template(tokenizer, None)
    assert tokenizer.chat_template == MARKED
    set_template(tokenizer, "chatml")
    assert tokenizer.chat_template == TEMPLATES["chatml"]
    (tmp_path / "own.jinja").write_text("own")
    set_template(tokenizer, str(tmp_path / "own.jinja"))
    assert tokenizer.chat_template == "own"

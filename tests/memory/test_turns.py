"""Packs in chats: what a user names stays open through the conversation, in any chat template."""

import itertools
from pathlib import Path

import pytest
from evaluation.byte_models import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from midus_hf.memories.packs.glossary import Entry, Glossary
from midus_hf.memories.packs.opening import OpeningTracker, PackKey, RowState, readings_of
from midus_hf.memories.packs.options import PacksOptions

SYSTEM = "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
SYSTEM += "{% set messages = messages[1:] %}{% endif %}"


def each(user: str, answer: str, prompt: str, system: str = "", begin: str = "") -> str:
    """A template of a user's text, an answer, what begins one, a system prompt and the beginning, with {} for the content."""

    def written(text: str, content: str) -> str:
        return f"{{{{ {text!r}.replace('{{}}', {content}) }}}}"

    system = "{% if system %}" + written(system, "system") + "{% endif %}" if system else ""
    role = "{% if message['role'] == 'user' %}" + written(user, "message['content']")
    role += "{% else %}" + written(answer, "message['content']") + "{% endif %}"
    end = f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    return SYSTEM + f"{{{{ {begin!r} }}}}" + system + "{% for message in messages %}" + role + "{% endfor %}" + end


CHATML = ("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n", "<|im_start|>assistant\n")
THOUGHTS = (
    each(*CHATML, "<|im_start|>system\n{}<|im_end|>\n")
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
NOTHINK = "{{ '/nothink' if enable_thinking is defined and not enable_thinking else '' }}"
THOUGHTLESS = each(
    "<|user|>\n{}", "<|assistant|>\n<think></think>\n{}", "<|assistant|>", "<|system|>\n{}", "[gMASK]<sop>"
).replace("{% else %}", f"{NOTHINK}{{% else %}}")
LAST_WORDS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '\nAnswer briefly.' if loop.last else '' }}{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
NUMBERS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + loop.index|string + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant ' + (messages|length + 1)|string + '\n' }}"
)
# A system prompt, or one of its own, within the first question.
FOLDED = (
    SYSTEM
    + "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' }}"
    + "{% if loop.first %}{{ '<<SYS>>\n' + system|default('Be helpful.') + '\n<</SYS>>\n\n' }}{% endif %}"
    + "{{ m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
# A system prompt is written as an answer.
INITIALS = each("(Q) {}\n", "(A) {}\n", "(A)", "(A) {}\n", "Talk.\n")
# Contents are lists, as of models that read images.
PARTS = (
    "{% for m in messages %}{{ m['role'].capitalize() + ': ' + m['content'][0]['text'] + '<end_of_utterance>\n' }}{% endfor %}"
    "{{ 'Assistant:' }}"
)
TEMPLATES = {
    "ChatML": each(*CHATML, "<|im_start|>system\n{}<|im_end|>\n"),
    "ChatML, a default prompt": each(*CHATML, begin="<|im_start|>system\nBe brief.<|im_end|>\n"),
    "Llama 2": each("<s>[INST] {} [/INST]", " {} </s>", "", "<<SYS>>\n{}\n<</SYS>>\n\n"),
    "Zephyr": each("<|user|>\n{}</s>\n", "<|assistant|>\n{}</s>\n", "<|assistant|>\n", "<|system|>\n{}</s>\n"),
    "OLMo 2": each("<|user|>\n{}\n", "<|assistant|>\n{}<|endoftext|>\n", "<|assistant|>\n", begin="<|endoftext|>"),
    "Alpaca": each("### Instruction:\n{}\n\n", "### Response:\n{}\n\n", "### Response:\n", "{}\n\n"),
    "Vicuna": each("USER: {} ", "ASSISTANT: {}</s>", "ASSISTANT:", begin="A chat between two people. "),
    "Qwen 3": THOUGHTS,
    "GLM 4.5, words without thoughts": THOUGHTLESS,
    "words after the last question": LAST_WORDS,
    "numbers of turns": NUMBERS,
    "Llama 2, a default prompt": FOLDED,
    "initials": INITIALS,
    "the recipe's": (Path(__file__).parents[2] / "configs" / "sft" / "alpaca.jinja").read_text(),
}
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|endoftext|>")


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that writes spaces as Llama 2's does, with one in front of each piece of text."""
    tokens = ["<pad>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    of_bytes = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(of_bytes)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def tokenizer_of(name: str, kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a template, whose role marks are special tokens, text, or text with metaspaces."""
    tokenizer = metaspace_tokenizer() if kind == "metaspaces" else byte_tokenizer()
    if kind != "text":
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def ids_of(tokenizer, chat, said="", **arguments):
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **arguments) + said
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def open_behind(tokenizer, ids, sizes=None):
    """The entries that are open at the last token, and whether they are read as in a chat, in passes of some sizes."""
    glossary = Glossary(tokenizer, [Entry(("Kestrel",), "a bird"), Entry(("Merlin",), "a cache")])
    state, done = RowState(), 0

    def row_of(state):
        return OpeningTracker(glossary, PacksOptions(), state, lambda first, end: ids[first:end])

    for size in [*(sizes or []), len(ids)]:
        row, part = row_of(state), ids[done : done + size]
        first = max(0, done - glossary.lookback_tokens)
        row.read_before(ids[first:done], range(first, done))
        _, states = readings_of(row, part, range(done, done + len(part)), None)
        state, done = states[-1] if states else state, done + len(part)
    pack = row_of(state).pack()
    return None if pack is None else pack[0]


def chat_of(*texts, system=None):
    roles = itertools.cycle(["user", "assistant"])
    chat = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *chat] if system else chat


@pytest.mark.parametrize("kind", ["special tokens", "text", "metaspaces"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_open_entries_stay_open_through_a_conversation(name, kind):
    """Through answers, later questions, tool results, which templates write as a user's message, and system prompts."""
    tokenizer = tokenizer_of(name, kind)
    asked = chat_of("Which port does the\nKestrel listen on?\n\nReply with digits.")
    told = {"role": "user", "content": "<tool_response>\n{'port':\n 8443}\n</tool_response>"}
    chats = [(asked, (1,)), ([*asked, told], (1,)), ([*asked, *chat_of("", "It is\n8443.", "And\nwhy?")[1:]], (1,))]
    chats.append((chat_of("Is it Merlin?", "It is\nMerlin.", "Why?", "So.", asked[0]["content"]), (2, 1)))
    if "system" in TEMPLATES[name]:
        chats.append((chat_of(asked[0]["content"], system="Be brief.\nSay Merlin."), (1,)))
    for chat, entries in chats:
        for said in ("", "It is\n\nport 8", "<think>\nWell:\n\nit is so.\n</think>\n\nThe answer\nis"):
            key = open_behind(tokenizer, ids_of(tokenizer, chat, said))
            assert key.entries[-len(entries) :] == entries, (chat, said)
            assert key.in_chat, (chat, said)
            words = tokenizer.decode(key.words, clean_up_tokenization_spaces=False)
            assert words.strip().endswith("Which port does the"), (chat, said)
    ids = ids_of(tokenizer, asked, enable_thinking=False)
    assert open_behind(tokenizer, ids).entries == (1,)


SAID = [("Not\nKestrel", (2, 1)), ("Not\nKestrel, but\nthat", (2,)), ("Kestrel and Merlin", (2, 1))]


@pytest.mark.parametrize(("said", "expected"), SAID)
def test_entries_an_answer_names_close_with_their_line(said, expected):
    tokenizer = tokenizer_of("Zephyr", "text")
    chat = chat_of("What is Merlin\nfor?")
    key = open_behind(tokenizer, ids_of(tokenizer, chat, said))
    assert key.entries == expected
    assert bool(key.words) is (expected == (2,))  # what the answer names is read without words of the question


def test_answer_does_not_move_an_open_entry():
    tokenizer = tokenizer_of("ChatML", "special tokens")
    glossary = Glossary(
        tokenizer, [Entry(("Kestrel",), "a bird on Merlin"), Entry(("Merlin",), "a cache"), Entry(("Mer",), "a sea")]
    )
    ids = ids_of(tokenizer, chat_of("What is Kestrel?"))
    for said in (" The Kestrel", " Merlin is", " Merlin", " Mer", " Kestrel Merlins"):
        row = OpeningTracker(glossary, PacksOptions())
        readings_of(row, ids, range(len(ids)), None)
        before = row.pack()
        assert before[0].entries == (1, 2), said
        for at, token in enumerate(tokenizer(said, add_special_tokens=False)["input_ids"], len(ids)):
            row.read(token, at)
        assert (row.pack() == before) is (said != " Mer"), said


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("Kestrel?", ""),
        ('"Kestrel"?', ""),
        ("Who owns Kestrel? What is Kestrel?", "Who owns"),
        (" \nWho owns Merlin and Kestrel?", "Who owns Merlin and"),
        ("x" * 100 + " Kestrel?", "x" * 63 + " "),
    ],
)
def test_words_before_a_name_are_read_with_its_text(asked, words):
    """They are those of the user's turn alone, the last 64 tokens, each a character here."""
    tokenizer = tokenizer_of("ChatML", "special tokens")
    for chat in (chat_of(asked), chat_of("Is it big?", "No.", asked)):
        ids = ids_of(tokenizer, chat)
        key = open_behind(tokenizer, ids)
        assert tokenizer.decode(key.words).strip() == words.strip()
        assert open_behind(tokenizer, ids, [1] * len(ids)) == key


def test_plain_text_is_read_by_lines():
    tokenizer = tokenizer_of("Vicuna", "text")
    for text, is_open in (("Kestrel is\n", False), ("A superUSER: Kestrel is", True), ("Kestrel", True)):
        key = open_behind(tokenizer, tokenizer(text)["input_ids"])
        assert key == (PackKey((1,)) if is_open else None)


@settings(max_examples=60)
@given(
    st.sampled_from([*TEMPLATES]),
    st.sampled_from(["special tokens", "text"]),
    st.lists(st.sampled_from(["Kestrel", "Kes", " ", "\n", "USER:", "<|im_end|>", "Merlin.", "x" * 20]), max_size=8),
    st.lists(st.integers(1, 40), max_size=12),
)
def test_passes_of_any_size_open_what_one_pass_opens(name, kind, parts, sizes):
    tokenizer = tokenizer_of(name, kind)
    ids = ids_of(tokenizer, chat_of("".join(parts) + "Kestrel?", "It\nis.", "".join(parts) + "?"), "Merlin\nis")
    assert open_behind(tokenizer, ids, sizes) == open_behind(tokenizer, ids)
    assert open_behind(tokenizer, ids[:-1], [1] * len(ids)) == open_behind(tokenizer, ids[:-1])


def test_entry_prefix_is_the_users_header():
    tokenizer = tokenizer_of("ChatML, a default prompt", "special tokens")
    glossary = Glossary(tokenizer)
    assert tokenizer.decode(glossary.token_prefix(True)) == "<|im_start|>user\n"
    assert glossary.token_prefix(False) == glossary.spelling.in_front
    tokenizer = byte_tokenizer(writes_bos=True)
    tokenizer.chat_template = TEMPLATES["Vicuna"]
    assert tokenizer.decode(Glossary(tokenizer).token_prefix(True)) == "<bos>USER: "


UNSEEN = "the chat template does not show where questions and answers begin: packs close at the ends of lines"
WITHOUT_MARKS = {
    None: "None",
    "{{ messages[0]['content'] }}": UNSEEN,
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}": UNSEEN,
    "{{ raise_exception('no user may speak') }}": "the chat template cannot be rendered (no user may speak): packs",
}


@pytest.mark.parametrize("template", WITHOUT_MARKS)
def test_chats_without_marks_are_plain_text(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    glossary = Glossary(tokenizer)
    assert glossary.chat_marks is None
    assert glossary.token_prefix(True) == glossary.spelling.in_front
    assert str(glossary.chat_remark).startswith(WITHOUT_MARKS[template])


def test_marks_are_learnt_where_turns_differ():
    """A system prompt in the first question, and words after the last one, are no part of a mark; nor is the number of a turn."""
    after_words = (b"\0<|im_start|>\0user", b"\0<|im_end|>\0\n\0<|im_start|>\0assistant")
    for name, expected in (
        ("Llama 2, a default prompt", (b"[INST]", b"[/INST]")),
        ("words after the last question", after_words),
        ("numbers of turns", after_words),
    ):
        marks = Glossary(tokenizer_of(name, "special tokens")).chat_marks
        assert (marks.question, marks.answer) == expected
    tokenizer = tokenizer_of("Llama 2, a default prompt", "special tokens")
    assert tokenizer.decode(Glossary(tokenizer).token_prefix(True)) == "[INST] "


def test_marks_are_learnt_from_contents_in_parts():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PARTS
    chat = [{"role": "user", "content": [{"type": "text", "text": "Is\nKestrel it?\nSay."}]}]
    assert open_behind(tokenizer, ids_of(tokenizer, chat, "It\nis"))[:2] == ((1,), True)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("- iron: 26\n- gold", "n: 26"),
        ("iron: 26\niron is", "n: 26n is"),
        ("iron\nIts number is 26.\nNext", "n\nIts number is 26."),
        ("iron\n\n- 26\nNext", "n\n\n- 26"),
        ("iron?<eos>\n<bos>x\nIt is a metal.\nNext", "n?<eos>\n<bos>x\nIt is a metal."),
        ("iron" + "." * 20 + "\nNext\nx", "n" + "." * 20 + "\nNext"),
    ],
    ids=["a list", "a name again", "a name as a heading", "a blank line", "a chat template", "a line of dots"],
)
def test_pack_is_open_to_the_end_of_its_line(text, read):
    tokenizer = byte_tokenizer()
    glossary, options = Glossary(tokenizer, [Entry(("iron",), "a metal")]), PacksOptions()
    ids = tokenizer(text)["input_ids"]
    readings, _ = readings_of(OpeningTracker(glossary, options), ids, range(len(ids)), None)
    whole = [at for each in readings for at in range(each.start, each.stop)]
    steps, before = [], RowState()
    for at, token in enumerate(ids):
        row = OpeningTracker(glossary, options, before)
        first = max(0, at - glossary.lookback_tokens)
        row.read_before(ids[first:at], range(first, at))
        row.read(token, at)
        steps += [at] if row.pack() else []
        before = row.state
    assert tokenizer.decode([ids[at] for at in whole]) == read
    assert steps == whole

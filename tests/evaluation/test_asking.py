"""A conversation answers as whole chats are answered, and each turn computes what is new."""

import contextlib

import pytest
import torch
from models.cases import CASES
from models.memory_models import IDS, OTHER_IDS
from tiny import NATIVE_FAMILIES, prompt, tiny_model

from midus_hf.evaluation.asking import Conversation, greedy_answer
from midus_hf.memories.hosting.state import SPARE_TOKENS

NEW_TOKENS = 6
CROPPABLE = ("packs", "ngram", "token behind layers", "hier-ffn", "midus-hml", "depth reused")


def inputs_of(ids):
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}


def whole(model, ids, **options):
    return greedy_answer(model, inputs_of(ids), NEW_TOKENS, **options).tolist()


def words(seed, count=12):
    return prompt(count, 1, seed)[0].tolist()


@contextlib.contextmanager
def counted(model):
    """Yield the number of tokens of each pass of the model."""
    lengths = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        yield lengths
    finally:
        handle.remove()


def case_model(name, tmp_path):
    return CASES[name].model("llama", tmp_path), CASES[name].given(1)


def check_turns(model, **options):
    """Check answers of a chat that grows, drops a part of an answer, is asked again, and begins anew."""
    conversation, chat = Conversation(model), words(1)
    first = conversation.answer(inputs_of(chat), NEW_TOKENS, **options).tolist()
    assert first == whole(model, chat, **options)
    grown = [*chat, *first, *words(2)]
    second = conversation.answer(inputs_of(grown), NEW_TOKENS, **options).tolist()
    assert second == whole(model, grown, **options)
    for later in ([*grown, *second[:2], *words(3)], grown, [*chat, *words(4)], words(5)):
        assert conversation.answer(inputs_of(later), NEW_TOKENS, **options).tolist() == whole(model, later, **options)


@pytest.mark.parametrize("family", NATIVE_FAMILIES)
def test_conversation_has_the_answers_of_whole_chats(family):
    check_turns(tiny_model(family, torch.float64))


@pytest.mark.parametrize("name", [*CROPPABLE, "chunk"])
def test_memories_have_the_answers_of_whole_chats(name, tmp_path):
    model, given = case_model(name, tmp_path)
    check_turns(model, **given)


@pytest.mark.parametrize("name", CROPPABLE)
def test_turn_computes_what_is_new(name, tmp_path):
    model, given = case_model(name, tmp_path)
    conversation, chat = Conversation(model), words(1)
    answer = conversation.answer(inputs_of(chat), NEW_TOKENS, **given).tolist()
    grown = [*chat, *answer, *words(2)]
    shorter = [*chat, *answer[:3], *words(3)]
    with counted(model) as lengths:
        conversation.answer(inputs_of(grown), NEW_TOKENS, **given)
        assert lengths[0] == len(words(2)) + 1, "the last token of an answer was not read yet"
        lengths.clear()
        conversation.answer(inputs_of(shorter), NEW_TOKENS, **given)
        assert lengths[0] == len(words(3))
        lengths.clear()
        conversation.answer(inputs_of(shorter), NEW_TOKENS, **given)
        assert lengths[0] == 1, "the last token is computed in any case"


def test_tokens_before_a_window_are_computed_again():
    model = tiny_model("qwen2")
    conversation, chat = Conversation(model), words(1)
    answer = conversation.answer(inputs_of(chat), NEW_TOKENS).tolist()
    with counted(model) as lengths:
        conversation.answer(inputs_of([*chat, *answer, *words(2)]), NEW_TOKENS)
        assert lengths[0] == len(words(2)) + 1
        lengths.clear()
        conversation.answer(inputs_of([*chat, *words(3)]), NEW_TOKENS)
        assert lengths[0] == len(chat) + len(words(3))


def test_chat_is_computed_whole_beyond_what_states_take_back(tmp_path):
    model, _ = case_model("packs", tmp_path)
    conversation, chat = Conversation(model), words(1)
    conversation.answer(inputs_of([*chat, *words(2, SPARE_TOKENS)]), NEW_TOKENS)
    with counted(model) as lengths:
        answer = conversation.answer(inputs_of([*chat, *words(3)]), NEW_TOKENS).tolist()
    assert lengths[0] == len(chat) + len(words(3))
    assert answer == whole(model, [*chat, *words(3)])


def test_other_blocks_of_a_bank_begin_anew(tmp_path):
    model, _ = case_model("hier-ffn", tmp_path)
    conversation, chat = Conversation(model), words(1)
    answer = conversation.answer(inputs_of(chat), NEW_TOKENS, memory_ids=IDS[:1]).tolist()
    grown = [*chat, *answer, *words(2)]
    with counted(model) as lengths:
        second = conversation.answer(inputs_of(grown), NEW_TOKENS, memory_ids=OTHER_IDS[:1]).tolist()
    assert lengths[0] == len(grown)
    assert second == whole(model, grown, memory_ids=OTHER_IDS[:1])


class BreaksOff:
    """A streamer that is interrupted after some tokens."""

    def __init__(self, tokens):
        self.left = tokens + 1  # the prompt first

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt

    def end(self):
        raise AssertionError("interrupted before")


def test_interrupted_answer_leaves_no_trace():
    model = tiny_model("llama", torch.float64)
    conversation, chat = Conversation(model), words(1)
    answer = conversation.answer(inputs_of(chat), NEW_TOKENS).tolist()
    grown = [*chat, *answer, *words(2)]
    with pytest.raises(KeyboardInterrupt):
        conversation.answer(inputs_of(grown), NEW_TOKENS, streamer=BreaksOff(2))
    later = [*chat, *answer, *words(3)]
    assert conversation.answer(inputs_of(later), NEW_TOKENS).tolist() == whole(model, later)


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_models_with_a_cache_of_their_own_begin_anew(implementation):
    model = tiny_model("llama", torch.float64)
    model.generation_config.cache_implementation = implementation
    check_turns(model)
    conversation, chat = Conversation(model), words(1)
    grown = [*chat, *conversation.answer(inputs_of(chat), NEW_TOKENS).tolist(), *words(2)]
    with counted(model) as lengths:
        conversation.answer(inputs_of(grown), NEW_TOKENS)
    assert lengths[0] == len(grown)

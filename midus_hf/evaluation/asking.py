"""Questions as a model reads them, and its greedy answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError
from transformers import Cache, DynamicCache

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.memories.hosting.parts import CACHE
from midus_hf.sources.tokenizers import check_ids

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.memories.packs.glossary import Glossary

# Arguments of `generate` for the likeliest token each time, whatever the model's own settings are.
_UNSET: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, **_UNSET}


def glossary_of(model: Any) -> "Glossary | None":
    """Return the glossary of a model with packs; None for another model."""
    stack = model.stack if hasattr(model.config, "memories") else None
    return model.glossary if stack is not None and "glossary" in stack.services else None


def question_inputs(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    question: str,
    *,
    name: str,
    chat: Sequence[dict[str, str]] = (),
    plain: bool = False,
) -> "BatchEncoding":
    """Return the token ids of a question and their mask, `[1, T]`, in the chat template, or as text.

    Args:
        model: The model that will read it.
        tokenizer: Its tokenizer.
        question: The question.
        name: Name of the model, for messages.
        chat: Messages before the question, in the chat template. Default: none.
        plain: Whether the question is read as text, without the chat template. Default: False.

    Raises:
        RequestError: If the chat template refuses a single question, or the question has no token for this model.
    """
    if plain:
        inputs = tokenizer(question, return_tensors="pt")
    else:
        refused = "a conversation" if chat else "a single question; pass --plain to skip it"
        refusal = f"model is {name!r}, whose chat template refuses {refused}"
        with as_request_error(refusal, TemplateError, TypeError, ValueError):
            inputs = tokenizer.apply_chat_template(
                [*chat, {"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
    if not inputs["input_ids"].numel():
        raise RequestError(f"question is {question!r}, which has no token for this model; expected a text.")
    check_ids(int(inputs["input_ids"].max()), model.config.get_text_config().vocab_size)
    return inputs.to(model.device)


@torch.no_grad()
def greedy_answer(model: Any, inputs: "BatchEncoding", max_new_tokens: int, **options: Any) -> torch.Tensor:
    """Return the likeliest continuation, `[new tokens]`, int64; `options` are arguments of `generate`."""
    written = model.generate(**inputs, **options, **GREEDY, max_new_tokens=max_new_tokens)
    return written[0, inputs["input_ids"].shape[1] :]


class Conversation:
    """Greedy answers of a model to chats, each computing only what the chat before it did not have.

    The cache of the last answer is kept, and read for the tokens with which the next chat begins too. A chat is computed whole after
    an answer that broke off; where other arguments of `generate` come with it, such as other blocks of a bank; and where the cache
    cannot be cropped: another class than `DynamicCache`, windows that were left, linear attention, memories that route by all tokens
    before, and states from which more tokens are taken back than they keep.

    Args:
        model: The model.
    """

    def __init__(self, model: Any):
        #: Messages so far, for a chat template; the caller appends to them.
        self.messages: list[dict[str, str]] = []
        self._model = model
        self._cache: Cache | None = None
        self._ids: list[int] = []  # of the tokens in the cache
        self._options: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def answer(
        self, inputs: "BatchEncoding", max_new_tokens: int, *, streamer: Any = None, **options: torch.Tensor
    ) -> torch.Tensor:
        """Return the likeliest continuation of a chat, `[new tokens]`, int64.

        Args:
            inputs: Ids and mask of the chat, `[1, T]`, without padding.
            max_new_tokens: Largest number of tokens.
            streamer: Gets tokens as they are written. Default: none.
            **options: Arguments of `generate` that change what is computed of the chat, as `memory_ids`.
        """
        ids = inputs["input_ids"][0].tolist()
        output = self._model.generate(
            **inputs,
            **options,
            **GREEDY,
            **{CACHE: self._take_cache(ids, options)},
            max_new_tokens=max_new_tokens,
            streamer=streamer,
            return_dict_in_generate=True,
        )
        (written,) = output.sequences
        self._cache = output.get(CACHE)
        self._ids = written[:-1].tolist()
        self._options = options
        return written[len(ids) :]

    def _take_cache(self, ids: list[int], options: dict[str, torch.Tensor]) -> Cache | None:
        """Return the cache of a chat's beginning, and keep it no longer; None if there is none."""
        cache = self._cache
        self._cache = None
        is_same = options.keys() == self._options.keys() and all(
            torch.equal(each, self._options[name]) for name, each in options.items()
        )
        # At least the last token is computed, for its logits.
        num_common = _num_common(self._ids, ids[:-1])
        if not (is_same and num_common and self._is_reusable(cache)):
            return None
        return cache if _crop(cache, len(self._ids) - num_common) else None

    def _is_reusable(self, cache: Cache | None) -> bool:
        has_own = self._model.generation_config.cache_implementation is not None
        return type(cache) is DynamicCache and cache.is_croppable and not has_own


def _num_common(ids: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids both begin with."""
    count = 0
    for each, its_pair in zip(ids, other, strict=False):
        if each != its_pair:
            break
        count += 1
    return count


def _crop(cache: Any, num_tokens: int) -> bool:
    """Take back the last tokens; return whether the cache could, which is otherwise of no use any more."""
    if num_tokens:
        try:
            cache.crop(-num_tokens)
        except (RequestError, RuntimeError):  # of memories, and of windows and states
            return False
    return True

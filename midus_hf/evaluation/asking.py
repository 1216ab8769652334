"""Questions as a model reads them, and its greedy answers."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.sources.tokenizers import check_ids

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

    from midus_hf.memories.packs.glossary import Glossary

# Arguments of `generate` for the likeliest token each time, whatever the model's own settings are.
_UNSET: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None}
GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, **_UNSET}


def glossary_of(model: Any) -> "Glossary | None":
    stack = model.stack if hasattr(model.config, "memories") else None
    return model.glossary if stack is not None and "packs" in stack.services else None


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

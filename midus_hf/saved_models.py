"""Load saved models and their tokenizers, for whatever is then done with them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.documents import first_line


@contextlib.contextmanager
def refusing(words: str, *errors: type[Exception], reason: Callable[[Exception], str] = first_line) -> Iterator[None]:
    """What other libraries raise within, over a model that cannot be loaded, is a wrong request.

    Args:
        words: What a person is told, before what the library says.
        errors: What is refused; anything else is raised as it is.
        reason: What is told of an error. Default: its first line.

    Raises:
        ValueError: In place of one of `errors`.
    """
    try:
        yield
    except errors as error:
        raise ValueError(f"{words}: {reason(error)}") from error


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer saved with a model; errors are those of transformers.

    Args:
        name: Folder or Hub id.
        trust_remote_code: Whether to run code that comes with it. Default: false.
    """
    return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)


def check_ids(largest: int, vocab_size: int) -> None:
    """See that a model embeds what a tokenizer yields.

    Args:
        largest: The largest id that it yields.
        vocab_size: Number of ids the model embeds.

    Raises:
        ValueError: If it does not.
    """
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer yields id {largest}, but the model embeds {vocab_size} ids; "
            "use the tokenizer that the model was made with."
        )


def load_model(
    name: str, dtype: str = "auto", trust_remote_code: bool = False, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """A saved language model, and the sorted names of the tensors that its weights lack; errors are those of transformers.

    Args:
        name: Folder or Hub id.
        dtype: As in `from_pretrained`. Default: `"auto"`, that of the checkpoint.
        trust_remote_code: Whether to run code that comes with it. Default: false.
        **options: Others of `from_pretrained`.
    """
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **options
    )
    model, loading = loaded
    return model, sorted(loading["missing_keys"])


def check_whole(name: str, missing: list[str]) -> None:
    """Refuse a model whose checkpoint lacks tensors: what is absent would be random.

    Args:
        name: Folder or Hub id.
        missing: As `load_model` gives it.

    Raises:
        ValueError: If something is missing.
    """
    if missing:
        raise ValueError(
            f"model is {name!r}, whose checkpoint lacks {len(missing)} of its tensors, such as {missing[0]}, which would be random; "
            "expected a whole checkpoint of a causal language model. Make it again."
        )

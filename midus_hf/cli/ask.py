"""The `midus ask` command."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from midus_hf.cli.command_line import command_line, run_command
from midus_hf.cli.options import Device, argument, cli_option, flag
from midus_hf.files.checkpoint_files import TREE_FILES
from midus_hf.memories.packs.rows import is_text
from midus_hf.model_names import check_dtype, check_model_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

app = command_line()


@app.command()
def midus_ask(
    model: Annotated[str, argument("Folder or Hub id.", "MODEL")],
    question: Annotated[str, argument("What to ask.", "QUESTION")],
    plain: Annotated[bool, flag("--plain", "Continue QUESTION as text, without the chat template.")] = False,
    max_new_tokens: Annotated[int, cli_option("Most tokens of the answer.", "N", min=1)] = 256,
    dtype: Annotated[str, cli_option("auto, float32, bfloat16 or float16.", "NAME")] = "auto",
    device: Device = None,
) -> None:
    """Ask a model, and print its answer as it is written: the likeliest token each time.

    A model with a bank fetches the blocks of the question's topic, which are listed on standard error, as are the entries of a
    glossary that are read. Without a chat template, names of entries in the question are also put before it, so that their packs
    are open when it is read.
    """
    check_model_name("model", model)
    check_dtype(dtype)
    if not is_text(question):
        raise ValueError(f"question is {question!r}, with half a character; expected text in UTF-8. Write it again.")
    import torch
    from jinja2 import TemplateError
    from transformers import TextStreamer

    from midus_hf.saved_models import as_value_error, check_ids, load_for_reading

    loaded, tokenizer = load_for_reading(model, dtype, device)
    if not plain and tokenizer.chat_template is None:
        print("the model has no chat template: the question is continued as text", file=sys.stderr)
        plain = True
    named = _named(loaded, question) if plain else []
    if plain:
        inputs = tokenizer("\n".join([*named, question]), return_tensors="pt")
    else:
        chat = [{"role": "user", "content": question}]
        refusal = f"model is {model!r}, whose chat template refuses a single question; pass --plain to skip it"
        with as_value_error(refusal, TemplateError, TypeError, ValueError):
            inputs = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
    if not inputs["input_ids"].numel():
        raise ValueError(f"question is {question!r}, which has no token for this model; expected a text.")
    check_ids(int(inputs["input_ids"].max()), loaded.config.get_text_config().vocab_size)
    _say_what_is_open(loaded, inputs["input_ids"][0].tolist(), named)
    greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    generate: Any = loaded.generate
    with torch.no_grad():
        generate(
            **inputs.to(loaded.device),
            **_fetched(loaded, model, question),
            **greedy,
            max_new_tokens=max_new_tokens,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )


def _glossary(loaded: "PreTrainedModel") -> Any:
    """Return the glossary of a model; None without packs."""
    stack: Any = loaded.stack if hasattr(loaded.config, "memories") else None
    return loaded.glossary if stack is not None and "packs" in stack.services else None


def _named(loaded: "PreTrainedModel", question: str) -> list[str]:
    """Return the first name of each entry that a question names, to be put before it; none without packs."""
    glossary = _glossary(loaded)
    if glossary is None:
        return []
    return [glossary[number].names[0] for number in glossary.named(glossary.spelling.ids(question))]


def _say_what_is_open(loaded: "PreTrainedModel", ids: list[int], in_front: list[str]) -> None:
    """Print which entries are read after a text, which others it names, or which names are similar; nothing without packs."""
    glossary = _glossary(loaded)
    if glossary is None:
        return
    stack: Any = loaded.stack
    entries, others = stack.services["packs"].open_at_end(ids)
    if entries:
        said = f"packs of {', '.join(glossary[entry].names[0] for entry in entries)} are read"
        said += (
            f"; {', '.join(in_front)} put before the question, so that their packs are open when it is read"
            if in_front
            else ""
        )
    elif others:
        said = "no pack is read"
    else:
        said = "no pack is read: the question contains no name of an entry"
        near = glossary.near(glossary.spelling.tokenizer.decode(ids, skip_special_tokens=True))
        said += f"; did you mean {', '.join(map(repr, near))}?" if near else ""
    said += f"; named, but not read: {', '.join(glossary[entry].names[0] for entry in others)}" if others else ""
    print(said, file=sys.stderr)


def _fetched(loaded: "PreTrainedModel", name: str, question: str) -> dict[str, Any]:
    """Return the path of the question's topic as an argument of `generate`, and print which blocks are read; empty without a bank."""
    from midus_hf.evaluation.fetching import fetches_blocks, open_retriever

    if not fetches_blocks(loaded):
        return {}
    banks: Any = loaded.banks
    folders = [banks.bank(memory).folder for memory in banks.layouts]  # of a model of the Hub too
    tree = next((folder for folder in folders if all((folder / file).is_file() for file in TREE_FILES)), None)
    if tree is None:
        print(
            f"no block is read: {name} has no tree of topics in its bank; midus train saves the one of --tree",
            file=sys.stderr,
        )
        return {}
    retriever = open_retriever(loaded, str(tree))
    assert retriever is not None, "a tree is given"
    path = retriever.paths([question])
    print(_told_of_blocks(banks, path[0].tolist()), file=sys.stderr)
    return {"memory_ids": path.to(loaded.device)}


def _told_of_blocks(banks: Any, path: list[int]) -> str:
    """Return in words which blocks of a path are read. Blocks that were deleted or never trained add nothing."""
    blocks: dict[str, list[str]] = {"read": [], "deleted": [], "never trained": []}
    for level, node in enumerate(path, start=1):
        of_level = [banks.bank(name) for name, layout in banks.layouts.items() if level in layout.levels]
        if of_level:
            is_read = any(bank.is_written(level, node) for bank in of_level)
            is_deleted = any(node in bank.deleted(level) for bank in of_level)
            state = "read" if is_read else "deleted" if is_deleted else "never trained"
            blocks[state].append(f"{level}:{'generic' if node < 0 else node}")
    read, is_generic = blocks.pop("read"), path[0] < 0
    sentence = "the generic memory is read" if is_generic else f"blocks {', '.join(read)} are read"
    others = [f"; {state}: {', '.join(named)}" for state, named in blocks.items() if named]
    return "no topic is close: " * is_generic + (sentence if read else "no block is read") + "".join(others)


main = partial(run_command, app, name="midus ask")

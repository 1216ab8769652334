"""The `midus ask` command."""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from midus_hf.cli.command_line import Device, Termination, argument, cli_option, command_line, flag, run_command
from midus_hf.config.errors import RequestError, first_line
from midus_hf.files.checkpoint_files import TREE_FILES
from midus_hf.memories.packs.names import is_text
from midus_hf.sources.names import check_dtype, check_model_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from midus_hf.evaluation.asking import Conversation
    from midus_hf.memories.packs.glossary import Glossary

app = command_line()


@app.command()
def midus_ask(
    model: Annotated[str, argument("Folder or Hub id.", "MODEL")],
    question: Annotated[str | None, argument("What to ask. Default: a conversation.", "[QUESTION]")] = None,
    questions: Annotated[str | None, cli_option("Ask each line of a file, or of standard input (-).", "FILE")] = None,
    plain: Annotated[bool, flag("--plain", "Continue QUESTION as text, without the chat template.")] = False,
    max_new_tokens: Annotated[int, cli_option("Most tokens of an answer.", "N", min=1)] = 256,
    dtype: Annotated[str, cli_option("auto, float32, bfloat16 or float16.", "NAME")] = "auto",
    device: Device = None,
) -> None:
    """Ask a model, and print its answer as it is written.

    Each token is the likeliest. Without QUESTION, each line of standard input is the next turn of a conversation, to its end
    (Ctrl-D); Ctrl-C stops an answer. With --questions, each line of a file is a question of its own. The model is loaded once.

    A model with a bank fetches the blocks of the question's topic, which are listed on standard error, as are the entries of a
    glossary that are read. A name in the question is repeated on a line before it, so that all words of the question read the
    entry.
    """
    check_model_name("model", model)
    check_dtype(dtype)
    if question is not None and questions is not None:
        raise RequestError("QUESTION and --questions are given; expected one of them. Leave one out.")
    converses = question is None and questions is None
    if converses and plain:
        raise RequestError(
            "--plain is given without QUESTION, and a conversation needs the chat template; leave it out."
        )
    asked: Iterable[str] = _turns()
    if not converses:
        asked = [question] if question is not None else _lines_of(str(questions))
        for each in asked:
            _check_text(each)
    from midus_hf.evaluation.asking import Conversation
    from midus_hf.memories.packs.kept_readings import keep_readings
    from midus_hf.models.saved_models import load_for_reading

    loaded, tokenizer = load_for_reading(model, dtype, device)
    if converses and tokenizer.chat_template is None:
        raise RequestError(
            f"model is {model!r}, which has no chat template for a conversation; expected QUESTION. Give one."
        )
    if not plain and tokenizer.chat_template is None:
        print("the model has no chat template: the question is continued as text", file=sys.stderr)
        plain = True
    find_blocks = _block_finder(loaded, model)
    conversation = None
    with keep_readings(loaded, check_numbers=False):
        for each in asked:
            if questions is not None:
                print(f"> {each}", flush=True)
            if conversation is None or not converses:
                conversation = Conversation(loaded)
            try:
                _ask(conversation, loaded, tokenizer, model, each, plain, max_new_tokens, find_blocks)
            except KeyboardInterrupt as interruption:
                if isinstance(interruption, Termination) or not (converses and sys.stdin.isatty()):
                    raise
                print(
                    "\nstopped: question and answer are not part of the conversation; Ctrl-D ends it", file=sys.stderr
                )


def _turns() -> Iterator[str]:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            break
        except UnicodeError as error:
            raise RequestError(
                f"standard input cannot be read: {first_line(error)}. Expected text in UTF-8."
            ) from None
        if line:
            _check_text(line)
            if not sys.stdin.isatty():
                print(f"> {line}", flush=True)
            yield line


def _check_text(question: str) -> None:
    if not is_text(question):
        raise RequestError(
            f"question is {question!r}, with an unpaired surrogate; expected text in UTF-8. Write it again."
        )


def _lines_of(path: str) -> list[str]:
    """Read a file of questions, a line each; - is standard input."""
    from midus_hf.data.corpus import KINDS

    if KINDS.get(Path(path).suffix.lower(), "text") != "text":
        raise RequestError(
            f"questions is {path!r}, which has rows; expected a text file, a question per line. midus look glossary --questions asks "
            "rows."
        )
    try:
        text = sys.stdin.read() if path == "-" else Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RequestError(
            f"questions is {path!r}, which cannot be read: {first_line(error)}. Expected a text file in UTF-8, a question per line."
        ) from None
    lines = [line.strip() for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not lines:
        raise RequestError(f"questions is {path!r}, which has no question; expected one per line.")
    return lines


def _ask(
    conversation: "Conversation",
    loaded: "PreTrainedModel",
    tokenizer: Any,
    name: str,
    question: str,
    plain: bool,
    max_new_tokens: int,
    find_blocks: Callable[[str], dict[str, Any]],
) -> None:
    """Print the answer as it is written, and on standard error what it reads; add both to the conversation."""
    from transformers import TextStreamer

    from midus_hf.evaluation.asking import glossary_of, question_inputs

    glossary = glossary_of(loaded)
    in_front = "" if glossary is None else glossary.names_in_front(question, in_chat=not plain)
    message = in_front + question
    inputs = question_inputs(loaded, tokenizer, message, name=name, chat=conversation.messages, plain=plain)
    if glossary is not None:
        _print_open_entries(glossary, question, inputs["input_ids"][0].tolist(), in_front.split("\n")[:-1])
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    written = conversation.answer(inputs, max_new_tokens, streamer=streamer, **find_blocks(question))
    answer = tokenizer.decode(written, skip_special_tokens=True)
    conversation.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]


def _print_open_entries(glossary: "Glossary", question: str, ids: list[int], in_front: list[str]) -> None:
    """Print which entries the tokens of a question read, which they name, or which names are similar."""
    entries = glossary.open_at_end(ids)
    others = [glossary[number] for number in glossary.named(ids) if glossary[number] not in entries]
    if entries:
        said = f"entries read: {', '.join(entry.names[0] for entry in entries)}"
        said += f"; names put before the question: {', '.join(in_front)}" if in_front else ""
    elif others:
        said = "no entry is read"
    else:
        said = "no entry is read: the question contains no name of an entry"
        similar = glossary.suggest_names(question)
        said += f"; did you mean {', '.join(map(repr, similar))}?" if similar else ""
    said += f"; named, but not read: {', '.join(entry.names[0] for entry in others)}" if others else ""
    print(said, file=sys.stderr)


def _block_finder(loaded: "PreTrainedModel", name: str) -> Callable[[str], dict[str, Any]]:
    """Return a function that gives the path of a question's topic for `generate`, and prints blocks read."""
    from midus_hf.evaluation.fetching import fetches_blocks, open_retriever

    if not fetches_blocks(loaded):
        return lambda question: {}
    banks: Any = loaded.banks
    folders = [banks.bank(memory).folder for memory in banks.layouts]  # of a model of the Hub too
    tree = next((folder for folder in folders if all((folder / file).is_file() for file in TREE_FILES)), None)
    if tree is None:
        print(
            f"no block is read: {name} has no tree of topics in its bank; midus train saves the one of --tree",
            file=sys.stderr,
        )
        return lambda question: {}
    retriever = open_retriever(loaded, str(tree))
    assert retriever is not None, "a tree is given"

    def find_blocks(question: str) -> dict[str, Any]:
        path = retriever.paths([question])
        print(_describe_blocks(banks, path[0].tolist()), file=sys.stderr)
        return {"memory_ids": path.to(loaded.device)}

    return find_blocks


def _describe_blocks(banks: Any, path: list[int]) -> str:
    """Return in words which blocks of a path are read; deleted and untrained ones add nothing."""
    blocks: dict[str, list[str]] = {"read": [], "deleted": [], "never trained": []}
    for level, node in enumerate(path, start=1):
        of_level = [banks.bank(name) for name, layout in banks.layouts.items() if level in layout.levels]
        if of_level:
            is_read = any(bank.is_written(level, node) for bank in of_level)
            is_deleted = any(node in bank.deleted(level) for bank in of_level)
            state = "read" if is_read else "deleted" if is_deleted else "never trained"
            blocks[state].append(f"{level}:{'generic' if node < 0 else node}")
    read = blocks.pop("read")
    is_generic = path[0] < 0
    if not read:
        sentence = "no block is read"
    elif is_generic:
        sentence = "the generic memory is read"
    else:
        sentence = f"blocks {', '.join(read)} are read"
    reason = "no topic is close: " if is_generic else ""
    others = [f"; {state}: {', '.join(named)}" for state, named in blocks.items() if named]
    return f"{reason}{sentence}{''.join(others)}"


main = partial(run_command, app, name="midus ask")

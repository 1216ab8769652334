"""Glossaries of checkpoints: entries that are added, replaced or deleted, in another checkpoint with all other bytes the same."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from midus_hf.memories.bank import banks_of
from midus_hf.memories.packs.bank_files import has_glossary
from upscalers.checkpoint.banks import bytes_of_banks, copy_banks
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.banks import copy_for_edit, files_beside_banks
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.methods.engram import tokenizer_of, vocabulary_of
from upscalers.runs.output_folder import CheckpointFolder

if TYPE_CHECKING:
    from midus_hf.memories.packs.glossary import Glossary


def add_entries(request: EditRequest, corpus: str, common_names: bool = False) -> dict[str, Any]:
    """Add the entries of a corpus, rows of a name or names and a text.

    Args:
        request: The checkpoint to read and the folder to make.
        corpus: File, folder or Hub dataset.
        common_names: Whether a name may be a frequent word, which almost every text has.

    Returns:
        `{"command", "model", "output", "entries", "seconds"}`, where `entries` has the names of each new entry.

    Raises:
        ValueError: If the model has no packs, a row is no entry, or a name has an entry already.
    """
    return _edit(request, "add", lambda glossary: _added(glossary, corpus, common_names))


def replace_entries(request: EditRequest, corpus: str) -> dict[str, Any]:
    """Replace the texts of entries by those of a corpus, whose rows have one of the entry's names; returns as `add_entries`.

    Raises:
        ValueError: If the model has no packs, a row is no entry, or a name has no entry.
    """
    return _edit(request, "replace", lambda glossary: _replaced(glossary, corpus))


def delete_entries(request: EditRequest, names: Sequence[str]) -> dict[str, Any]:
    """Delete the entries of names, so that no file of the output has their names or texts; returns as `add_entries`.

    A text with the name is then computed as without the entry, and every other text as before.

    Args:
        request: The checkpoint to read and the folder to make.
        names: Names in any form in which they are found in texts. An entry with several names is deleted as a whole.

    Raises:
        ValueError: If the model has no packs, or a name has no entry.
    """

    def delete(glossary: "Glossary") -> list[Sequence[str]]:
        numbers = dict.fromkeys(glossary.number(name) for name in names)
        entries = [glossary[number].names for number in numbers]
        for entry in entries:
            glossary.remove(entry[0])
        return list(entries)

    return _edit(request, "delete", delete)


def _added(glossary: "Glossary", corpus: str, common_names: bool) -> list[Sequence[str]]:
    from midus_hf.memories.packs.glossary import Glossary
    from upscalers.methods.packs import check_names, entries_of

    entries = entries_of(corpus)
    check_names(Glossary(glossary.spelling.tokenizer, entries, glossary.vocab_size), f"corpus {corpus}", common_names)
    for entry in entries:
        glossary.add(entry.names, entry.text, exact=entry.exact)
    return [entry.names for entry in entries]


def _replaced(glossary: "Glossary", corpus: str) -> list[Sequence[str]]:
    from upscalers.methods.packs import entries_of

    entries = entries_of(corpus)
    for entry in entries:
        glossary.replace(entry.names[0], entry.text)
    return [entry.names for entry in entries]


def _edit(request: EditRequest, command: str, change: Callable[["Glossary"], list[Sequence[str]]]) -> dict[str, Any]:
    started = time.perf_counter()
    with resolve_source(str(request.model)) as source:
        opened = open_base(source.folder, needs_weights=False)
        memories = opened.layout.memories
        if not has_glossary(memories):
            raise ValueError(
                f"{source.folder} has no packs; expected a checkpoint that was upscaled with --method packs."
            )
        from midus_hf.memories.packs.glossary import Glossary, read_glossary, write_glossary

        glossary = Glossary(tokenizer_of(opened), read_glossary(source.folder), vocabulary_of(opened))
        entries = change(glossary)
        folder = CheckpointFolder(request.output, source.folder, request.overwrite)
        files, banks = files_beside_banks(source.folder), banks_of(memories)
        folder.check_space(sum(path.stat().st_size for path in files) + bytes_of_banks(source.folder, banks))
        with folder.writing() as partial:
            copy_for_edit(files, source.folder, partial)
            copy_banks(source.folder, partial, banks)
            write_glossary(partial, glossary)
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.output),
        "entries": [list(names) for names in entries],
        "seconds": time.perf_counter() - started,
    }

"""Glossaries of checkpoints: entries that are added, replaced or deleted, in another checkpoint with all other bytes the same."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.anatomy.record import RECORD_KEY, language_entry, recorded_options
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import CARD, CARD_FILE, CONFIG, RECORD, is_of
from midus_hf.memories.bank import banks_of
from midus_hf.memories.packs.bank_files import has_glossary
from midus_hf.memories.packs.options import PacksOptions
from upscalers.checkpoint.banks import bytes_of_banks, copy_banks
from upscalers.checkpoint.base_checkpoint import open_base, read_config, write_config
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.banks import copies_of, copy_for_edit, files_beside_banks
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.methods.engram import tokenizer_of, vocabulary_of
from upscalers.methods.packs import check_protected, corpus_rows, recorded_name
from upscalers.record.model_card import with_request
from upscalers.record.provenance import read_record, write_record
from upscalers.runs.output_folder import CheckpointFolder

if TYPE_CHECKING:
    from midus_hf.memories.packs.glossary import Entry, Glossary, GlossaryChange


def add_entries(
    request: EditRequest, corpus: str, common_names: bool = False, protect: str | None = None
) -> dict[str, Any]:
    """Add the entries of a corpus, rows of a name or names and a text.

    Args:
        request: The checkpoint to read and the folder to make.
        corpus: File, folder or Hub dataset.
        common_names: Whether a name may be a frequent word, which almost every text has. Default: False.
        protect: File, folder or Hub dataset of texts that must not contain a name of any entry, which is recorded. Default: none; a
            model that recorded protected texts no longer does so if there are new names.

    Returns:
        `{"command", "model", "output", "entries", "remarks", "seconds"}`, where `entries` has the names of each entry of the corpus,
        and `remarks` lines on what is not read, or no longer recorded.

    Raises:
        RequestError: If the model has no packs, a row is no entry, a name has an entry already, or a protected text contains a name.
    """
    return _edit(
        request, "add", lambda glossary: glossary.change(corpus_rows(corpus), common_names=common_names), protect
    )


def replace_entries(
    request: EditRequest, corpus: str, common_names: bool = False, protect: str | None = None
) -> dict[str, Any]:
    """Replace the texts of entries by those of a corpus, whose rows have one of the entry's names.

    Names of a row that are new are added to the entry, and `exact` is taken if the row has it. Arguments and result are those of
    `add_entries`; `entries` has all names of the entries as they are now.

    Raises:
        RequestError: If no entry has a name of a row, or several have, or for the reasons of `add_entries`.
    """

    def replace(glossary: "Glossary") -> "GlossaryChange":
        return glossary.change(corpus_rows(corpus), replaces=True, common_names=common_names)

    return _edit(request, "replace", replace, protect)


def delete_entries(request: EditRequest, names: Sequence[str]) -> dict[str, Any]:
    """Delete all entries that names find: the glossary of the output has none of their rows.

    A text with such a name is then computed as without the entry, and every other text as before. What other entries, and records of
    the model, say with the names remains.

    Args:
        request: The checkpoint to read and the folder to make.
        names: Names in any form in which they are found in texts. An entry with several names is deleted as a whole.

    Returns:
        As from `add_entries`, with `remains`, where the names of deleted entries still occur: `texts`, other entries by their first
        names; other `names`; and `files`, such as those that record the name of a corpus. `copies` lists folders and files that
        still contain the entries.

    Raises:
        RequestError: If the model has no packs, or a name has no entry.
    """

    def delete(glossary: "Glossary") -> "GlossaryChange":
        from midus_hf.memories.packs.glossary import GlossaryChange

        return GlossaryChange(glossary.remove(*names), 0, [], [])

    return _edit(request, "delete", delete)


def _edit(
    request: EditRequest,
    command: str,
    change: Callable[["Glossary"], "GlossaryChange"],
    protect: str | None = None,
) -> dict[str, Any]:
    started = time.perf_counter()
    with resolve_source(str(request.model)) as source:
        opened = open_base(source.folder)
        memories = opened.layout.memories
        if not has_glossary(memories):
            raise RequestError(
                f"{source.folder} has no packs; expected a checkpoint that was upscaled with --method packs."
            )
        from midus_hf.memories.packs.glossary import (
            UNPROTECTED,
            Glossary,
            read_glossary,
            write_glossary,
        )

        options = (entry.options for entry in memories.attached.values())
        (most,) = (each.max_tokens for each in options if isinstance(each, PacksOptions))
        glossary = Glossary(tokenizer_of(opened), read_glossary(source.folder), vocabulary_of(opened), most)
        changed = change(glossary)
        remarks = [*changed.remarks]
        recorded = [each.get("protect") for each in recorded_options(opened.config.get(RECORD_KEY), "packs")]
        was_protected = [name for name in recorded if name is not None and changed.new_names]
        if protect is not None:
            remarks.append(f"protect: {check_protected(glossary, protect):,} texts of {protect} contain no name")
        elif was_protected:
            remarks.append(f"{UNPROTECTED.format(was_protected[0])} Pass --protect to check them.")
        folder = CheckpointFolder(request.output, source.folder, request.overwrite)
        files, banks = files_beside_banks(source.folder), banks_of(memories)
        folder.check_space(sum(path.stat().st_size for path in files) + bytes_of_banks(source.folder, banks))
        with folder.writing() as partial:
            copy_for_edit(files, source.folder, partial)
            copy_banks(source.folder, partial, banks)
            write_glossary(partial, glossary)
            if protect is not None or was_protected:
                _record_protected(partial, protect)
        left = _left(glossary, changed.entries, Path(request.output)) if command == "delete" else {}
        if left:
            left["copies"] = copies_of(source.folder, str(request.model))
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.output),
        "entries": [list(entry.names) for entry in changed.entries],
        "remarks": remarks,
        **left,
        "seconds": time.perf_counter() - started,
    }


def _record_protected(folder: Path, protect: str | None) -> None:
    """Record in config, record and card which texts contain no name; None: none is known to."""

    def record(entry: Any) -> None:
        for options in recorded_options(entry, "packs"):
            options["protect"] = None if protect is None else recorded_name(protect)

    config = read_config(folder)
    record(language_entry(config).get(RECORD_KEY))
    write_config(folder, config)
    if (made := read_record(folder)) is not None:
        record(made)
        write_record(folder, made)
    card = folder / CARD_FILE
    if card.is_file():
        card.write_bytes(with_request(card.read_bytes().decode(), record).encode())


def _left(glossary: "Glossary", deleted: Sequence["Entry"], output: Path) -> dict[str, Any]:
    """Return where names of deleted entries still occur, as they would be found in texts."""
    from midus_hf.memories.packs.glossary import found_in
    from midus_hf.memories.packs.names import NameTable, name_of

    table = NameTable(name_of(0, name) for entry in deleted for name in entry.names)
    files = [path for path in sorted(output.iterdir()) if is_of(path.name, CONFIG, RECORD, CARD)]
    return {
        "remains": {
            "texts": [entry.names[0] for entry in glossary if found_in(table, entry.text)],
            "names": [name for entry in glossary for name in entry.names if found_in(table, name)],
            "files": [path.name for path in files if found_in(table, _unescaped(path.read_bytes().decode()))],
        }
    }


def _unescaped(text: str) -> str:
    """Return the text of JSON or YAML without escapes of characters."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")

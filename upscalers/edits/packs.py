"""Glossaries of checkpoints: entries are listed, added, replaced, deleted or synced, in place or in a copy."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.anatomy.record import RECORD_KEY, iter_recorded_options, language_entry
from midus_hf.config.errors import RequestError
from midus_hf.files.cards import read_card, write_card
from midus_hf.files.checkpoint_files import CARD, CONFIG, GLOSSARY_FILE, RECORD, TRAVELLING, is_of
from midus_hf.files.outputs import exclusive
from midus_hf.memories.bank import banks_of
from midus_hf.memories.packs.options import PacksOptions
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, read_config, write_config
from upscalers.checkpoint.source import resolve_source
from upscalers.edits.banks import datasets_cache
from upscalers.edits.checkpoint_edit import EditRequest, copied_for_edit, remove_results
from upscalers.methods.engram import recorded_name, tokenizer_of, vocabulary_of
from upscalers.methods.packs import check_protected, corpus_rows
from upscalers.record.model_card import with_request
from upscalers.record.provenance import read_record, write_record

if TYPE_CHECKING:
    from midus_hf.memories.packs.glossary import Entry, Glossary, GlossaryChange

_MAX_SEARCHED_BYTES = 64 << 20


def list_entries(model: str | Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's glossary, which needs its tokenizer and no weights.

    Args:
        model: A checkpoint with packs: a folder or a hub id.

    Returns:
        `{"model", "max_tokens", "entries"}`: the most tokens of a text that are read, and `{"names", "text", "exact", "tokens"}` of
        each entry, with the number of tokens of the whole text.

    Raises:
        RequestError: If the glossary or the tokenizer cannot be read.
    """
    from midus_hf.memories.packs.glossary import read_glossary
    from midus_hf.memories.packs.names import TokenSpelling

    with resolve_source(str(model), config_only=True, needs=((GLOSSARY_FILE,), TRAVELLING)) as source:
        opened = open_base(source.folder, needs_weights=False)
        most = _find_packs(opened)[1].max_tokens
        entries = read_glossary(source.folder)
        ids = TokenSpelling(tokenizer_of(opened)).ids_of([entry.text for entry in entries], False) if entries else []
    return {
        "model": str(model),
        "max_tokens": most,
        "entries": [
            {"names": list(entry.names), "text": entry.text, "exact": entry.exact, "tokens": len(its_ids)}
            for entry, its_ids in zip(entries, ids, strict=True)
        ],
    }


def _find_packs(model: BaseCheckpoint) -> tuple[str, PacksOptions]:
    """Return the name and the options of a model's only memory with a glossary."""
    for name, entry in model.layout.memories.attached.items():
        if isinstance(entry.options, PacksOptions):
            return name, entry.options
    raise RequestError(f"{model.folder} has no packs; expected a checkpoint that was upscaled with --method packs.")


def add_entries(
    request: EditRequest, corpus: str, common_names: bool = False, protect: str | None = None
) -> dict[str, Any]:
    """Add the entries of a corpus, rows of a name or names and a text.

    Args:
        request: The checkpoint, and the folder to make; without one, the checkpoint's own glossary is changed.
        corpus: File, folder or Hub dataset.
        common_names: Whether a name may be a frequent word, which almost every text has. Default: False.
        protect: File, folder or Hub dataset of texts that must not contain a name of any entry; recorded. Default: none; a record of
            protected texts goes if there are new names.

    Returns:
        `{"command", "model", "output", "entries", "remarks", "seconds"}`: `entries` has the names of each entry of the corpus,
        `remarks` lines on what is not read, or no longer recorded.

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

    New names of a row are added to the entry, and `exact` is taken if the row has it. Arguments and result are those of
    `add_entries`; `entries` has all names of the entries as they are now.

    Raises:
        RequestError: If no entry has a name of a row, or several have, or for the reasons of `add_entries`.
    """

    def replace(glossary: "Glossary") -> "GlossaryChange":
        return glossary.change(corpus_rows(corpus), replaces=True, common_names=common_names)

    return _edit(request, "replace", replace, protect)


def sync_entries(
    request: EditRequest, corpus: str, common_names: bool = False, protect: str | None = None
) -> dict[str, Any]:
    """Make a glossary that of a corpus, as a new upscaling would, and tell what that adds, replaces and deletes.

    Arguments are those of `add_entries`. A glossary that is the corpus' already is not written.

    Returns:
        As from `add_entries`, with the names of entries in `added`, in `replaced`, which have a name of an earlier entry and another
        text, names or `exact`, and in `deleted`, of whose names the glossary has none; for these also what `delete_entries` returns.

    Raises:
        RequestError: If the model has no packs, a row is no entry, a name is one of two rows, or a protected text contains a name.
    """
    from midus_hf.memories.packs.glossary import is_new_name, names_of

    def sync(glossary: "Glossary") -> "GlossaryChange":
        before = glossary.index
        if earlier := [name for entry in glossary for name in entry.names]:
            glossary.remove(*earlier)
        changed = glossary.change(corpus_rows(corpus), common_names=common_names)
        names = [pair for entry in changed.entries for pair in names_of(0, entry).items()]
        return changed._replace(new_names=[given for name, given in names if is_new_name(before, name)])

    return _edit(request, "sync", sync, protect)


def delete_entries(request: EditRequest, names: Sequence[str]) -> dict[str, Any]:
    """Delete all entries that names find: the glossary has none of their rows.

    A text with such a name is then computed as without the entry, every other text as before. What other entries, and records of the
    model, say with the names remains.

    Args:
        request: The checkpoint, and the folder to make; without one, the checkpoint's own glossary is changed.
        names: Names in any form in which they are found in texts. An entry with several names is deleted as a whole.

    Returns:
        As from `add_entries`, with `remains`, where the names still occur: `texts`, other entries by their first names; other
        `names`; and `files`, such as those that record the name of a corpus. `copies` lists files that still have a name and a line
        of a deleted text, among those in the folders `searched`, files of rows and glossaries of other checkpoints, and folders in
        the cache of datasets that have them.

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
    """Change a glossary in place or in a copy; return what changed and where deleted text remains."""
    started = time.perf_counter()
    with _open_folder(request) as source:
        opened = open_base(source, needs_weights=request.output is not None)
        memories = opened.layout.memories
        memory, options = _find_packs(opened)
        if request.memory not in (None, memory):
            raise RequestError(
                f"memory is {request.memory!r}; expected {memory!r}, the only one with a glossary. Name it, or leave memory out."
            )
        from midus_hf.memories.packs.glossary import UNPROTECTED, Glossary, read_glossary, write_glossary

        glossary = Glossary(tokenizer_of(opened), read_glossary(source), vocabulary_of(opened), options)
        before = [*glossary]
        changed = change(glossary)
        differences = _differences(before, [*glossary]) if command == "sync" else {}
        deleted = changed.entries if command == "delete" else differences.get("deleted", [])
        remarks = [*changed.remarks]
        recorded = [each.get("protect") for each in iter_recorded_options(opened.config.get(RECORD_KEY), "packs")]
        was_protected = [name for name in recorded if name is not None and (changed.new_names or protect is not None)]
        if protect is not None:
            remarks.append(check_protected(glossary, protect))
        elif was_protected:
            remarks.append(f"{UNPROTECTED.format(was_protected[0])} Pass --protect to check them.")
        if request.output is None:
            output = source
            if [*glossary] != before:
                # Record and card must be true whenever the process is killed: ended promises go first, new ones come last.
                remove_results(source)
                if was_protected:
                    _record_protected(source, None)
                write_glossary(source, glossary)
            if protect is not None:
                _record_protected(source, protect)
        else:
            output = Path(os.path.realpath(Path(request.output).expanduser()))
            with copied_for_edit(opened, request) as partial:
                for bank in banks_of(memories).values():
                    bank.copy(source, partial)
                write_glossary(partial, glossary)
                if protect is not None or was_protected:
                    _record_protected(partial, protect)
        left: dict[str, Any] = {key: [list(entry.names) for entry in each] for key, each in differences.items()}
        if deleted:
            left |= {**_left(glossary, deleted, output), **_find_copies(deleted, source, output)}
    return {
        "command": command,
        "model": str(request.model),
        "output": str(request.model if request.output is None else request.output),
        "entries": [list(entry.names) for entry in changed.entries],
        "remarks": remarks,
        **left,
        "seconds": time.perf_counter() - started,
    }


def _differences(before: Sequence["Entry"], after: Sequence["Entry"]) -> dict[str, list["Entry"]]:
    """Return the entries that were added, replaced or deleted, paired by names as texts find them."""
    from midus_hf.memories.packs.names import name_of

    def forms(entry: "Entry") -> set[Any]:
        names = [name_of(0, name, entry.exact) for name in entry.names]
        return {*entry.names, *((name.folded, name.written) for name in names)}

    same = {*before} & {*after}
    gone = [entry for entry in before if entry not in same]
    new = [entry for entry in after if entry not in same]
    earlier = {form for entry in gone for form in forms(entry)}
    later = {form for entry in new for form in forms(entry)}
    return {
        "added": [entry for entry in new if not forms(entry) & earlier],
        "replaced": [entry for entry in new if forms(entry) & earlier],
        "deleted": [entry for entry in gone if not forms(entry) & later],
    }


@contextlib.contextmanager
def _open_folder(request: EditRequest) -> Iterator[Path]:
    """Yield the checkpoint's folder, locked if it is changed in place; refuse one that cannot be."""
    if request.output is not None:
        with resolve_source(str(request.model)) as source:
            yield source.folder
        return
    if request.overwrite:
        raise RequestError(
            "overwrite is given without output, the folder that it replaces; expected both. Pass --output DIR, or leave it out, "
            "which changes the model's own glossary."
        )
    if not Path(request.model).expanduser().exists():
        raise RequestError(
            f"model is {str(request.model)!r}, which is no folder here; expected one, to change its glossary in place. For a model "
            "of the Hub, pass --output DIR."
        )
    with resolve_source(str(request.model), config_only=True) as source:
        folder = source.folder
        file = source.folder / GLOSSARY_FILE
        if file.is_symlink():
            raise RequestError(
                f"{file} is a link to {os.path.realpath(file)}, which other folders may read; expected a file, to change it in "
                "place. Pass --output DIR, or put a copy in its place."
            )
        if not os.access(folder, os.W_OK):
            raise RequestError(
                f"{folder} is not writable; expected a folder whose glossary can be changed in place. Pass --output DIR."
            )
        with exclusive(folder, RequestError(f"{folder} is being written by another run. Wait for it.")):
            yield folder


def _record_protected(folder: Path, protect: str | None) -> None:
    """Record in config, record and card which texts contain no name; None: none is known to."""

    def record(entry: Any) -> None:
        for options in iter_recorded_options(entry, "packs"):
            options["protect"] = None if protect is None else recorded_name(protect)

    config = read_config(folder)
    record(language_entry(config).get(RECORD_KEY))
    write_config(folder, config)
    if (made := read_record(folder)) is not None:
        record(made)
        write_record(folder, made)
    if (card := read_card(folder)) is not None:
        write_card(folder, with_request(card, record))


def _left(glossary: "Glossary", deleted: Sequence["Entry"], output: Path) -> dict[str, Any]:
    from midus_hf.memories.packs.names import NameIndex, find_names, name_of

    table = NameIndex((name_of(0, name) for entry in deleted for name in entry.names), not_forms=())
    files = [path for path in sorted(output.iterdir()) if is_of(path.name, CONFIG, RECORD, CARD)]
    return {
        "remains": {
            "texts": [entry.names[0] for entry in glossary if find_names(table, entry.text)],
            "names": [name for entry in glossary for name in entry.names if find_names(table, name)],
            "files": [
                path.name for path in files if find_names(table, _unescaped(path.read_text("utf-8", errors="replace")))
            ],
        }
    }


def _find_copies(deleted: Iterable["Entry"], source: Path, output: Path) -> dict[str, Any]:
    """Return files nearby and in caches that have a deleted entry, and the folders searched."""
    from midus_hf.data.corpus import ROW_SUFFIXES

    wanted = [
        (
            [*map(_encodings, entry.names)],
            [_encodings(line.strip()) for line in entry.text.splitlines() if line.strip()],
        )
        for entry in deleted
    ]

    def has_entry(content: bytes) -> bool:
        return any(all(any(form in content for each in part for form in each) for part in entry) for entry in wanted)

    source, output = source.resolve(), output.resolve()
    places = dict.fromkeys((Path.cwd(), source.parent, output.parent))
    files = {
        *(file for place in places for file in place.glob(f"*/{GLOSSARY_FILE}")),
        *(file for place in places for file in place.glob("*") if file.name.lower().endswith(ROW_SUFFIXES)),
        *source.glob(f"checkpoint-*/{GLOSSARY_FILE}"),
        *datasets_cache().glob("*/*/*/midus-*/*.arrow"),
    } - {output / GLOSSARY_FILE}
    copies = []
    for file in sorted(files):
        with contextlib.suppress(OSError):  # of files that others own
            if file.is_file() and file.stat().st_size <= _MAX_SEARCHED_BYTES and has_entry(file.read_bytes()):
                # Without its file of rows, the package datasets could not read a folder of the cache again.
                is_cached = file.suffix == ".arrow"
                copies.append(_short_path(file.parent if is_cached else file))
    return {"copies": copies, "searched": [*map(str, places)]}


def _encodings(text: str) -> set[bytes]:
    in_json = (json.dumps(text, ensure_ascii=each)[1:-1] for each in (True, False))
    return {each.encode() for each in (text, text.replace('"', '""'), *in_json)}


def _short_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _unescaped(text: str) -> str:
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape", "replace")

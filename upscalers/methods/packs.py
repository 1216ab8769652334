"""Packs: a glossary of names and texts, whose entries tokens attend to once a name occurs."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.options import option
from midus_hf.config.wording import first_few, install_extra
from midus_hf.memories.packs.bank_files import has_glossary
from midus_hf.memories.packs.options import PacksOptions
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.methods.contract import register_method
from upscalers.methods.engram import tokenizer_of, vocabulary_of
from upscalers.methods.memory_methods import AttachedMemoryMethod
from upscalers.plan.plan import Plan
from upscalers.request.progress import Progress

if TYPE_CHECKING:
    from midus_hf.memories.packs.glossary import Entry, Glossary

# The most frequent words of a vocabulary, in whose order frequent tokens come first: almost every text has one.
_COMMON_WORDS = 1000
# Rotary embeddings whose angles depend on the length of the pass.
_BY_LENGTH = ("dynamic", "longrope")


@register_method("packs")
class Packs(AttachedMemoryMethod):
    """Texts of a glossary, which tokens attend to from a name on."""

    summary = "texts that every token attends to from their name on, without training (identity where no name occurs)"
    paper = None
    identity = True
    identity_except = "texts with a name of the glossary, which change from the name on"
    memory_options = PacksOptions
    own_options = [
        ("corpus", str | None, option(None, 'rows {"name": ..., "text": ...}: a file, folder or Hub dataset')),
        ("common_names", bool, option(False, "whether a name may be a frequent word, which almost every text has")),
        (
            "protect",
            str | None,
            option(None, "texts that must not contain a name, and so keep their logits bit for bit"),
        ),
    ]

    def __init__(self, options: Any):
        super().__init__(options)
        self._glossary: Glossary | None = None
        # Tokens of the text of each entry.
        self._lengths: list[int] = []

    @property
    def recorded_options(self) -> dict[str, Any]:
        recorded = super().recorded_options
        for name in ("corpus", "protect"):
            value = recorded[name]
            if value is not None and Path(value).expanduser().exists():
                recorded[name] = Path(value).name
        return recorded

    def check_machine(self) -> None:
        if self.options.corpus is None:
            raise ValueError(
                'corpus is missing; expected a file of names and texts, a row {"name": ..., "text": ...} for each entry. Pass --set '
                "corpus=FILE."
            )
        if importlib.util.find_spec("datasets") is None:
            raise ValueError(f"a corpus needs datasets, which is not installed; {install_extra('train')}.")

    def check(self, base: BaseCheckpoint) -> None:
        if self.options.corpus is not None and not has_tokenizer(path.name for path in base.folder.iterdir()):
            raise ValueError(
                f"{base.folder} has no tokenizer, to find names in texts; expected one in the folder of the weights. Copy it there."
            )
        if has_glossary(base.layout.memories):
            raise ValueError(
                f"{base.folder} has packs; expected one glossary for a model. Add entries to it: midus edit add {base.folder} "
                "--corpus FILE --output DIR."
            )
        kinds = {str(rope.get("rope_type")) for rope in _rotations(base.config)}
        for kind in kinds & {*_BY_LENGTH}:
            raise ValueError(
                f"the base rotates keys by the length of the text (rope_type {kind!r}), so that keys of a text that was read "
                "alone do not fit another text; expected a rotation by positions only. Choose another method."
            )
        super().check(base)

    def remarks(self, base: BaseCheckpoint) -> list[str]:
        if self.options.corpus is None:  # in a dry run
            return super().remarks(base)
        glossary, most = self.glossary(base), self.options.max_tokens
        remarks = [*super().remarks(base), f"{len(glossary):,} entries of {sum(self._lengths):,} tokens"]
        if cut := sum(length > most for length in self._lengths):
            remarks.append(f"entries longer than {most} tokens, whose rest is not read: {cut:,}")
        if self.options.protect is not None:
            remarks.append(f"protect: {self._protected(base):,} texts of {self.options.protect} contain no name")
        return remarks

    def glossary(self, base: BaseCheckpoint) -> "Glossary":
        """Return the entries of the corpus, which is read once.

        Raises:
            ValueError: If a row is no entry, if two entries share a name, or if a name is too common.
        """
        if self._glossary is None:
            from midus_hf.memories.packs.glossary import Glossary

            self._glossary = Glossary(tokenizer_of(base), entries_of(self.options.corpus), vocabulary_of(base))
            self._lengths = check_names(self._glossary, f"corpus {self.options.corpus}", self.options.common_names)
        return self._glossary

    def _protected(self, base: BaseCheckpoint) -> int:
        """Return the number of protected texts; refuse those that contain a name."""
        from midus_hf.data.corpus import read_corpus
        from midus_hf.memories.packs.glossary import found_in

        glossary = self.glossary(base)
        texts = list(read_corpus(self.options.protect, key="protect")["text"])
        held: dict[str, int] = {}
        for text in texts:
            for entry in {found.entry for found in found_in(glossary.table, text)}:
                name = glossary[entry].names[0]
                held[name] = held.get(name, 0) + 1
        if held:
            named = [f"{name!r} ({count} texts)" for name, count in held.items()]
            raise ValueError(
                f"texts of {self.options.protect} contain names of the corpus: {first_few(named)}; expected none, since these texts "
                "would change. Remove the names from the corpus, or protect other texts."
            )
        return len(texts)

    def bank_bytes(self, base: BaseCheckpoint) -> int:
        return (
            0 if self.options.corpus is None else sum(len(entry.text.encode()) + 100 for entry in self.glossary(base))
        )

    def fill_banks(self, base: BaseCheckpoint, plan: Plan, folder: Path, progress: Progress) -> None:
        from midus_hf.memories.packs.glossary import write_glossary

        write_glossary(folder, self.glossary(base))


def _rotations(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of rotary embeddings of a config; some families have several, one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, dict):
            yield from (each for each in [value, *value.values()] if isinstance(each, dict))


def entries_of(corpus: str) -> "list[Entry]":
    """Return the entries of a corpus; texts of rows of the same names are joined by a line break.

    Raises:
        ValueError: If the corpus cannot be read, a row is no entry, or two entries share a name.
    """
    from midus_hf.data.corpus import read_rows
    from midus_hf.memories.packs.glossary import entry_of, joined

    rows = read_rows("corpus", corpus)
    missing = {"name", "text"} - set(rows.column_names)
    if missing:
        raise ValueError(
            f"corpus {corpus} has the columns {', '.join(rows.column_names)}; expected name and text. Rename them, or write a row "
            '{"name": ..., "text": ...} for each entry.'
        )
    numbered = ((f"row {number} of corpus {corpus}", row) for number, row in enumerate(rows, 1))
    return joined((where, entry_of(row, where)) for where, row in numbered)


def check_names(glossary: "Glossary", where: str, common_names: bool) -> list[int]:
    """Refuse names and texts that tokens do not spell, and names that almost every text has; return the tokens of each text.

    Args:
        glossary: The entries.
        where: Where they come from, for messages.
        common_names: Whether a name may be a frequent word or a single character.

    Raises:
        ValueError: If there is one.
    """
    lengths = glossary.check((f"the entry {entry.names[0]!r} of {where}", entry) for entry in glossary)
    if common_names:
        return lengths
    frequent = _frequent_words(glossary)
    common = [
        name
        for entry in glossary
        for name in entry.names
        if len(name) < 2 or name in frequent or name.lower() in frequent
    ]
    if common:
        raise ValueError(
            f"names of {where} are single characters or frequent words, which almost every text has: "
            f"{first_few([*map(repr, common)])}; expected names that few texts have. Remove them, or allow them "
            "(common_names=true)."
        )
    return lengths


def _frequent_words(glossary: "Glossary") -> set[str]:
    """Return the words that come first in a vocabulary, in lower case."""
    words: dict[str, None] = {}
    for token in range(len(glossary.spelling.tokenizer)):
        piece = glossary.spelling.piece(token) or b""
        text = piece.decode("utf-8", "replace")
        if text.startswith(" ") and len(text) > 2 and text[1:].isalpha():
            words[text[1:].lower()] = None
            if len(words) == _COMMON_WORDS:
                break
    return {*words}

"""Packs: a glossary of names and texts, whose entries tokens attend to once a name occurs."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError, first_few, format_count
from midus_hf.config.options import option
from midus_hf.files.checkpoint_files import TRAVELLING
from midus_hf.memories.packs.options import PacksOptions, has_glossary
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.methods.contract import Surgery, register_method
from upscalers.methods.engram import recorded_name, tokenizer_of, vocabulary_of
from upscalers.methods.memory_methods import AttachedMemoryMethod
from upscalers.plan import Plan

if TYPE_CHECKING:
    from midus_hf.memories.packs.glossary import Glossary

# Rotary embeddings whose angles depend on the length of the pass.
_BY_LENGTH = ("dynamic", "longrope")


@register_method("packs")
class Packs(AttachedMemoryMethod):
    """Texts of a glossary, which tokens attend to from a name on."""

    summary = "texts that every token attends to from their name on, without training (identity where no name occurs)"
    paper = None
    identity = True
    identity_except = "texts with a name of the glossary, which change from the name on"
    needs = (TRAVELLING,)
    adds_parameters = False
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
        self._remarks: list[str] = []

    @property
    def options_record(self) -> dict[str, Any]:
        recorded = super().options_record
        for name in ("corpus", "protect"):
            if recorded[name] is not None:
                recorded[name] = recorded_name(recorded[name])
        return recorded

    def check_machine(self) -> None:
        if self.options.corpus is None:
            raise RequestError(
                'corpus is missing; expected a file of names and texts, a row {"name": ..., "text": ...} for each entry. Pass '
                "--corpus FILE."
            )

    def check(self, base: BaseCheckpoint) -> None:
        if self.options.corpus is not None and not has_tokenizer(base.folder):
            raise RequestError(
                f"{base.label} has no tokenizer, to find names in texts; expected one next to the weights. Copy one into a folder of "
                "the base."
            )
        if has_glossary(base.layout.memories):
            raise RequestError(
                f"{base.label} has packs; expected one glossary for a model. Add entries to it: midus edit add {base.label} "
                "--corpus FILE."
            )
        kinds = {str(rope.get("rope_type")) for rope in _rotations(base.config)}
        by_length = kinds & {*_BY_LENGTH}
        if by_length:
            raise RequestError(
                f"the base rotates keys by the length of the text (rope_type {min(by_length)!r}), so that keys of one text do not "
                "fit another; expected a rotation by positions only. Choose another method."
            )
        super().check(base)

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        surgery = super().surgery(base, plan, seed)
        if self.options.corpus is None:  # in a dry run
            return surgery
        glossary = self.glossary(base)
        remarks = [*self._remarks]
        if self.options.protect is not None:
            remarks.append(check_protected(glossary, self.options.protect))
        num_bytes = sum(len(entry.text.encode()) + 100 for entry in glossary)
        return replace(surgery, remarks=tuple(remarks), bank_bytes=num_bytes)

    def glossary(self, base: BaseCheckpoint) -> "Glossary":
        if self._glossary is None:
            from midus_hf.memories.packs.glossary import Glossary

            glossary = Glossary(tokenizer_of(base), (), vocabulary_of(base), self.options)
            added = glossary.change(corpus_rows(self.options.corpus), common_names=self.options.common_names)
            self._glossary = glossary
            counts = f"{format_count(len(glossary), 'entry')} of {format_count(added.tokens, 'token')}"
            chats = [] if glossary.chat_remark is None else [glossary.chat_remark]
            self._remarks = [counts, *added.remarks, *chats]
        return self._glossary

    def fill_banks(self, base: BaseCheckpoint, folder: Path) -> None:
        from midus_hf.memories.packs.glossary import write_glossary

        write_glossary(folder, self.glossary(base))


def _rotations(config: Any) -> Iterator[dict[str, Any]]:
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, dict):
            yield from (each for each in [value, *value.values()] if isinstance(each, dict))


def corpus_rows(corpus: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a corpus with its origin, for messages; refuse a corpus without the columns."""
    from midus_hf.data.corpus import read_rows

    rows = read_rows("corpus", corpus)
    missing = {"name", "text"} - set(rows.column_names)
    if missing:
        raise RequestError(
            f"corpus {corpus} has the columns {', '.join(rows.column_names)}; expected name and text. Rename them, or write a row "
            '{"name": ..., "text": ...} for each entry.'
        )
    yield from ((f"row {number} of corpus {corpus}", row) for number, row in enumerate(rows, start=1))


def check_protected(glossary: "Glossary", protect: str) -> str:
    """Refuse texts (a file, folder or Hub dataset) that open an entry; return a line on their number."""
    from midus_hf.data.corpus import read_corpus

    texts = list(read_corpus(protect, key="protect")["text"])
    held: dict[str, int] = {}
    for ids in glossary.spelling.tokenizer(texts, verbose=False)["input_ids"]:
        for entry in {entry for _, entry in glossary.opened(ids)}:
            name = glossary[entry].names[0]
            held[name] = held.get(name, 0) + 1
    if held:
        named = [f"{name!r} ({format_count(count, 'text')})" for name, count in held.items()]
        raise RequestError(
            f"texts of {protect} contain names of the glossary: {first_few(named)}; expected none, not even in front of a token that "
            "goes on with the word, since these texts would change. Remove the names, or protect other texts."
        )
    return f"protect: no name occurs in {format_count(len(texts), 'text')} of {protect}"

"""Engram: table rows chosen by the last tokens, in parallel to feed-forward networks of two layers."""

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError, as_request_error, first_few
from midus_hf.config.options import option
from midus_hf.files.checkpoint_files import TRAVELLING
from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT, EngramOptions
from midus_hf.memories.registry import TABLES, MemoryEntry
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.methods.contract import Paper, Surgery, register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod
from upscalers.plan import Plan
from upscalers.tensors.recipes import Integers

if TYPE_CHECKING:
    import torch

    from midus_hf.memories.packs.names import TokenSpelling

_PUBLISHED = "published"
# Text of a token that is part of a character.
_BROKEN = "\ufffd"
# Tried before names, in addition to those that tokens merge with names; and after names that end in punctuation.
_PREFIXES = ("", " ", "\n", "\n\n", *"\"'\u201c\u201d\u2018\u2019([{<*-/#$:")
_SUFFIXES = ("", *".,'\")")


@register_method("engram")
class Engram(AttachedMemoryMethod):
    """Table rows for n-grams that end at each token, numbered by hashes or by the tokenizer and a corpus."""

    summary = "rows of a table by the last two and three tokens, in two layers (identity at start)"
    paper = Paper(
        key="engram",
        title="Conditional Memory via Scalable Lookup: A New Axis of Sparsity for Large Language Models",
        authors=(
            "Cheng, Xin and Zeng, Wangding and Dai, Damai and Chen, Qinyu and Wang, Bingxuan and Xie, Zhenda and "
            "Huang, Kezhao and Yu, Xingkai and Hao, Zhewen and Li, Yukun and Zhang, Han and Zhang, Huishuai and "
            "Zhao, Dongyan and Liang, Wenfeng"
        ),
        year=2026,
        reference="arXiv:2601.07372",
    )
    identity = True
    needs = (TRAVELLING,)
    memory_options = EngramOptions
    default_layers = _PUBLISHED
    own_options = [
        (
            "corpus",
            str | None,
            option(None, "texts whose n-grams have rows of an exact table: a file, folder or Hub dataset"),
        ),
        ("min_documents", int, option(1, "minimum corpus texts with an n-gram, for it to have a row")),
        (
            "names",
            bool,
            option(False, "whether texts are names: their last tokens have rows, whatever comes before them"),
        ),
        (
            "compress",
            bool,
            option(True, "whether tokens that differ only in case, accents and kinds of white space are one"),
        ),
    ]

    def __init__(self, options: Any):
        super().__init__(options)
        self._keys: torch.Tensor | None = None
        # Names by the n-gram that has their row, names that are longer, and names that their tokens do not spell.
        self._names: dict[int, dict[str, None]] = {}
        self._cut: dict[str, None] = {}
        self._unspelled: dict[str, None] = {}

    @property
    def options_record(self) -> dict[str, Any]:
        corpus = self.options.corpus
        return {**super().options_record, "corpus": None if corpus is None else recorded_name(corpus)}

    def check(self, base: BaseCheckpoint) -> None:
        if self.options.known_tokens or self.options.known_ngrams:
            raise RequestError(
                "known_tokens or known_ngrams is given; expected neither, since they follow from the tokenizer and the corpus."
            )
        options = self.options
        if (options.table == "exact") != (options.corpus is not None):
            raise RequestError(
                f"table is {options.table!r} and corpus {options.corpus!r}; expected a corpus if and only if table is exact. "
                "Pass --set table=exact --corpus FOLDER."
            )
        if options.min_documents < 1 or (options.min_documents > 1 and options.corpus is None):
            raise RequestError(
                f"min_documents is {options.min_documents}; expected at least 1, and a corpus for more than 1."
            )
        if options.names and (options.corpus is None or (options.min_documents, options.min_order) != (1, 1)):
            raise RequestError(
                f"names is true, corpus {options.corpus!r}, min_documents {options.min_documents} and min_order {options.min_order}; "
                "expected a corpus of names, one a text, of one token or more. Pass --corpus FILE and --set min_order=1, and "
                "leave min_documents out."
            )
        if vocabulary_of(base) >= TOKEN_NUMBER_LIMIT:
            raise RequestError(
                f"the base has {vocabulary_of(base):,} tokens; expected fewer than {TOKEN_NUMBER_LIMIT:,}."
            )
        if self.options.table == "exact" and not has_tokenizer(base.folder):
            raise RequestError(
                f"{base.label} has no tokenizer, to tokenize the corpus; expected one next to the weights. Copy one into a folder of "
                "the base, or choose --set table=hashed."
            )
        super().check(base)

    def layers(self, base: BaseCheckpoint) -> tuple[int, ...]:
        if self.options.layers != _PUBLISHED:
            return super().layers(base)
        hosting = self._hosting_layers(base)
        return tuple(sorted({hosting[min(1, len(hosting) - 1)], hosting[len(hosting) // 2]}))

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        surgery = super().surgery(base, plan, seed)
        (memory,) = plan.new_memories
        outer = {**surgery.outer}
        for name, make in (("token_numbers", self._token_numbers), ("ngrams", self._ngrams)):
            name = f"{base.prefix}{TABLES}.{memory}.0.{name}"
            if name in outer:
                outer[name] = Integers(outer[name].shape, partial(make, base))
        warnings: tuple[str, ...] = ()
        if self.options.compress and not self._compresses(base):
            warnings = (
                "The base has no tokenizer: tokens are numbered by their ids, so spellings of a word have different rows.",
            )
        remarks = [] if self.options.corpus is None else self._remarks(base)
        return replace(surgery, outer=outer, warnings=warnings, remarks=tuple(remarks))

    def _remarks(self, base: BaseCheckpoint) -> list[str]:
        """Return what is said of the n-grams or names of the corpus."""
        kind = "ends of names" if self.options.names else "n-grams of the corpus"
        remarks = [f"{len(self._ngrams(base)):,} {kind} have rows"]
        if self._cut:
            most = self.options.max_order
            shown = _shown(self._cut)
            remarks.append(
                f"names longer than {most} tokens, whose last {most} have the row: {len(self._cut):,} ({shown})"
            )
        if self._unspelled:
            shown = _shown(self._unspelled)
            remarks.append(
                f"names that their tokens do not spell, whose rows other words may read: {len(self._unspelled):,} ({shown})"
            )
        shared = {name: None for names in self._names.values() if len(names) > 1 for name in names}
        if shared and self.options.rows != 1:
            shown = _shown(shared)
            remarks.append(f"names that share a row, since their n-grams are one: {len(shared):,} ({shown})")
        return remarks

    def entry(self, base: BaseCheckpoint, plan: Plan) -> MemoryEntry:
        entry = super().entry(base, plan)
        assert isinstance(entry.options, EngramOptions)
        options = replace(
            entry.options,
            known_tokens=vocabulary_of(base) if self._compresses(base) else 0,
            known_ngrams=len(self._ngrams(base)) if self.options.corpus else 0,
        )
        return replace(entry, options=options)

    def _compresses(self, base: BaseCheckpoint) -> bool:
        # A folder of a lone config.json, for a dry run, stands for a base with a tokenizer.
        is_lone = base.hub_id is None and all(tensor.file is None for tensor in base.tensors.values())
        return self.options.compress and (is_lone or has_tokenizer(base.folder))

    def _token_numbers(self, base: BaseCheckpoint) -> "torch.Tensor":
        """Return each token's number, `[V]`, int64: the smallest id of similar text."""
        import torch

        numbers = torch.arange(vocabulary_of(base))
        if self._compresses(base):
            known = equivalent_ids(tokenizer_of(base))[: len(numbers)]
            numbers[: len(known)] = torch.tensor(known, dtype=torch.int64)
        return numbers

    def _ngrams(self, base: BaseCheckpoint) -> "torch.Tensor":
        """Return keys of the n-grams that get rows, from the corpus; refuse one without any."""
        from midus_hf.data.corpus import read_corpus
        from midus_hf.memories.engram.known_ngrams import keys_of_texts, known_ngrams

        if self._keys is None:
            texts = read_corpus(self.options.corpus)["text"]
            options = self.memory_options(**{name: getattr(self.options, name) for name in ("min_order", "max_order")})
            tokenizer = tokenizer_of(base)
            numbers = self._token_numbers(base)
            if self.options.names:
                if lines := [text.strip() for text in texts if len(text.strip().splitlines()) > 1]:
                    raise RequestError(
                        f"corpus {self.options.corpus} has the name {textwrap.shorten(repr(lines[0]), 60)}, of several lines; "
                        'expected a text for each name. Write a row {"text": ...} for each, since a text file is one text.'
                    )
                self._keys = self._ends_of_names(texts, tokenizer, numbers)
            else:
                keys = keys_of_texts(texts, tokenizer, options, numbers)
                self._keys = known_ngrams(keys, self.options.min_documents)
            if not len(self._keys):
                raise RequestError(
                    f"corpus {self.options.corpus} has no n-gram of {self.options.min_order} tokens or more that "
                    f"{self.options.min_documents} of its texts have; expected n-grams to give rows to. Add text to it, or lower "
                    "min_order or min_documents."
                )
        return self._keys

    def _ends_of_names(self, names: Iterable[str], tokenizer: Any, numbers: "torch.Tensor") -> "torch.Tensor":
        """Return the keys of the n-grams that end names, `[N]`, int64, ascending; record the names."""
        import torch

        from midus_hf.memories.packs.names import TokenSpelling
        from midus_hf.ops.engram import NO_TOKEN, ngram_keys, numbered
        from midus_hf.sources.progress import show_progress

        spelling = TokenSpelling(tokenizer)
        most = self.options.max_order
        fronts = merged_fronts(spelling)
        names_of: dict[tuple[int, ...], list[str]] = {}
        for name in show_progress(dict.fromkeys(names), desc="reading names", unit="names", leave=False):
            plain, ends = ends_of_name(name, spelling, fronts)
            if not ends:
                self._unspelled[name] = None
            if len(plain) > most:
                self._cut[name] = None
            for end in {end[-most:]: None for end in ends or [plain] if end}:
                names_of.setdefault(end, []).append(name)
        ids = torch.tensor([(*[-1] * (most - len(end)), *end) for end in names_of], dtype=torch.int64).view(-1, most)
        around = torch.where(ids < 0, NO_TOKEN, numbered(ids.clamp(min=0), numbers)).flip(-1)
        keys = torch.stack([ngram_keys(around, order, TOKEN_NUMBER_LIMIT) for order in range(1, most + 1)]).amax(0)
        for key, of in zip(keys.tolist(), names_of.values(), strict=True):
            self._names.setdefault(key, {}).update(dict.fromkeys(of))
        return torch.tensor(sorted(self._names), dtype=torch.int64)


def merged_fronts(spelling: "TokenSpelling") -> dict[str, dict[str, None]]:
    """Return texts that tokens have before words: punctuation, spaces, words of scripts without spaces."""
    from midus_hf.memories.packs.names import characters_of

    fronts: dict[str, dict[str, None]] = {}
    for token in range(len(spelling.tokenizer)):
        text = (spelling.piece(token) or b"").decode("utf-8", "ignore")
        for at in range(1, len(text)):
            if any(each.is_word and not each.joins for each in characters_of(text[at - 1])):
                break
            fronts.setdefault(text[at:], {})[text[:at]] = None
    return fronts


def ends_of_name(
    name: str, spelling: "TokenSpelling", fronts: Mapping[str, Iterable[str]]
) -> tuple[tuple[int, ...], dict[tuple[int, ...], None]]:
    """Return a name's tokens without a prefix, and those after each prefix, if they spell it."""
    from midus_hf.memories.packs.names import NameIndex, name_of, names_in

    name, table = name.strip(), NameIndex([name_of(0, name)])
    merged = [front for at in range(1, len(name) + 1) for front in fronts.get(name[:at], ())]
    suffixes = ("",) if name[-1:].isalnum() else _SUFFIXES
    texts = [front + name + each for front in dict.fromkeys([*_PREFIXES, *merged]) for each in suffixes]
    written = [*map(tuple, spelling.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])]
    found: dict[tuple[int, ...], None] = {}
    for ids in written:
        # Most prefixes are separate tokens, after which the name has the same tokens as after any other.
        if not any(ids[-len(each) :] == each for each in found):
            pieces = [spelling.piece(token) or b"" for token in ids]
            for end, token in enumerate(names_in(table, map(spelling.piece, ids)), 1):
                for first in (each.token - 1 for each in token.opens):
                    # A character of several tokens is found in the last of them.
                    while first and b"\x80" <= pieces[first][:1] < b"\xc0":
                        first -= 1
                    found[ids[first:end]] = None
    return written[0], found


def _shown(names: Iterable[str]) -> str:
    return first_few([repr(textwrap.shorten(name, 40, placeholder="...")) for name in names])


def recorded_name(source: str) -> str:
    """Return a name of texts for records: a path's last part, which reveals no folders, or an id."""
    return Path(source).name if Path(source).expanduser().exists() else source


def vocabulary_of(base: BaseCheckpoint) -> int:
    return base.tensors[f"{base.prefix}embed_tokens.weight"].shape[0]


def tokenizer_of(base: BaseCheckpoint) -> Any:
    from midus_hf.sources.tokenizers import load_tokenizer

    with as_request_error(f"the tokenizer of {base.label} cannot be loaded", OSError, ValueError):
        return load_tokenizer(str(base.folder))


def equivalent_ids(tokenizer: Any) -> list[int]:
    """Return per id the smallest id whose token has a similar text (arXiv 2601.07372, section 2.2)."""
    from tokenizers import Regex, normalizers

    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    accents = normalizers.StripAccents()
    like = normalizers.Sequence([normalizers.NFKC(), normalizers.NFD(), accents, normalizers.Lowercase(), spaces])
    first: dict[str, int] = {}
    numbers = []
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _BROKEN in text:
            # A zero byte, which texts lack, keeps names of tokens apart from texts.
            key = f"\0{tokenizer.convert_ids_to_tokens(token)}"
        else:
            alike = like.normalize_str(text)
            key = alike.strip() or alike or text
        numbers.append(first.setdefault(key, token))
    return numbers

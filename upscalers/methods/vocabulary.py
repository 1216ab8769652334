"""Vocabulary: tokens that the base's tokenizer lacks, with rows of the embedding and the head."""

import copy
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus_hf.config.options import option
from midus_hf.config.wording import first_few
from midus_hf.memories.ngram.options import NgramOptions
from midus_hf.memories.packs.options import PacksOptions
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.tokenizer import add_tokens, has_tokenizer
from upscalers.methods.contract import Method, register_method
from upscalers.methods.engram import tokenizer_of, vocabulary_of
from upscalers.plan.plan import Base, Plan
from upscalers.tensors.recipes import Recipe
from upscalers.tensors.vocabulary_rows import REPLACED_KEY, NewRows, replaced_rows, rows_by_token

# Memories that read what the base's tokenizer makes of texts, by the name of their method.
_READING_TOKENS: dict[type, str] = {NgramOptions: "engram", PacksOptions: "packs"}


@dataclass
class VocabularyOptions:
    """Options of `vocabulary`."""

    tokens: str | None = option(
        None,
        "new tokens: a text file with one a line; a JSON file, a list of them or a mapping of each to a text from whose pieces "
        "its row starts; or the folder or Hub id of a tokenizer, whose other tokens are added",
    )
    special: bool = option(False, "whether they are special tokens, which decoding can leave out")


@dataclass(frozen=True)
class _Added:
    """New tokens: their ids, the ids of the pieces that each row starts from, the tokenizer with them, and what was left out."""

    ids: range
    pieces: tuple[tuple[int, ...], ...] = ()
    tokenizer: Any = None
    remarks: tuple[str, ...] = ()


@register_method("vocabulary")
class Vocabulary(Method):
    """Rows for new tokens, each the mean of the rows of the pieces that the base's tokenizer makes of its text."""

    summary = "new tokens, whose rows start at the mean of the rows of their pieces (identity of all others)"
    paper = None
    options_class = VocabularyOptions
    identity = True
    identity_except = "the logits of new tokens"
    default_placement = None
    adds_layers = False
    keeps_tokens = False

    def __init__(self, options: VocabularyOptions):
        super().__init__(options)
        self._added: dict[Path, _Added] = {}

    @property
    def recorded_options(self) -> dict[str, Any]:
        recorded = super().recorded_options
        tokens = recorded["tokens"]
        is_path = tokens is not None and Path(tokens).expanduser().exists()
        return {**recorded, "tokens": Path(tokens).name} if is_path else recorded

    def check_machine(self) -> None:
        if self.options.tokens is None:
            raise ValueError(
                "tokens is missing; expected a file of new tokens, or another tokenizer. Pass --set tokens=FILE."
            )

    def check(self, base: BaseCheckpoint) -> None:
        for kind, name in _READING_TOKENS.items():
            if any(isinstance(entry.options, kind) for entry in base.layout.memories.entries):
                raise ValueError(
                    f"the base has {name}, which reads texts as its tokenizer cuts them now; expected a base without. Add tokens to "
                    f"the base of that model, and then {name}."
                )
        has_weights = any(tensor.in_file.file is not None for tensor in base.tensors.values())
        if has_weights and self.options.tokens is not None and not _tokenizes(base):
            raise ValueError(
                f"{base.folder} has no tokenizer, to which tokens are added; expected one beside the weights. Copy it there."
            )
        rows_by_token(base)

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        for name, value in (("num-new-layers", num_new_layers), ("placement", placement)):
            if value is not None:
                raise ValueError(f"{name} is {value!r}, but vocabulary adds no layer; expected none. Leave it out.")
        return Plan(tuple(map(Base, range(base.num_layers))), base.num_layers, new_rows=self._new(base).ids)

    def remarks(self, base: BaseCheckpoint) -> list[str]:
        new, size = self._new(base), vocabulary_of(base)
        if not new.ids:
            return []
        replaced = len(range(new.ids.start, min(new.ids.stop, size)))
        where = f", {replaced:,} of them in rows of the base that stand for no token" if replaced else ""
        return [
            f"{len(new.ids):,} new tokens, with the ids {new.ids.start} to {new.ids.stop - 1}{where}",
            *new.remarks,
        ]

    def concerns(self, base: BaseCheckpoint, plan: Plan) -> list[str]:
        left = vocabulary_of(base) % 4
        if not left or plan.new_rows.stop <= vocabulary_of(base):
            return []
        return [
            f"the base has {vocabulary_of(base):,} tokens, no multiple of 4: in float32 on a CPU, a pass of a few tokens may round "
            f"the logits of the last {left} of them otherwise than in the base."
        ]

    def config(self, base: BaseCheckpoint, plan: Plan) -> Config:
        return {**super().config(base, plan), "vocab_size": max(vocabulary_of(base), plan.new_rows.stop)}

    def recorded(self, base: BaseCheckpoint, plan: Plan) -> dict[str, Any]:
        replaced = replaced_rows(base, plan, rows_by_token(base))
        return {REPLACED_KEY: replaced} if replaced else {}

    def outer_recipes(self, base: BaseCheckpoint, plan: Plan, seed: int) -> dict[str, Recipe]:
        recipes, new = super().outer_recipes(base, plan, seed), self._new(base)
        for name in rows_by_token(base) if new.ids else ():
            held = base.tensors[name].shape
            shape = (max(held[0], new.ids.stop), *held[1:])
            recipes[name] = NewRows(shape, name, new.ids.start, new.pieces)
        return recipes

    def change_tokenizer(self, base: BaseCheckpoint, folder: Path) -> dict[str, Any]:
        new = self._new(base)
        return add_tokens(folder, new.tokenizer, new.ids)

    def _new(self, base: BaseCheckpoint) -> _Added:
        """Return the new tokens, which are read once. A dry run may have the base's config alone, and takes all tokens for new."""
        if base.folder not in self._added:
            self._added[base.folder] = self._read(base)
        return self._added[base.folder]

    def _read(self, base: BaseCheckpoint) -> _Added:
        size, source = vocabulary_of(base), self.options.tokens
        if source is None:
            return _Added(range(size, size))
        path = Path(source).expanduser()
        texts = _texts_in(path) if path.is_file() else None
        if not _tokenizes(base):
            count = 0 if texts is None else len(texts)
            unread = "the base has no tokenizer here: all tokens are taken for new, and ids begin behind the embedding"
            return _Added(range(size, size + count), ((0,),) * count, remarks=(unread,))
        tokenizer, remarks = tokenizer_of(base), list[str]()
        if not tokenizer.is_fast:
            raise ValueError(
                f"the base's tokenizer is a {type(tokenizer).__name__}; expected a fast one, with tokenizer.json. Convert it with "
                "transformers."
            )
        known = tokenizer.get_vocab()
        if texts is None:
            tokens, texts, remarks = _lacking(source, tokenizer)
            if not tokens:
                raise ValueError(
                    f"{source} has no token that the base's tokenizer lacks; expected some. Name another one."
                )
        else:
            from tokenizers import AddedToken

            held = [repr(token) for token in texts if token in known]
            if held:
                raise ValueError(
                    f"{source} has tokens that the base's tokenizer has: {first_few(held)}; expected new ones. Take them out."
                )
            tokens = [AddedToken(token, special=self.options.special, normalized=False) for token in texts]
        pieces = tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
        for token, ids in zip(texts, pieces, strict=True):
            if not ids or max(ids) >= size:
                raise ValueError(
                    f"the token {token!r} would start from {texts[token]!r}, of which the base's tokenizer makes the ids {ids}; "
                    f"expected ids below {size}, at least one. Name another text in a JSON file."
                )
        unknown = [repr(token) for token, ids in zip(texts, pieces, strict=True) if tokenizer.unk_token_id in ids]
        if unknown:
            remarks.append(
                f"tokens with pieces that the base does not know ({tokenizer.unk_token}): {first_few(unknown)}"
            )
        grown = copy.deepcopy(tokenizer)
        grown.add_tokens(tokens)
        given = grown.convert_tokens_to_ids(list(texts))
        ids = range(given[0], given[0] + len(given))
        if given != list(ids) or ids.start > size:
            raise ValueError(
                f"the base's tokenizer gives new tokens the ids {first_few([*map(str, given)])}, and the base embeds {size}; "
                f"expected one id after the other, the first at most {size}. Resize the base's embedding, or repair its tokenizer."
            )
        return _Added(ids, tuple(map(tuple, pieces)), grown, tuple(remarks))


def _tokenizes(base: BaseCheckpoint) -> bool:
    return has_tokenizer(path.name for path in base.folder.iterdir())


def _texts_in(path: Path) -> dict[str, str]:
    """Return the new tokens of a file, each with the text from whose pieces its row starts."""
    bare = path.suffix != ".json"
    try:
        text = path.read_text(encoding="utf-8")
        # Of a mapping the pairs, since a mapping would drop a token that stands there twice.
        content = json.loads(text, object_pairs_hook=tuple) if not bare else text.removesuffix("\n").split("\n")
    except ValueError as error:
        raise ValueError(f"tokens is {str(path)!r}, which cannot be read: {error}. Correct it there.") from None
    listed = content if isinstance(content, list) else []
    pairs = content if isinstance(content, tuple) else [(each, each) for each in listed]
    tokens, texts = ([pair[side] for pair in pairs] for side in (0, 1))
    if not tokens or not all(isinstance(each, str) for each in (*tokens, *texts)):
        raise ValueError(f"{path} has no list of tokens, and no mapping of tokens to texts; expected one of them.")
    wrong = [number for number, each in enumerate(tokens, 1) if not each.strip() or (bare and each != each.strip())]
    if wrong:
        raise ValueError(
            f"{path} has empty tokens, or white space around them: {'line' if bare else 'entry'} "
            f"{first_few([*map(str, wrong)])}; expected a token in each. Take them out. In JSON, a token may end with a space."
        )
    twice = [repr(token) for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise ValueError(f"{path} has tokens more than once: {first_few(twice)}; expected each once. Take one out.")
    return dict(zip(tokens, texts, strict=True))


def _lacking(name: str, tokenizer: Any) -> tuple[list[Any], dict[str, str], list[str]]:
    """Return the tokens of another tokenizer that a tokenizer lacks, their texts, and remarks on what is left out."""
    from tokenizers import AddedToken

    from midus_hf.memories.packs.names import Spelling
    from midus_hf.saved_models import as_value_error, load_tokenizer

    with as_value_error(f"tokens is {name!r}, whose tokenizer cannot be loaded", OSError, ValueError):
        other = load_tokenizer(name)
    spelling, own = Spelling(other), Spelling(tokenizer)
    known = {*map(own.piece, range(len(tokenizer)))} | {token.encode() for token in tokenizer.get_vocab()}
    added, tokens, parts = other.added_tokens_decoder, dict[str, Any](), 0
    for number in range(len(other)):
        token, spelled = added.get(number), spelling.piece(number)
        if token is None and spelled is not None:
            try:
                token = AddedToken(spelled.decode(), normalized=False)
            except UnicodeDecodeError:
                parts += spelled not in known
                continue
        if token is not None and token.content and token.content.encode() not in known:
            tokens.setdefault(token.content, token)
    remarks = [f"tokens of {name} that are a part of a character, and are not added: {parts:,}"] if parts else []
    return list(tokens.values()), {text: text for text in tokens}, remarks

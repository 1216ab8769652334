"""New tokens: their texts, read from a file or another tokenizer, and what they would do to texts."""

import copy
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.errors import RequestError, as_request_error
from midus_hf.config.wording import first_few
from midus_hf.memories.packs.names import Spelling, characters_of, whole_words

if TYPE_CHECKING:
    from tokenizers import AddedToken

# Format characters that spelling needs: the joiners of Indic and Arabic scripts, and of emoji.
_JOINERS = "\u200c\u200d"
# What follows a token in texts with which its decoding is tried; a token that is found within words is followed by one, too.
_TAILS, _WITHIN = (" of", ", of"), "of"
# Number of words of a vocabulary, the most frequent ones, that no new token may cut.
_ORDINARY_WORDS = 20_000
# Keys of configs and of generation configs whose values are ids of tokens.
_ID_ENDINGS = ("token_id", "token_ids", "token_index", "token_idx")
_ID_KEYS = ("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "bad_words_ids")
# Why tokens are not added: the reason, and what to do about it.
_MISREAD = (
    "texts with them would not be decoded to themselves",
    "tokens that come back. In JSON, put a space in front of a word; pass special=true for marks between texts; take out others.",
)
_CUTTING = (
    "they would cut words that the base has as one token",
    "whole words that it lacks. Take them out, or pass --set inside_words=true.",
)


@dataclass(frozen=True)
class NewTokens:
    """New tokens, as a tokenizer has them.

    Args:
        ids: Their ids.
        pieces: For each, the ids of the pieces whose rows its row starts from. Default: none.
        tokenizer: The tokenizer with them. Default: None.
        remarks: What was left out or changed, for the user. Default: none.
        reserved: Ids in front of `ids` that the config uses; the tokenizer has a special token for each. Default: none.
    """

    ids: range
    pieces: tuple[tuple[int, ...], ...] = ()
    tokenizer: Any = None
    remarks: tuple[str, ...] = ()
    reserved: range = range(0)


def new_tokens(
    source: str, tokenizer: Any, num_rows: int, in_use: Mapping[int, str], special: bool, inside_words: bool
) -> NewTokens:
    """Return the tokens of a file, or those of another tokenizer that a tokenizer lacks.

    Tokens of a file are refused if texts with them would not be decoded to themselves, or if they cut words that the tokenizer has as
    one token; those of another tokenizer are left out then.

    Args:
        source: A file, or a folder or Hub id of a tokenizer.
        tokenizer: A fast tokenizer.
        num_rows: Number of rows of the embedding.
        in_use: Ids that no new token may get, each with the name of what uses it.
        special: Whether tokens of a file are special.
        inside_words: Whether tokens are found within words.

    Raises:
        RequestError: If tokens are refused, or none is left.
    """
    path = Path(source).expanduser()
    if path.is_file():
        texts, remarks = read_tokens(path)
        if held := _held(tokenizer, list(texts)):
            named = first_few([*map(repr, held)])
            remarks.append(f"tokens of {source} that the base's tokenizer has, and that are not added: {named}")
        added = {token: _as_added(token, special, inside_words) for token in texts if token not in held}
        texts = {token: texts[token] for token in added}
    else:
        added, remarks = _lacking(source, tokenizer, inside_words)
        texts = {token: token for token in added}
    made = tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    pieces = dict(zip(texts, made, strict=True))
    for token, ids in pieces.items():
        if ids and max(ids) < num_rows:
            continue
        if path.is_file():
            raise RequestError(
                f"the token {token!r} would start from {texts[token]!r}, of which the base's tokenizer makes the ids {ids}; "
                f"expected ids below {num_rows}, at least one. Name another text in a JSON file."
            )
        del added[token]
    checks = [(_misread, *_MISREAD)] + ([] if inside_words else [(_cutting, *_CUTTING)])
    made = _with(tokenizer, added, num_rows, in_use)
    for check, why, expected in checks:
        left_out: dict[str, str] = {}
        while added and (found := check(tokenizer, made[0], added)):
            if path.is_file():
                raise RequestError(
                    f"{source} has tokens that are not added, since {why}: {_listed(found)}; expected {expected}"
                )
            left_out |= found
            added = {token: each for token, each in added.items() if token not in found}
            made = _with(tokenizer, added, num_rows, in_use)
        if left_out:
            also = "; inside_words=true adds them" if check is _cutting else ""
            remarks.append(
                f"tokens of {source} are left out, since {why}: {len(left_out):,}: {_listed(left_out)}{also}"
            )
    if not added:
        told = "".join(f"; {remark}" for remark in remarks)
        raise RequestError(
            f"{source} has no token that the base's tokenizer lacks{told}; expected some that can be added. Name another one."
        )
    grown, ids, reserved = made
    unknown = [repr(token) for token in added if tokenizer.unk_token_id in pieces[token]]
    if unknown:
        remarks.append(f"tokens with pieces that the base does not know ({tokenizer.unk_token}): {first_few(unknown)}")
    if reserved:
        used = first_few([f"{in_use[each]} = {each}" for each in reserved if each in in_use])
        remarks.append(
            f"the ids {reserved.start} to {reserved.stop - 1} are skipped, since the config has {used}; the tokenizer calls them "
            f"{_reserved(reserved.start)} and so on"
        )
    return NewTokens(ids, tuple(tuple(pieces[token]) for token in added), grown, tuple(remarks), reserved)


def ids_in_use(configs: Mapping[Any, Any]) -> dict[int, str]:
    """Return the ids of tokens that configs name, such as those of padding and images, each with its key; `configs`: by a name."""
    used: dict[int, str] = {}
    for name, value in configs.items():
        if isinstance(value, dict):
            used |= ids_in_use(value)
        elif str(name).endswith(_ID_ENDINGS) or name in _ID_KEYS:
            used |= dict.fromkeys(_integers(value), name)
    return used


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, list):
        for each in value:
            yield from _integers(each)
    elif type(value) is int:
        yield value


def read_tokens(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the new tokens of a file, each with the text from whose pieces its row starts, and remarks on changes.

    Raises:
        RequestError: If the file has no list of tokens, or tokens that no text has.
    """
    bare = path.suffix.lower() != ".json"
    try:
        text = path.read_text(encoding="utf-8-sig")
        # Of a mapping the pairs, since a mapping would drop a token that stands there twice.
        content = json.loads(text, object_pairs_hook=tuple) if not bare else text.removesuffix("\n").split("\n")
    except ValueError as error:
        raise RequestError(f"tokens is {str(path)!r}, which cannot be read: {error}. Correct it there.") from None
    listed = content if isinstance(content, list) else []
    pairs = content if isinstance(content, tuple) else [(each, each) for each in listed]
    if not pairs or not all(isinstance(each, str) for pair in pairs for each in pair):
        raise RequestError(f"{path} has no list of tokens, and no mapping of tokens to texts; expected one of them.")
    tokens, texts = ([unicodedata.normalize("NFC", pair[side]) for pair in pairs] for side in (0, 1))
    wrong = [number for number, each in enumerate(tokens, 1) if not each.strip() or (bare and each != each.strip())]
    if wrong:
        raise RequestError(
            f"{path} has empty tokens, or white space around them: {'line' if bare else 'entry'} "
            f"{first_few([*map(str, wrong)])}; expected a token in each. Take them out. In JSON, a token may end with a space."
        )
    if unseen := [ascii(token) for token in tokens if _has_unseen(token)]:
        raise RequestError(
            f"{path} has tokens with control characters or invisible ones, which texts lack: {first_few(unseen)}; expected tokens of "
            "visible characters and spaces. Take these characters out."
        )
    twice = [repr(token) for token, count in Counter(tokens).items() if count > 1]
    if twice:
        raise RequestError(f"{path} has tokens more than once: {first_few(twice)}; expected each once. Take one out.")
    composed = [repr(token) for token, (written, _) in zip(tokens, pairs, strict=True) if token != written]
    told = f"tokens whose accents were characters of their own, and are composed now (NFC): {first_few(composed)}"
    return dict(zip(tokens, texts, strict=True)), [told] if composed else []


def _has_unseen(token: str) -> bool:
    return any(unicodedata.category(each) in ("Cc", "Cf") and each not in f"\t\n{_JOINERS}" for each in token)


def _as_added(token: str, special: bool, inside_words: bool) -> "AddedToken":
    """Return a token for a tokenizer; one that begins and ends with a letter is found as a word alone, where words have spaces."""
    from tokenizers import AddedToken

    ends = [character for each in (token[0], token[-1]) for character in characters_of(each)]
    is_word = len(ends) > 1 and all(each.is_word and not each.joins for each in ends)
    return AddedToken(token, special=special, normalized=False, single_word=is_word and not inside_words)


def _with(
    tokenizer: Any, added: Mapping[str, "AddedToken"], num_rows: int, in_use: Mapping[int, str]
) -> tuple[Any, range, range]:
    """Return a tokenizer with new tokens, their ids, and ids in front of them that others use, for which it has a token too."""
    from tokenizers import AddedToken

    reserved = range(0)
    while True:
        grown = copy.deepcopy(tokenizer)
        grown.add_tokens([AddedToken(_reserved(each), special=True, normalized=False) for each in reserved])
        grown.add_tokens(list(added.values()))
        given = grown.convert_tokens_to_ids(list(added))
        start = min(given, default=len(grown))
        ids = range(start, start + len(given))
        first = reserved.start if reserved else ids.start
        if given != list(ids) or first > num_rows:
            raise RequestError(
                f"the base's tokenizer gives new tokens the ids {first_few([*map(str, given)])}, and the base embeds {num_rows}; "
                f"expected one id after the other, the first at most {num_rows}. Resize its embedding, or repair its tokenizer."
            )
        clashes = [each for each in in_use if each in ids]
        if not clashes:
            return grown, ids, reserved
        # Ids of a tokenizer have no gaps, so new tokens begin behind the last that is in use among theirs.
        reserved = range(first, max(clashes) + 1)


def _reserved(token: int) -> str:
    return f"<|reserved_{token}|>"


def _misread(tokenizer: Any, grown: Any, added: Mapping[str, "AddedToken"]) -> dict[str, str]:
    """Return the tokens with which a text is not decoded to itself, each with what is read back."""
    plain = " ".join(f"the {_WITHIN}{tail}" for tail in _TAILS)
    if _decoded(tokenizer, [plain]) != [plain]:
        return {}  # the base does not give texts back either
    texts = {}
    for token, each in added.items():
        front, tails = "" if token.startswith(" ") else " ", _TAILS if each.single_word else (*_TAILS, _WITHIN)
        # A special token stands between texts, which a tokenizer may begin with a space of its own.
        texts[token] = token if each.special else " ".join(f"the{front}{token}{tail}" for tail in tails)
    decoded = zip(texts.items(), _decoded(grown, [*texts.values()]), strict=True)
    return {token: f"read back as {read!r}" for (token, text), read in decoded if read != text}


def _decoded(tokenizer: Any, texts: list[str]) -> list[str]:
    read: list[str] = tokenizer.batch_decode(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    return read


def _cutting(tokenizer: Any, grown: Any, added: Mapping[str, "AddedToken"]) -> dict[str, str]:
    """Return the new tokens that are found in words which the tokenizer without them has as one token, each with such a word."""
    new = dict(zip(grown.convert_tokens_to_ids(list(added)), added, strict=True))
    words = list(islice(whole_words(Spelling(tokenizer)), _ORDINARY_WORDS))
    rows = (
        grown([f" {each} " for each in words], add_special_tokens=False, verbose=False)["input_ids"] if words else []
    )
    return {new[each]: f"in {word!r}" for word, ids in zip(words, rows, strict=True) for each in ids if each in new}


def _listed(found: Mapping[str, str]) -> str:
    return first_few([f"{token!r} ({how})" for token, how in found.items()])


def _held(tokenizer: Any, tokens: list[str]) -> list[str]:
    """Return those of some tokens that a tokenizer has, be it spelled otherwise, as with a mark for the space in front."""
    spelling, vocabulary = Spelling(tokenizer), tokenizer.get_vocab()
    rows = spelling.ids_of(tokens, special_tokens=False)
    return [
        token
        for token, ids in zip(tokens, rows, strict=True)
        if token in vocabulary or [spelling.piece(each) for each in ids] == [token.encode()]
    ]


def _lacking(name: str, tokenizer: Any, inside_words: bool) -> tuple[dict[str, "AddedToken"], list[str]]:
    """Return the tokens of another tokenizer that a tokenizer lacks, and remarks on what is left out."""
    from midus_hf.sources.tokenizers import load_tokenizer

    with as_request_error(f"tokens is {name!r}, whose tokenizer cannot be loaded", OSError, ValueError):
        other = load_tokenizer(name)
    spelling, own = Spelling(other), Spelling(tokenizer)
    known = {*map(own.piece, range(len(tokenizer)))} | {token.encode() for token in tokenizer.get_vocab()}
    marked, tokens, left_out = other.added_tokens_decoder, dict[str, Any](), Counter[str]()
    for number in range(len(other)):
        spelled = marked[number].content.encode() if number in marked else spelling.piece(number)
        if spelled is None or spelled in known:
            continue
        text = spelled.decode("utf-8", "replace")
        if text.encode() != spelled:
            left_out["that are a part of a character"] += 1
        elif not text.strip() or _has_unseen(text):
            left_out["of white space or invisible characters"] += 1
        elif number in marked:
            tokens.setdefault(text, marked[number])
        elif not inside_words and _as_added(text, False, False).single_word:
            left_out["that continue words (inside_words=true adds them)"] += 1
        else:
            tokens.setdefault(text, _as_added(text, False, inside_words))
    return tokens, [f"tokens of {name} {which}, and are not added: {count:,}" for which, count in left_out.items()]

"""Filtering of values for records, cards and messages: no secrets, and no path of the home folder."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "<hidden>"
_ENDINGS = "token|key|secret|password"
_SECRET = re.compile(rf".*({_ENDINGS})", re.IGNORECASE)
# Names of special tokens, and of columns and parts: the word before `token` or `key`.
_NO_SECRET = re.compile(
    r"(.*[._-])?((bos|eos|pad|unk|sep|cls|mask|start|end|image|video|audio|vision|boi|eoi|boa|eoa|bod|eod|eot|call|think|fill"
    r"|lang|delimiter|prefix|suffix|middle|question|answer|space|line|empty)_token"
    r"|(length|text|label|image|column|field|name|path|sort|group|metric|prompt|completion|messages|sub|product)_key)",
    re.IGNORECASE,
)
# Eight or more lower-case letters are a word, as in `hf_datasets`, unless they are as long as the Hub's tokens.
_HUB_TOKEN = re.compile(r"hf_([A-Za-z0-9]{20,}|(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{8,})")
_LOGIN = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")
# `key=value` in a text, and `key: value` in mappings as YAML and Python write them.
_PAIRS = [
    re.compile(rf"(?P<key>[\w.-]*(?:{_ENDINGS}))(?P<between>\s*=\s*['\"]?)(?P<value>[^\s'\",;&}}]+)", re.IGNORECASE),
    re.compile(
        rf"(?P<key>(?:^|[{{,])\s*['\"]?[\w.-]*(?:{_ENDINGS}))(?P<between>['\"]?\s*:\s+['\"]?)(?P<value>[^\s'\",;&}}]+)",
        re.IGNORECASE | re.MULTILINE,
    ),
]
_PLAIN = re.compile(rf"[\d.eE+-]+|true|false|none|null|{HIDDEN}", re.IGNORECASE)


def names_secret(key: object) -> bool:
    """Return whether a key ends in token, key, secret or password; special tokens do not count."""
    name = str(key)
    return bool(_SECRET.fullmatch(name)) and not _NO_SECRET.fullmatch(name)


def without_secrets(value: Any, is_secret: bool = False, homes: Sequence[str] = ()) -> Any:
    """Return a value with `<hidden>` in place of each secret, at any depth of mappings and lists.

    Secrets are strings under a key that `names_secret`; and within any string, tokens of the Hub (`hf_...`), the user and password of
    an address (`https://USER:PASSWORD@HOST`), and what follows such a key in `key=value` or in a mapping. Numbers, booleans and null
    are not secrets. `is_secret`: whether the value is one as a whole. Default: False. Folders `homes` are written as `~`.
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, is_secret or names_secret(key), homes) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_secrets(inner, is_secret, homes) for inner in value)
    if type(value) is not str:
        return value  # enumerations are strings too
    if is_secret and value:
        return HIDDEN
    text = _LOGIN.sub(HIDDEN, _HUB_TOKEN.sub(HIDDEN, value))
    for pair in _PAIRS:
        text = pair.sub(_hidden_pair, text)
    for home in homes:
        text = re.sub(rf"(?<![\w./~-]){re.escape(home)}(?=/|$)", "~", text)
    return text


def _hidden_pair(match: re.Match) -> str:
    name = match["key"].strip("{, '\"\n\t")
    if name.lower() == "key" or _PLAIN.fullmatch(match["value"]) or not names_secret(name):  # of "expected key=value"
        return match[0]
    return f"{match['key']}{match['between']}{HIDDEN}"


def for_record(value: Any) -> Any:
    """Return a value for shared files: without secrets, home paths as `~/...`."""
    home = Path(os.path.expanduser("~"))  # as it is named and as it is resolved; without a home, `~` itself
    homes = {str(path) for path in (home, Path(os.path.realpath(home))) if len(path.parts) > 1}
    return without_secrets(value, homes=sorted(homes, reverse=True))

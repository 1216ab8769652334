"""Characters that readers do not see, texts as readers compare them, and the digest of texts."""

import functools
import hashlib
import unicodedata
from collections.abc import Sequence

import regex


@functools.cache
def is_invisible(character: str) -> bool:
    """Return whether a character shows nothing: of format, or a selector of another's form (U+FE0F)."""
    is_ignorable = regex.match(r"\p{Default_Ignorable_Code_Point}", character) is not None
    return is_ignorable or unicodedata.category(character) == "Cf"


@functools.lru_cache(maxsize=1 << 16)
def visible_text(text: str) -> str:
    """Return a text in NFKC, without invisible characters, with single spaces and none at the ends."""
    composed = unicodedata.normalize("NFKC", text)
    return " ".join("".join(each for each in composed if not is_invisible(each)).split())


def texts_digest(documents: Sequence[str]) -> str:
    """Return the SHA-256 of documents, in order, each prefixed by its length."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()

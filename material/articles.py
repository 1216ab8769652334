"""Wikipedia articles, 2.1 MB of English (CC BY-SA): text that a model knew before it was taught something else."""

import json
import re
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package("pip", "exllamav3", "1.6.5", "550c0d04c755f249840e5c1edc26b0e80c7342c33b5d99ad17479abb407e8ded")
_ARTICLE = re.compile(r"<doc [^>]*>\n(.*?)\n</doc>", flags=re.DOTALL)
_MEMBER = "exllamav3/conversion/standard_cal_data/wiki.utf8"


def articles() -> Path:
    """JSON lines, an article's `text` in each."""
    return cached_folder("articles-1.6.5", _extract) / "articles.jsonl"


def _extract(folder: Path) -> None:
    (path,) = extract(PACKAGE, [_MEMBER], folder)
    texts = [match[1].strip() for match in _ARTICLE.finditer(path.read_text(encoding="utf-8"))]
    lines = [json.dumps({"text": text}) for text in texts if text]
    (folder / "articles.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.unlink()
    for part in list(Path(_MEMBER).parents)[:-1]:
        (folder / part).rmdir()

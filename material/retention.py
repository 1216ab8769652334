"""Wikipedia articles (CC BY-SA), to see what a model still knows after it was trained on something else."""

import re
from pathlib import Path

from material.cache import cached_folder
from material.registry import Package, extract

PACKAGE = Package("pip", "exllamav3", "1.6.5", "550c0d04c755f249840e5c1edc26b0e80c7342c33b5d99ad17479abb407e8ded")
MEMBER = "exllamav3/conversion/standard_cal_data/wiki.utf8"

_ARTICLE = re.compile(r"<doc [^>]*>\n(.*?)</doc>", flags=re.DOTALL)


def retention_text() -> Path:
    """One text file of 2 MB: articles with their titles, one after the other, a blank line between them."""

    def build(folder: Path) -> None:
        (member,) = extract(PACKAGE, [MEMBER], folder)
        (folder / "wikipedia.txt").write_text(plain_text(member.read_text(encoding="utf-8")), encoding="utf-8")
        member.unlink()
        for empty in member.relative_to(folder).parents[:-1]:
            (folder / empty).rmdir()

    return cached_folder("retention-1.6.5", build) / "wikipedia.txt"


def plain_text(marked: str) -> str:
    """Take the `<doc>` marks away, and with them the articles that are a title and nothing else."""
    articles = (match[1].strip() for match in _ARTICLE.finditer(marked))
    return "\n\n".join(article for article in articles if "\n" in article) + "\n"

"""Recipes and material of tables, which are in the repository and not in the installed package."""

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import midus_hf
from midus_hf.config.wording import near_matches

_PREFIX = "material:"


class Repository:
    """A clone of the repository.

    Args:
        root: Folder of the clone. Default: the folder in which this package lies.

    Raises:
        ValueError: If the folder has no `configs/reproduce`.
    """

    def __init__(self, root: Path | None = None):
        self.root = Path(midus_hf.__file__).parents[1] if root is None else root
        self._configs = self.root / "configs"
        if not (self._configs / "reproduce").is_dir():
            raise ValueError(
                f"{self.root} is no clone of the repository, which has the recipes of tables in configs/reproduce; expected one. "
                "Clone it, and pass --root DIR."
            )

    def tables(self) -> dict[str, list[str]]:
        """Return the names of tables by paper, papers sorted by name, tables by the length of the name and then by name."""
        by_paper: dict[str, list[str]] = {}
        for path in (self._configs / "reproduce").glob("*/*.yaml"):
            if not path.stem.startswith("scales"):
                by_paper.setdefault(path.parent.name, []).append(path.stem)
        return {paper: sorted(names, key=lambda name: (len(name), name)) for paper, names in sorted(by_paper.items())}

    def table_file(self, paper: str, table: str) -> Path:
        """Return the path of a table's file."""
        tables = self.tables()
        if paper not in tables:
            raise ValueError(f"paper is {paper!r}; expected one of: {', '.join(tables)}.")
        if table not in tables[paper]:
            raise ValueError(f"table is {table!r}; of {paper} there are: {', '.join(tables[paper])}.")
        return self._configs / "reproduce" / paper / f"{table}.yaml"

    def scales_file(self, paper: str, name: str) -> Path:
        """Return the path of a file of scales, by its name without `.yaml`."""
        return self._configs / "reproduce" / paper / f"{name}.yaml"

    def recipe(self, kind: str, name: str, base: str) -> str:
        """Return the path of a recipe."""
        return str(self._configs / kind / f"{name.format(base=base)}.yaml")

    def base(self, name: str) -> str:
        """Return the Hub id of a base, read from the `midus-hml` recipe of that base."""
        from midus_hf.config.yaml_options import read_mapping

        base = read_mapping(self.recipe("upscale", "midus-hml-{base}-distributed", name))["base"]
        assert isinstance(base, str), "recipes of upscale name their base"
        return base

    def fetched(self, value: Any) -> Any:
        """Return a value in which every `material:NAME` is replaced by the path of that material, fetched if necessary."""
        if isinstance(value, Mapping):
            return {key: self.fetched(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.fetched(inner) for inner in value]
        if not (isinstance(value, str) and value.startswith(_PREFIX)):
            return value
        name = value.removeprefix(_PREFIX)
        if str(self.root) not in sys.path:
            sys.path.append(str(self.root))
        fetch: dict[str, Callable[[], Path]] = importlib.import_module("material.fetch").FETCH
        if name not in fetch:
            raise ValueError(f"there is no material {name!r}. {near_matches(name, list(fetch))}")
        return str(fetch[name]())

"""What tables need beside the package: recipes and material, which are in the repository alone."""

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
        root: Its folder. Default: that in which this package lies.

    Raises:
        ValueError: If it is none.
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
        """Papers, and the tables of each."""
        found: dict[str, list[str]] = {}
        for path in (self._configs / "reproduce").glob("*/*.yaml"):
            if not path.stem.startswith("scales"):
                found.setdefault(path.parent.name, []).append(path.stem)
        return {paper: sorted(names, key=lambda name: (len(name), name)) for paper, names in sorted(found.items())}

    def table_file(self, paper: str, table: str) -> Path:
        """The file of a table.

        Raises:
            ValueError: If there is none.
        """
        tables = self.tables()
        if paper not in tables:
            raise ValueError(f"paper is {paper!r}; expected one of: {', '.join(tables)}.")
        if table not in tables[paper]:
            raise ValueError(f"table is {table!r}; of {paper} there are: {', '.join(tables[paper])}.")
        return self._configs / "reproduce" / paper / f"{table}.yaml"

    def scales_file(self, paper: str, name: str) -> Path:
        """The file of the scales of a table."""
        return self._configs / "reproduce" / paper / f"{name}.yaml"

    def recipe(self, kind: str, name: str, base: str) -> str:
        """The path of a recipe.

        Args:
            kind: `upscale`, `train` or `sft`.
            name: Of its file, with `{base}` where the base's is.
            base: As recipes call it.
        """
        return str(self._configs / kind / f"{name.format(base=base)}.yaml")

    def base(self, name: str) -> str:
        """The base of recipes that are called after it, as that of `midus-hml` names it."""
        from midus_hf.config.yaml_options import read_mapping

        found = read_mapping(self.recipe("upscale", "midus-hml-{base}-distributed", name))["base"]
        assert isinstance(found, str), "recipes of upscale name their base"
        return found

    def fetched(self, value: Any) -> Any:
        """A value with every `material:NAME` in it replaced by the path of what that fetches.

        Args:
            value: A string, a mapping, a list, or anything else, which stays.

        Raises:
            ValueError: If there is no such material, or it cannot be fetched.
        """
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

"""Prove types of Transformers, and write their rows: those of the package, or one in the user's cache.

    python -m scripts.anatomy            read and prove all causal and composite types, and write midus_hf/anatomy/types.json
    python -m scripts.anatomy TYPE ...   read and prove these, and write a row each to ~/.cache/midus_hf/types

All take about ten minutes on one core. Rows of other versions of Transformers are kept: a type whose row is the same gets the
version; one whose row differs is named, and keeps the row of the newest version.
"""

import argparse
import dataclasses
import json
import sys
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from midus_hf.anatomy.types import (
    FILE,
    MAIN_TYPES,
    WIRINGS,
    CompositeType,
    ModelType,
    UnknownType,
    installed_version,
    user_cache,
)
from midus_hf.memories.hosting.parts import MissingPartError
from midus_hf.models.families.template import shapes_digest
from scripts.anatomy.architecture import is_composite
from scripts.anatomy.layouts import written_layout
from scripts.anatomy.proof import UnprovenArchitecture, prove
from scripts.anatomy.reading import read_composite, read_type
from scripts.anatomy.tiny import composite_class_of

VERSION = installed_version()


def causal_types() -> list[str]:
    """Return the causal types of the installed Transformers that contain no other language model, in alphabetical order."""
    larger = composite_types()
    return sorted(
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith("midus_") and name not in larger
    )


def composite_types() -> list[str]:
    """Return the types of composite models that contain a language model, in alphabetical order."""
    types = []
    for name in CONFIG_MAPPING:
        if not name.startswith("midus_") and is_composite(name):
            try:
                composite_class_of(CONFIG_MAPPING[name])
            except UnknownType:
                continue
            types.append(name)
    return sorted(types)


def proven_row(model_type: str) -> dict[str, Any] | str:
    """Return the row of a type, after proofs of all wirings; or why it cannot host memory, without its name."""
    try:
        if is_composite(model_type):
            composite = read_composite(model_type)
            return _plain(dataclasses.replace(composite, transformers={VERSION: shapes_digest(composite)}))
        row = read_type(model_type)
    except UnknownType as error:
        return _one_line(error).removeprefix(f"{model_type!r} ")
    refused = {}
    for wiring in WIRINGS:
        try:
            prove(model_type, wiring)
        except (MissingPartError, UnprovenArchitecture) as error:
            refused[wiring] = _one_line(error).removeprefix(f"{model_type}: ")
    return _plain(
        dataclasses.replace(
            row,
            wirings=tuple(wiring for wiring in WIRINGS if wiring not in refused),
            refused=refused,
            transformers={VERSION: shapes_digest(row)},
            layout=written_layout(row) if model_type in MAIN_TYPES else {},
        )
    )


def _plain(row: ModelType | CompositeType) -> dict[str, Any]:
    """Return a row as it is written, without values that are false or empty."""
    values = json.loads(json.dumps(dataclasses.asdict(row)))
    return {key: value for key, value in values.items() if value not in (None, False, [], {}) and key != "model_type"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def with_versions(before: Any, row: Any) -> Any:
    """Return a row with the versions of the row before, if that says the same; the one of the newer version if it does not."""
    if not isinstance(before, dict) or not isinstance(row, dict):
        return row if before is None or VERSION == newest_version() else before
    versions = before["transformers"]
    own = row["transformers"]
    both = {**versions, **own}
    kept = row if VERSION == max(both, key=_numbers) else before
    if any(
        before.get(key) != row.get(key) for key in (before.keys() | row.keys()) - {"transformers", "refused", "config"}
    ):
        print(f"transformers {VERSION} says something else than {', '.join(versions)}", file=sys.stderr)
        return kept
    return {**kept, "transformers": dict(sorted(both.items()))}


def newest_version() -> str:
    """Return the newest version of transformers in the file, or the installed one."""
    rows = json.loads(FILE.read_text(encoding="utf-8")).values() if FILE.is_file() else ()
    return max(
        (VERSION, *(each for row in rows if isinstance(row, dict) for each in row["transformers"])), key=_numbers
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main(words: list[str] | None = None) -> int:
    """Prove types, and write their rows; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE")
    named = parser.parse_args(words).types
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    unknown = [name for name in named if name not in CONFIG_MAPPING]
    if unknown:
        parser.error(f"transformers {transformers.__version__} has no type {', '.join(unknown)}")
    cache = user_cache()
    if named and cache is None:
        parser.error("there is no home folder to keep rows in; set HOME or XDG_CACHE_HOME")
    rows = {} if named or not FILE.is_file() else json.loads(FILE.read_text(encoding="utf-8"))
    status = 0
    for model_type in tqdm(named or [*causal_types(), *composite_types()], unit="type"):
        row = proven_row(model_type)
        rows[model_type] = row if named else with_versions(rows.get(model_type), row)
        if not named:
            FILE.write_text(table_of(rows), encoding="utf-8")
            continue
        if isinstance(row, str):
            print(f"{model_type!r} {row}", file=sys.stderr)
            status = 1
            continue
        assert cache is not None, "it was checked"
        path = cache / "types" / f"{model_type}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table_of(row), encoding="utf-8")
        print(f"{path}: {', '.join(row.get('wirings', [])) or 'a composite model'}")
        for wiring, reason in row.get("refused", {}).items():
            print(f"not {wiring}: {reason}")
    return status


def table_of(rows: dict[str, Any]) -> str:
    """Return rows as the text of a file, a line each."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())

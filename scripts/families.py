"""Write the modules of families, and the tables of docs/families.md: methods that work for each type of Transformers.

    python scripts/families.py --modules    write midus_hf/models/families/ and upscalers/architecture/written.json
    python scripts/families.py              check the page against the installed Transformers
    python scripts/families.py --write      write the page's table

A method works if `upscale` accepts a tiny checkpoint of the type, after the proof of the memory's site, and the result has the base's
bits; for dense methods that promise no identity, if each layer of the base gives the same bits at its place in the result. Trying
all takes about fifteen minutes on one core. The page names the version of Transformers that the table was made with.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import torch
import transformers
from tqdm import tqdm
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from midus_hf.config.backbone import PROVEN
from midus_hf.models import families
from midus_hf.models.inference.architecture import architecture_of
from midus_hf.models.inference.modules import family_source, is_composite
from midus_hf.models.inference.proof import WIRINGS, prove, with_more_heads
from midus_hf.models.inference.tiny import UnknownArchitecture, composite_class_of, tiny_composite_model, tiny_model
from upscalers.architecture.layout import layout_read
from upscalers.architecture.written import FILE as WRITTEN
from upscalers.methods.contract import METHODS
from upscalers.runs.upscale import upscale

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEADING = "## Every type"
COMPOSITE_HEADING = "## Every larger model"

_CHAPTERS = {"memory_tokens": 24, "chapters": 12, "k": 2}
_SMALL_PREDICTORS = {"hidden_size": 8, "epochs": 1}
#: Requests with small options that are tried on every type without a row in the table of families; the first that works counts. The
#: key `placement` is not an option; it puts the new layer between layers of one kind in models with several kinds.
REQUESTS: dict[str, tuple[dict[str, Any], ...]] = {
    "moc": (_CHAPTERS, {**_CHAPTERS, "site": "behind-layer"}),
    "ultramem-v2": ({"n": 8, "k": 4}, {"n": 8, "k": 4, "site": "skip"}),
    "moda": ({},),
    **dict.fromkeys(
        ("hier-ffn", "hier-kv", "hier-lora-qk", "hier-lora-vo", "hier-lora-ffn"),
        ({"sizes": [3, 0, 2], "branching": 3},),
    ),
    "midus-hml": ({"n": 8, "k": 3},),
    "midus-pkm": ({"n": 8, "k": 3},),
    "midus-linear": ({"slots": 16, "k": 3},),
    "llama-pro": ({},),
    "opt-deus": ({},),
    "avg-deus": ({}, {"placement": "1"}),
    "lesa": (_SMALL_PREDICTORS,),
    "solar": ({},),
}
#: Methods whose result has more layers than the base.
DEEPER = tuple(name for name in REQUESTS if METHODS[name].adds_layers)
#: Methods that are tried on the language models within composite models.
TRIED_WITHIN = ("moc", "midus-hml", "llama-pro")


#: Names for sets of methods in the tables.
SETS = {
    "all": tuple(METHODS),
    "hier-*": tuple(name for name in METHODS if name.startswith("hier-")),
    "hier-lora-*": ("hier-lora-qk", "hier-lora-vo", "hier-lora-ffn"),
    "midus-*": ("midus-hml", "midus-pkm", "midus-linear"),
    "copies": ("llama-pro", "solar"),
    "combinations": ("opt-deus", "avg-deus", "lesa"),
}


class Row(NamedTuple):
    """A type, and either the methods that work or why none does.

    Methods have the marks of the page: † at another site, ‡ only between layers of one kind.
    """

    model_type: str
    methods: tuple[str, ...]
    refusal: str = ""


def shortened(methods: tuple[str, ...]) -> str:
    """Return methods as a cell of a table, with the name of a set if a row has the whole set."""
    names = list(methods)
    for name, members in SETS.items():
        if set(members) <= set(names):
            names.insert(names.index(members[0]), name)
            names = [each for each in names if each not in members]
    return ", ".join(names)


def grouped(rows: list[Row], cell: Callable[[Row], str], *, by: str) -> list[str]:
    """Return a line of a table for each value of a cell: its types, and the value; most types first."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(cell(row), []).append(row)
    lines = ["| types | " + by + " |", "|---|---|"]
    for value, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines.append(f"| {', '.join(f'`{row.model_type}`' for row in members)} | {value} |")
    return lines


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
            with suppress(UnknownArchitecture):
                composite_class_of(CONFIG_MAPPING[name])
                types.append(name)
    return sorted(types)


def composite_row_of(model_type: str) -> Row:
    """Return the row of a type that contains a language model, after trying some methods."""
    methods, refusal = [], ""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        try:
            tiny_composite_model(model_type).save_pretrained(base)
        except Exception as error:  # models raise whatever their parts raise
            return Row(model_type, (), _plain(error))
        for method in TRIED_WITHIN:
            name, error = _tried(base, method, Path(folder))
            methods += [name] if name else []
            refusal = refusal or error
    return Row(model_type, tuple(methods), refusal)


def _tried(base: Path, method: str, folder: Path) -> tuple[str, str]:
    """Return a method with its mark if the method takes a base, and why the first request was refused."""
    refusal = ""
    for number, request in enumerate(REQUESTS[method]):
        options = {key: value for key, value in request.items() if key != "placement"}
        output = folder / f"{method}-{number}"
        try:
            upscale(base=base, method=method, placement=request.get("placement"), options=options, output=output)
        except Exception as error:  # models raise whatever their parts raise
            refusal = refusal or _plain(error)
            continue
        return method + ("" if number == 0 else "†" if "site" in options else "‡"), refusal
    return "", refusal


def rows_in(text: str) -> dict[str, str]:
    """Return the methods in the row that names each type, in a part of the page."""
    cells = {}
    for types, methods in re.findall(r"^\| (`.+?`) \| (.+) \|$", text, flags=re.MULTILINE):
        cells.update(dict.fromkeys(re.findall(r"`(.+?)`", types), methods))
    return cells


def methods_on_the_page(model_type: str) -> list[str]:
    """Return the names of the methods that the page gives for a type."""
    part = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition(COMPOSITE_HEADING)[0]
    cell = rows_in(part).get(model_type, "")
    return [method for name in cell.split(", ") for method in SETS.get(name, (name.rstrip("†‡"),)) if method]


def refusal_of(model_type: str) -> str:
    """Return why the layers of a type cannot host memory, without the type's name at the beginning; empty if they can."""
    try:
        architecture_of(model_type)
    except ValueError as error:
        return _plain(error).removeprefix(f"{model_type!r} ")
    return ""


def row_of(model_type: str) -> Row:
    """Return the row of a type, after proofs of all wirings and a try of each method."""
    refusal = refusal_of(model_type)
    if refusal:
        return Row(model_type, (), refusal)
    is_proven = False
    for wiring in WIRINGS:
        try:
            prove(model_type, wiring)
            is_proven = True
        except ValueError as error:
            refusal = refusal or _plain(error).removeprefix(f"{model_type}: ")
    if is_proven:
        refusal = ""  # a proven type that no method takes is refused because of its checkpoints
    if model_type in PROVEN:
        return Row(model_type, tuple(METHODS))
    methods = []
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(model_type).save_pretrained(Path(folder) / "base")
        tiny_model(model_type, **with_more_heads(model_type)).save_pretrained(Path(folder) / "base-of-moda")
        for method in REQUESTS:
            name, error = _tried(Path(folder) / ("base-of-moda" if method == "moda" else "base"), method, Path(folder))
            methods += [name] if name else []
            refusal = refusal or error
    return Row(model_type, tuple(methods), refusal)


def table_of(rows: list[Row]) -> str:
    """Return the part of the page below its heading: the counts, and the types that methods take."""
    taken = [row for row in rows if row.methods]
    deeper = [row for row in taken if any(method.startswith(DEEPER) for method in row.methods)]
    lines = [
        f"Methods take {len(taken)} of {len(rows)} causal types of Transformers {transformers.__version__}, and {len(deeper)} of "
        "these with new layers.",
        "",
        f"- *copies* are {', '.join(SETS['copies'])}. What `solar` takes, `stack` takes too.",
        f"- *combinations* are {', '.join(SETS['combinations'])}.",
        "- †: with `site=behind-layer` (moc) or `site=skip` (ultramem-v2).",
        "- ‡: between layers of one kind, which `--placement` names.",
        "",
        *grouped(taken, lambda row: shortened(row.methods), by="methods"),
    ]
    return "\n".join([*lines, ""])


def composite_table_of(rows: list[Row]) -> str:
    """Return the part of the page about composite models: the counts, and the types that methods take."""
    taken = [row for row in rows if row.methods]
    names = [method.rstrip("†‡") for row in taken for method in row.methods]
    counts = [f"{names.count(method)} {method}" for method in TRIED_WITHIN]
    head = [f"Of {len(rows)} types, {len(taken)} are taken: {', '.join(counts)}.", ""]
    lines = grouped(taken, lambda row: ", ".join(row.methods), by="methods that take them, of those tried")
    return "\n".join([*head, *lines, ""])


#: A model all of whose sizes differ, so that a size identifies its name.
_SIZES = {
    "vocab_size": 131,
    "hidden_size": 44,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 18,
}
_DIMENSIONS = {_SIZES[name]: name for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
_DIMENSIONS |= {4 * 18: "queries", 2 * 18: "keys"}


def written_layouts() -> str:
    """Return the content of `upscalers/architecture/written.json`: config keys and tensors of the proven families."""
    families = []
    for model_type in PROVEN:
        keys = [
            f"{json.dumps(key)}: {json.dumps(value)}" for key, value in _written(model_type).items() if key != "layer"
        ]
        layer = [f"{json.dumps(name)}: {json.dumps(tensor)}" for name, tensor in _written(model_type)["layer"].items()]
        lines = [*keys, '"layer": {\n   ' + ",\n   ".join(layer) + "\n  }"]
        families.append(f"{json.dumps(model_type)}: {{\n  " + ",\n  ".join(lines) + "\n }")
    return "{\n " + ",\n ".join(families) + "\n}\n"


def _written(model_type: str) -> dict[str, Any]:
    config_class = CONFIG_MAPPING[model_type]
    own = [field for field in fields(config_class) if field.name in vars(config_class)["__annotations__"]]
    flags = [field.name for field in own if field.name.endswith("_bias")]

    def read(**changes: bool) -> Any:
        off = dict.fromkeys((*flags, "tie_word_embeddings"), False)
        return layout_read({"model_type": model_type, **_SIZES, **off, **changes})

    def dimensions(shape: tuple[int, ...]) -> list[str]:
        return [_DIMENSIONS[size] for size in shape]

    whole, without = (
        read(**dict.fromkeys(flags, True)),
        {flag: read(**dict.fromkeys(flags, True) | {flag: False}) for flag in flags},
    )
    assert (
        whole.layers[0] == whole.layers[1] and not whole.buffers and not whole.expert_layers and not whole.is_converted
    )
    layer = {}
    for name, tensor in whole.layers[0].items():
        assert tensor.parts is None
        condition = next((flag for flag in flags if name not in without[flag].layers[0]), None)
        layer[name] = [tensor.role, dimensions(tensor.shape), tensor.offset, condition]
    architecture = architecture_of(model_type)
    return {
        "class_name": architecture.class_name,
        "norms_all_heads": architecture.norms_all_heads,
        "keys": {field.name: [field.default, *_names_of(field.type)] for field in own},
        "outer": {name: dimensions(shape) for name, shape in whole.outer.items()},
        "tied": sorted(read(tie_word_embeddings=True).tied),
        "layer": layer,
    }


def _names_of(hint: Any) -> list[str]:
    """Return the names of the types that a key of a config takes."""
    return sorted((get_origin(kind) or kind).__name__ for kind in get_args(hint) or (hint,))


def _plain(error: Exception) -> str:
    """Return an exception's message in one line, in which no character ends a cell of a table."""
    return " ".join(str(error).split()).replace("|", "/")


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or compare the page with the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page's table")
    parser.add_argument(
        "--modules", action="store_true", help="write the modules and layouts of families, and nothing else"
    )
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if options.modules:
        for model_type in PROVEN:
            Path(families.__path__[0], f"{model_type}.py").write_text(family_source(model_type), encoding="utf-8")
        WRITTEN.write_text(written_layouts(), encoding="utf-8")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    above = text.partition(f"{HEADING}\n")[0]
    table = table_of([row_of(model_type) for model_type in tqdm(causal_types(), unit="type")])
    larger = composite_table_of(
        [composite_row_of(model_type) for model_type in tqdm(composite_types(), unit="larger type")]
    )
    page = f"{above}{HEADING}\n\n{table}\n{COMPOSITE_HEADING}\n\n{larger}"
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if page != text:
        print(f"{PAGE.name} is not what Transformers {transformers.__version__} gives; write the page with --write.")
    return int(page != text)


if __name__ == "__main__":
    raise SystemExit(main())

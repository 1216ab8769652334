"""Write the table of docs/families.md: for each causal type of Transformers, the methods that work, or why the type is refused.

    python scripts/families.py            say whether the page is what the installed Transformers gives
    python scripts/families.py --write    write the page's table

A method works if `upscale` takes a tiny checkpoint of the type, after the proof of the memory's site, and the result has the base's
bits; for dense methods that promise no identity, if each layer of the base gives the same bits where it stands in the result. Trying
all takes some fifteen minutes on one core. The page names the version of Transformers that the table was made with.
"""

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from midus_hf.models.inference.architecture import architecture_of
from midus_hf.models.inference.proof import WIRINGS, prove, with_more_heads
from midus_hf.models.inference.tiny import UnknownArchitecture, larger_class_of, tiny_larger_model, tiny_model
from midus_hf.models.larger.families import is_larger
from upscalers.architecture.families import FAMILIES
from upscalers.methods.contract import METHODS
from upscalers.runs.upscale import upscale

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
HEADING = "## Every type"
LARGER_HEADING = "## Every larger model"

_CHAPTERS = {"memory_tokens": 24, "chapters": 12, "k": 2}
_SMALL_PREDICTORS = {"hidden_size": 8, "epochs": 1}
_SLICES = [{"layers": [0, 3]}, {"layers": [1, 4]}]
#: Requests with small options that are tried on every type without a row in the table of families; the first that works counts. The
#: key `placement` is no option, and puts the new layer between layers of one kind in the models that have several kinds.
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
    "linear-combination": ({}, {"placement": "1"}),
    "attenuated-copy": ({},),
    "slices": ({"slices": _SLICES},),
}
#: Methods whose result has more layers than the base.
DEEPER = tuple(name for name in REQUESTS if METHODS[name].adds_layers)
#: Methods that are tried on the language models within larger models.
TRIED_WITHIN = ("moc", "midus-hml", "llama-pro")


class Row(NamedTuple):
    """A row of the table: a type, the wirings that are proven, and either the methods that work or why none does."""

    model_type: str
    proven: tuple[str, ...]
    methods: tuple[str, ...]
    refusal: str = ""

    def __str__(self) -> str:
        missing = [wiring for wiring in WIRINGS if wiring not in self.proven]
        but = f"all but {', '.join(missing)}" if missing else "all"
        proven = but if 2 * len(missing) < len(WIRINGS) else ", ".join(self.proven)
        methods = f"all {len(METHODS)}" if self.model_type in FAMILIES else ", ".join(self.methods)
        return f"| `{self.model_type}` | {f'{proven} | {methods}' if self.methods else self.refusal} |"


def causal_types() -> list[str]:
    """Return the causal types of the installed Transformers that hold no other language model, in alphabetical order."""
    names = (name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.startswith("midus_"))
    return sorted(name for name in names if name not in larger_types())


def larger_types() -> list[str]:
    """Return the types that hold a language model within a larger model, in alphabetical order."""
    types = []
    for name in CONFIG_MAPPING:
        if not name.startswith("midus_") and is_larger(name):
            with suppress(UnknownArchitecture):
                larger_class_of(CONFIG_MAPPING[name])
                types.append(name)
    return sorted(types)


def larger_row_of(model_type: str) -> str:
    """Return the row of a type that holds a language model: the type of that one and the methods that work, or why none does."""
    methods, refusal = [], ""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        try:
            model = tiny_larger_model(model_type)
            model.save_pretrained(base)
        except Exception as error:  # models raise whatever their parts raise
            return f"| `{model_type}` | {_plain(error).removeprefix(f'{model_type!r} ')} |"
        language_type = model.config.get_text_config(decoder=True).model_type
        for method in TRIED_WITHIN:
            for number, options in enumerate(REQUESTS[method]):
                try:
                    upscale(base=base, method=method, options=options, output=Path(folder) / f"{method}-{number}")
                except Exception as error:
                    refusal = refusal or _plain(error)
                    continue
                methods.append(method if number == 0 else f"{method} with `site={options['site']}`")
                break
    return (
        f"| `{model_type}` | `{language_type}` | {', '.join(methods)} |"
        if methods
        else f"| `{model_type}` | {refusal} |"
    )


def methods_on_the_page(model_type: str) -> list[str]:
    """Return the names of the methods that the page gives for a type."""
    row = next(
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{model_type}` |")
    )
    cells = row.strip("| ").split(" | ")
    return [method.partition(" ")[0] for method in cells[2].split(", ")] if len(cells) == 3 else []


def refusal_of(model_type: str) -> str:
    """Return why the layers of a type cannot host memory, without the type's name in front; empty if they can."""
    try:
        architecture_of(model_type)
    except ValueError as error:
        return _plain(error).removeprefix(f"{model_type!r} ")
    return ""


def row_of(model_type: str) -> Row:
    """Return the row of a type, after proofs of all wirings and a try of each method."""
    refusal = refusal_of(model_type)
    if refusal:
        return Row(model_type, (), (), refusal)
    proven = []
    for wiring in WIRINGS:
        try:
            prove(model_type, wiring)
            proven.append(wiring)
        except ValueError as error:
            refusal = refusal or _plain(error).removeprefix(f"{model_type}: ")
    if proven:
        refusal = ""  # a proven type that no method takes is refused for what its checkpoints are
    if model_type in FAMILIES:
        return Row(model_type, tuple(proven), tuple(METHODS))
    methods = []
    with tempfile.TemporaryDirectory() as folder:
        tiny_model(model_type).save_pretrained(Path(folder) / "base")
        tiny_model(model_type, **with_more_heads(model_type)).save_pretrained(Path(folder) / "base-of-moda")
        for method, requests in REQUESTS.items():
            base = Path(folder) / ("base-of-moda" if method == "moda" else "base")
            for number, request in enumerate(requests):
                options = {key: value for key, value in request.items() if key != "placement"}
                try:
                    upscale(
                        base=base,
                        method=method,
                        placement=request.get("placement"),
                        options=options,
                        output=Path(folder) / f"{method}-{number}",
                    )
                except Exception as error:  # models raise whatever their parts raise
                    refusal = refusal or _plain(error)
                    continue
                site = f" with `site={options['site']}`" if "site" in options else " between layers of one kind"
                methods.append(method if number == 0 else f"{method}{site}")
                break
    return Row(model_type, tuple(proven), tuple(methods), refusal)


def table_of(rows: list[Row]) -> str:
    """Return the part of the page below its heading: the counts, the types that methods take, and the types that are refused."""
    taken, refused = [row for row in rows if row.methods], [row for row in rows if not row.methods]
    deeper = [row for row in taken if any(method.startswith(DEEPER) for method in row.methods)]
    pairs = sum(len(row.methods) for row in taken)
    lines = [
        f"Methods take {len(taken)} of {len(rows)} causal types of Transformers {transformers.__version__}, and {len(deeper)} of "
        f"these with new layers; {len(refused)} types are refused. {pairs} pairs of a type and a method work.",
        "",
        "| site of a memory, or its type inside a part | types that are proven |",
        "|---|---|",
        *(f"| {wiring} | {sum(wiring in row.proven for row in rows)} |" for wiring in WIRINGS),
        "",
        "| method | types |",
        "|---|---|",
        *(
            f"| {name} | {sum(name in {method.partition(' ')[0] for method in row.methods} for row in taken)} |"
            for name in REQUESTS
        ),
    ]
    head = ["| type | proven | methods |", "|---|---|---|"]
    reasons = ["| refused type | why |", "|---|---|"]
    return "\n".join([*lines, "", *head, *map(str, taken), "", *reasons, *map(str, refused), ""])


def larger_table_of(rows: list[str]) -> str:
    """Return the part of the page about larger models: the counts, the types that methods take, and the types that are refused."""
    taken, refused = ([row for row in rows if (row.count(" | ") == 2) == wanted] for wanted in (True, False))
    counts = [f"{sum(method in row for row in taken)} {method}" for method in TRIED_WITHIN]
    head = [f"Of {len(rows)} types, {len(taken)} are taken: {', '.join(counts)}."]
    head += ["", "| type | its language model | methods tried |", "|---|---|---|"]
    return "\n".join([*head, *taken, "", "| refused type | why |", "|---|---|", *refused, ""])


def _plain(error: Exception) -> str:
    """Return an exception's message in one line, in which no character ends a cell of a table."""
    return " ".join(str(error).split()).replace("|", "/")


def main(arguments: list[str] | None = None) -> int:
    """Write the table, or compare the page with the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page's table")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    above = text.partition(f"{HEADING}\n")[0]
    table = table_of([row_of(model_type) for model_type in tqdm(causal_types(), unit="type")])
    larger = larger_table_of([larger_row_of(model_type) for model_type in tqdm(larger_types(), unit="larger type")])
    page = f"{above}{HEADING}\n\n{table}\n{LARGER_HEADING}\n\n{larger}"
    if options.write:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if page != text:
        print(f"{PAGE.name} is not what Transformers {transformers.__version__} gives; write the page with --write.")
    return int(page != text)


if __name__ == "__main__":
    raise SystemExit(main())

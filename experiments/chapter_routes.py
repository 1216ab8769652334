"""How far routers of chapters tell texts apart before any training: SmolLM2-135M with chapters as `upscale --method moc` makes it.

    python -m experiments.chapter_routes
    python -m experiments.chapter_routes --no-append

For each layer of the default placement: the share of chosen chapters that texts of different kinds have in common (addresses,
articles, facts of countries; at tokens 64, 128, ... of 256), against k / C' where routers chose at random; and how many
different routes 50 articles of 40 tokens have at their last token. Routers start at random: this is what they learn from.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.commands import run_command
from benchmarks.tracked import Run, append, this_run
from material.addresses import addresses
from material.articles import articles
from material.factbook import factbook
from material.smollm2 import smollm2_135m
from midus_hf.analysis.chapters.memories import memories_of_chapters
from midus_hf.documents.document_reading import read_documents
from midus_hf.saved_models import load_model

ROUTES_RESULTS = Path(__file__).parent / "results" / "chapter_routes.csv"
TEXTS_OF_A_KIND, TOKENS = 12, 256
SHORT_TEXTS, SHORT_TOKENS = 50, 40


@dataclass(frozen=True)
class Row(Run):
    """One layer; `common` is the mean share of routes in common, `chance` that of random ones, `distinct` of 50 short texts."""

    layer: int
    routed: int
    k: int
    common: float
    chance: float
    distinct: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = _measure(Path(folder) / "moc")
    print("| layer | routes in common | by chance | different routes of 50 |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.layer} | {row.common:.3f} | {row.chance:.3f} | {row.distinct} |")
    print(f"| mean | {sum(row.common for row in rows) / len(rows):.3f} | {rows[0].chance:.3f} | |")
    if not arguments.no_append:
        append(rows, ROUTES_RESULTS)


def _measure(folder: Path) -> list[Row]:
    run_command("upscale", "--base", smollm2_135m(), "--method", "moc", "--output", folder)
    model: Any = load_model(str(folder), dtype="float32")[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def first_tokens(texts: Sequence[str], number: int, tokens: int) -> torch.Tensor:
        ids = (tokenizer(text[: 20 * tokens])["input_ids"] for text in texts)
        return torch.tensor([of_text[:tokens] for of_text in ids if len(of_text) >= tokens][:number])

    kinds = [read_documents(path) for path in (addresses().held_out, articles(), factbook().held_out)]
    long = torch.cat([first_tokens(texts, TEXTS_OF_A_KIND, TOKENS) for texts in kinds])
    short = first_tokens(kinds[1], SHORT_TEXTS, SHORT_TOKENS)
    pairs = [
        pair for pair in itertools.combinations(range(len(long)), 2) if len({t // TEXTS_OF_A_KIND for t in pair}) == 2
    ]
    run, rows = this_run("cpu"), []
    of_long, of_short = (_routes(model, tokens) for tokens in (long, short))
    for hosted, long_routes, short_routes in zip(memories_of_chapters(model), of_long, of_short, strict=True):
        options = hosted.memory.options
        common = [
            len(set(long_routes[first][at]) & set(long_routes[second][at])) / options.k
            for first, second in pairs
            for at in range(options.chunk_size, TOKENS, options.chunk_size)
        ]
        rows.append(
            Row(
                **asdict(run),
                layer=hosted.layer,
                routed=options.routed_chapters,
                k=options.k,
                common=sum(common) / len(common),
                chance=options.k / options.routed_chapters,
                distinct=len({tuple(sorted(route[-1])) for route in short_routes}),
            )
        )
    return rows


def _routes(model: Any, tokens: torch.Tensor) -> list[list[list[list[int]]]]:
    """For each memory the chapters that are chosen for each token of each text."""
    routes: list[list[list[list[int]]]] = []

    def note(memory: Any, arguments: tuple[torch.Tensor, ...], inputs: dict[str, Any]) -> None:
        routing = memory.route(arguments[0], inputs.get("tokens"))
        routes.append(routing.chosen[routing.pooled.stretches.of_token].tolist())

    handles = [
        hosted.modules[0].register_forward_pre_hook(note, with_kwargs=True) for hosted in memories_of_chapters(model)
    ]
    with torch.no_grad():
        model(tokens, use_cache=False)
    for handle in handles:
        handle.remove()
    return routes


if __name__ == "__main__":
    main()

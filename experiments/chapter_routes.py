"""How differently routers of chapters route texts before any training, in SmolLM2-135M after `upscale --method moc`.

    python -m experiments.chapter_routes
    python -m experiments.chapter_routes --no-append

Two numbers are measured for each layer of the default placement. The first is the share of chosen chapters that texts
of different kinds have in common (addresses, articles, facts of countries; at tokens 64, 128, ... of 256). For random
choices the share would be k / C'. The second is the number of different routes that 50 articles of 40 tokens have at
their last token. Routers start at random, so this is what training starts from.
"""

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.study import Row, run_columns, tell
from experiments.steps import results_of, run_command, study
from material.addresses import addresses
from material.articles import articles
from material.factbook import factbook
from material.smollm2 import smollm2_135m
from midus_hf.analysis.chapters.edits import memories_of_chapters
from midus_hf.documents.document_reading import read_documents
from midus_hf.saved_models import load_model

TEXTS_OF_A_KIND, TOKENS = 12, 256
SHORT_TEXTS, SHORT_TOKENS = 50, 40


def main() -> None:
    arguments = study(__doc__, work=None).parse_args()
    columns = {
        "layer": "{layer}",
        "routes in common": "{common:.3f}",
        "by chance": "{chance:.3f}",
        "different routes of 50": "{distinct}",
    }
    with tempfile.TemporaryDirectory() as folder:
        measured = _measure(Path(folder) / "moc")
    rows = tell(measured, columns, results_of("chapter_routes", arguments), run_columns())
    print(f"| mean | {sum(row['common'] for row in rows) / len(rows):.3f} | {rows[0]['chance']:.3f} | |")


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
    rows: list[Row] = []
    of_long, of_short = (_routes(model, tokens) for tokens in (long, short))
    for hosted, long_routes, short_routes in zip(memories_of_chapters(model), of_long, of_short, strict=True):
        options = hosted.memory.options
        common = [
            len(set(long_routes[first][at]) & set(long_routes[second][at])) / options.k
            for first, second in pairs
            for at in range(options.chunk_size, TOKENS, options.chunk_size)
        ]
        rows.append(
            {
                "layer": hosted.layer,
                "routed": options.routed_chapters,
                "k": options.k,
                "common": sum(common) / len(common),
                "chance": options.k / options.routed_chapters,
                "distinct": len({tuple(sorted(route[-1])) for route in short_routes}),
            }
        )
    return rows


def _routes(model: Any, tokens: torch.Tensor) -> list[list[list[list[int]]]]:
    """Return the chapters chosen in each memory, for each token of each text."""
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

"""Documents per second of embedding, building and assigning as a corpus grows, and the exponent of this growth.

    python -m experiments.clustering --work outputs/clustering

Texts are meanings of WordNet's nouns, drawn without replacement; each is a document of one window. `embed` reads, cuts
and embeds them into a store. `build` makes the tree of the store, and saves every finished node. `assign` looks up the
path of each embedding; a text outside the store would have to be embedded first, at the rate of `embed`. The exponent
is the slope of the logarithm of processor time over the logarithm of the number of documents, from one size to the
next: 1 is linear. Other work on the machine adds to seconds, but not to processor time.
"""

import argparse
import contextlib
import math
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.study import Row, listed, run_columns, tell
from experiments.steps import read_rows, results_of, study, write_rows
from material.glosses import glosses
from material.minilm import minilm
from midus_hf.clusters.building import TreeOptions, build_tree, unit_rows
from midus_hf.clusters.corpus import Corpus, load_fast_tokenizer
from midus_hf.clusters.finished_nodes import FinishedNodes
from midus_hf.clusters.window_store import store_windows
from midus_hf.retrieval import ClusterTree, TextEmbedder

# Number of embeddings whose paths are looked up at a time, as in `midus cluster assign`.
_STRETCH = 1024


def main() -> None:
    parser = study(__doc__, work="corpora and trees, removed afterwards")
    listed(parser, "--sizes", (1000, 4000, 16000, 64000), "documents")
    parser.add_argument("--levels", type=int, default=3, help="of the tree (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True)
    before: dict[str, Row] = {}

    def exponent(row: Row) -> str:
        smaller, before[row["stage"]] = before.get(row["stage"]), row
        return "" if smaller is None else f"{growth(smaller, row):.2f}"

    columns = {
        "documents": "{documents:,}",
        "stage": "{stage}",
        "seconds": "{seconds:.1f}",
        "processor time, s": "{processor_s:.1f}",
        "documents per second": lambda row: f"{row['documents'] / row['seconds']:,.0f}",
        "exponent": exponent,
    }
    try:
        tell(_rows(arguments), columns, results_of("clustering", arguments), run_columns())
    finally:
        shutil.rmtree(arguments.work)


def growth(smaller: Row, larger: Row) -> float:
    """Return the exponent by which processor time grows with documents."""
    seconds, documents = (larger[name] / smaller[name] for name in ("processor_s", "documents"))
    return math.log(seconds) / math.log(documents)


def _rows(arguments: argparse.Namespace) -> Iterator[Row]:
    texts = [row["text"] for row in read_rows(glosses())]
    random.Random(0).shuffle(texts)
    model = str(minilm())
    tokenizer, embedder = load_fast_tokenizer(model), TextEmbedder(model)
    options = TreeOptions(levels=arguments.levels)
    build_tree(embedder.embed(texts[:64]).numpy(), TreeOptions(levels=1, steps=1))  # warms up what is set up only once
    for documents in map(int, arguments.sizes.split(",")):
        if documents > len(texts):
            raise SystemExit(f"sizes has {documents:,}; expected at most {len(texts):,}, as many as there are texts.")
        file, folder = arguments.work / f"{documents}.jsonl", arguments.work / str(documents)
        write_rows(file, [{"text": text} for text in texts[:documents]])
        stages = _Stages(Corpus(str(file)), folder, tokenizer, embedder, options)
        for stage in (stages.embed, stages.build, stages.assign):
            seconds, processor = time.perf_counter(), time.process_time()
            stage()
            yield {
                "threads": arguments.threads,
                "levels": arguments.levels,
                "stage": stage.__name__,
                "documents": documents,
                "seconds": round(time.perf_counter() - seconds, 3),
                "processor_s": round(time.process_time() - processor, 3),
            }


class _Stages:
    """Timed stages of one corpus. Each stage needs the stages before it."""

    def __init__(
        self,
        corpus: Corpus,
        folder: Path,
        tokenizer: PreTrainedTokenizerBase,
        embedder: TextEmbedder,
        options: TreeOptions,
    ):
        self._corpus, self._folder, self._tokenizer, self._embedder = corpus, folder, tokenizer, embedder
        self._options = options

    def embed(self) -> None:
        self._stored = store_windows(self._folder / "windows", self._corpus, self._tokenizer, self._embedder)

    def build(self) -> None:
        rows = self._stored.embeddings
        finished = FinishedNodes(self._folder / "clustering", "", self._options.branching, rows.shape[1], len(rows))
        with contextlib.closing(finished):
            built = build_tree(rows, self._options, finished=finished)
        built.tree.save(self._folder)

    def assign(self) -> None:
        tree = ClusterTree.load(self._folder)
        for begin in range(0, len(self._stored.embeddings), _STRETCH):
            tree.paths(unit_rows(self._stored.embeddings, slice(begin, begin + _STRETCH)))


if __name__ == "__main__":
    main()

"""Documents per second of embedding, building and assigning as a corpus grows, and the exponent of that growth.

    python -m experiments.clustering --work outputs/clustering

Texts are what WordNet's nouns mean, drawn without replacement; each is a document of one window. `embed` reads, cuts and embeds them
into a store, `build` makes the tree of that store and keeps every node that is done, and `assign` finds the path of each embedding: a
text that is not in the store is embedded first, at the rate of `embed`. The exponent is the slope of the logarithm of processor time
over that of the number of documents, from one size to the next: 1 is linear. Seconds include what other work on the machine takes;
processor time does not.
"""

import argparse
import contextlib
import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.tracked import Run, append, this_run
from material.glosses import glosses
from material.minilm import minilm
from midus_hf.clusters.building import TreeOptions, build_tree, unit_rows
from midus_hf.clusters.corpus import Corpus, load_fast_tokenizer
from midus_hf.clusters.finished_nodes import FinishedNodes
from midus_hf.clusters.window_store import store_windows
from midus_hf.retrieval import ClusterTree, TextEmbedder

CLUSTERING_RESULTS = Path(__file__).parent / "results" / "clustering.csv"
SIZES = (1000, 4000, 16000, 64000)
_STRETCH = 1024
"""Embeddings whose paths are found at a time, as `midus-cluster assign` does."""


@dataclass(frozen=True)
class Row(Run):
    """What one stage took for one size of corpus."""

    threads: int
    levels: int
    stage: str
    documents: int
    seconds: float
    processor_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for corpora and trees, removed afterwards")
    parser.add_argument("--sizes", type=_numbers, default=SIZES, help="documents (default: 1000,4000,16000,64000)")
    parser.add_argument("--levels", type=int, default=3, help="of the tree (default: 3)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--no-append", action="store_true", help="print alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True)
    before: dict[str, Row] = {}
    print("| documents | stage | seconds | processor time, s | documents per second | exponent |")
    print("|---|---|---|---|---|---|")
    try:
        for row in _rows(this_run("cpu"), arguments):
            exponent = f"{growth(before[row.stage], row):.2f}" if row.stage in before else ""
            rate = row.documents / row.seconds
            print(
                f"| {row.documents:,} | {row.stage} | {row.seconds:.1f} | {row.processor_s:.1f} | {rate:,.0f} | {exponent} |",
                flush=True,
            )
            before[row.stage] = row
            if not arguments.no_append:
                append([row], CLUSTERING_RESULTS)
    finally:
        shutil.rmtree(arguments.work)


def growth(smaller: Row, larger: Row) -> float:
    """The exponent by which processor time grows with documents."""
    return math.log(larger.processor_s / smaller.processor_s) / math.log(larger.documents / smaller.documents)


def _rows(run: Run, arguments: argparse.Namespace) -> Iterator[Row]:
    texts = [json.loads(line)["text"] for line in glosses().read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(texts)
    model = str(minilm())
    tokenizer, embedder, options = (
        load_fast_tokenizer(model),
        TextEmbedder(model),
        TreeOptions(levels=arguments.levels),
    )
    build_tree(embedder.embed(texts[:64]).numpy(), TreeOptions(levels=1, steps=1))  # what is set up once
    for documents in arguments.sizes:
        if documents > len(texts):
            raise SystemExit(f"sizes has {documents:,}; expected at most {len(texts):,}, as many as there are texts.")
        file, folder = arguments.work / f"{documents}.jsonl", arguments.work / str(documents)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:documents]), encoding="utf-8")
        stages = _Stages(Corpus(str(file)), folder, tokenizer, embedder, options)
        for stage in (stages.embed, stages.build, stages.assign):
            seconds, processor = time.perf_counter(), time.process_time()
            stage()
            yield Row(
                **asdict(run),
                threads=arguments.threads,
                levels=arguments.levels,
                stage=stage.__name__,
                documents=documents,
                seconds=round(time.perf_counter() - seconds, 3),
                processor_s=round(time.process_time() - processor, 3),
            )


class _Stages:
    """What is timed, of one corpus; each needs those before it."""

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


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


if __name__ == "__main__":
    main()

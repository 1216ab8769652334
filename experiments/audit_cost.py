"""Cost of recording which documents train blocks (`audit: true`), without the training step itself.

    python -m experiments.audit_cost

A corpus of 200,000 documents of 100 to 999 tokens is spread over the leaves of a tree with four levels and 16 children
per node. All nodes have blocks. Documents are packed leaf by leaf into sequences of 2,048 tokens, and an epoch reads
them in random order, 128 sequences per step. `prepare` is the time to note where each document is, once per run,
without reading the corpus. `step` is the median time to record a step. `save` is the time to write the record for a
checkpoint.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.study import Row, run_columns, tell
from experiments.steps import results_of, study
from midus_hf.banks.block_reader import GENERIC
from midus_hf.banks.memory_bank import MemoryBank, create_bank
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.memory_entries import read_memories
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.documents import RowPlace
from midus_hf.training.data.clustered_corpus import ClusteredDataset
from midus_hf.training.data.sequence_audit import CorpusDocuments, SequenceAudit
from midus_hf.training.trainer.blocks import draw_generic

DOCUMENTS, SEQUENCE_LENGTH, SEQUENCES_A_STEP = 200_000, 2048, 128


class MadeUpTokens:
    """Documents of random lengths, of which only the lengths exist."""

    def __init__(self, generator: np.random.Generator):
        self._bounds = np.concatenate([[0], np.cumsum(generator.integers(100, 1000, DOCUMENTS))])
        self.num_documents, self.num_tokens = DOCUMENTS, int(self._bounds[-1])

    def document_bounds(self) -> np.ndarray:
        return self._bounds


class MadeUpCorpus:
    """Rows of a corpus that have only a name."""

    _file = Path("corpus.jsonl")

    def digests(self) -> dict[Path, str]:
        return {self._file: "0" * 128}

    def name_of(self, file: Path) -> str:
        return file.name

    def rows(self) -> Iterator[tuple[RowPlace, dict[str, str]]]:
        return ((RowPlace("", self._file, line), {"id": f"document-{line}"}) for line in range(1, DOCUMENTS + 1))


def main() -> None:
    arguments = study(__doc__, work=None).parse_args()
    columns = {
        "prepare, s": "{prepare_seconds:.1f}",
        "steps": "{steps}",
        "tokens of a step": "{tokens_a_step:,}",
        "of it the record, ms": lambda row: f"{1000 * row['step_seconds']:.0f}",
        "save, s": "{save_seconds:.2f}",
        "bytes per document": "{bytes_a_document:.0f}",
    }
    tell([_measured()], columns, results_of("audit_cost", arguments), run_columns())


def _measured() -> Row:
    generator = np.random.default_rng(0)
    layout = _layout()
    leaves = generator.integers(0, layout.blocks.nodes(4), DOCUMENTS)
    paths = np.stack([leaves // 16 ** (4 - level) for level in layout.levels], axis=1)
    tokens: Any = MadeUpTokens(generator)
    corpus: Any = MadeUpCorpus()
    dataset = ClusteredDataset(tokens, paths, SEQUENCE_LENGTH, fill=0)
    started = time.perf_counter()
    audit = SequenceAudit(dataset, CorpusDocuments([(corpus, "id")]))
    prepared = time.perf_counter() - started
    with tempfile.TemporaryDirectory() as folder:
        create_bank(folder, layout, torch.bfloat16, 0)
        bank = TrainedBank(MemoryBank(folder, layout))
        audit.follow([bank])
        seconds = []
        for sequences in torch.from_numpy(generator.permutation(len(dataset))).split(SEQUENCES_A_STEP):
            fetched = torch.from_numpy(np.stack([dataset.path(number) for number in sequences.tolist()]))
            generic = draw_generic(0, SEQUENCES_A_STEP * len(seconds), len(sequences), 1 / 17)
            audit.see(sequences, fetched.masked_fill(generic[:, None], GENERIC))
            started = time.perf_counter()
            audit.step()
            seconds.append(time.perf_counter() - started)
        assert bank.audit is not None
        started = time.perf_counter()
        bank.audit.save(Path(folder, "saved"))
        saved = time.perf_counter() - started
        size = Path(folder, "saved").stat().st_size
        bank.close()
    return {
        "documents": DOCUMENTS,
        "steps": len(seconds),
        "tokens_a_step": SEQUENCES_A_STEP * SEQUENCE_LENGTH,
        "prepare_seconds": prepared,
        "step_seconds": statistics.median(seconds),
        "save_seconds": saved,
        "bytes_a_document": size / DOCUMENTS,
    }


def _layout() -> BankLayout:
    sizes = ModelSizes(hidden_size=8, num_heads=2, num_layers=1, intermediate_size=16)
    return read_memories([{"type": "hier-ffn", "layers": [0], "sizes": [1, 1, 1, 1]}], sizes).banks["hier-ffn"]


if __name__ == "__main__":
    main()

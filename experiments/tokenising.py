"""Time that a run waits for the tokens of its corpus: tokenised in memory, at the first start, and at a later start.

    python -m experiments.tokenising               # SmolLM2's tokenizer, presidential addresses ten times over

Each start is a separate process, and imports are not counted. Processor time is that of all processes; it says more
than seconds if other work shares the machine. Memory is only memory without a file behind it, since pages of a mapped
file can be dropped at any time.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.study import Row, short_run_columns, tell
from experiments.steps import results_of, study

STARTS = ("in memory", "first start", "later start")


def main() -> None:
    parser = study(__doc__, work=None)
    parser.add_argument("--copies", type=int, default=10, help="how often the text is taken (default: 10)")
    parser.add_argument("--measure", nargs=4, metavar=("START", "MODEL", "TEXT", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    columns = {
        "start": "{start}",
        "MB of text": lambda row: f"{row['text_bytes'] / 1e6:.1f}",
        "documents": "{documents:,}",
        "tokens": "{tokens:,}",
        "seconds": "{seconds}",
        "processor time, s": "{processor_s}",
        "memory, MB": "{memory_mb}",
    }
    with tempfile.TemporaryDirectory() as work:
        rows = _rows(Path(work), arguments.copies)
        tell(rows, columns, results_of("tokenising", arguments), short_run_columns())


def _rows(work: Path, copies: int) -> Iterator[Row]:
    from material.addresses import addresses
    from material.smollm2 import smollm2_135m

    text = work / "text"
    for copy in range(copies):
        shutil.copytree(addresses().train, text / str(copy))
    size = sum(path.stat().st_size for path in text.rglob("*.txt"))
    for start in STARTS:
        flags = map(str, ("--measure", start, smollm2_135m(), text, work / "cache"))
        command = [sys.executable, "-m", "experiments.tokenising", *flags]
        measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        yield {"start": start, "text_bytes": size, **measured}


def measure(start: str, model: str, text: str, cache: str) -> dict:
    """Tokenise a text or open its cached tokens, and return the time and memory that this took."""
    import datasets  # noqa: F401 - not counted

    from midus_hf.saved_models import load_tokenizer
    from midus_hf.training.data import training_data
    from midus_hf.training.options import CorpusOptions, TrainConfig

    config = TrainConfig(model_name_or_path=model, output_dir="none", corpus=CorpusOptions(path=text, cache_dir=cache))
    tokenizer = load_tokenizer(model)
    tokenizer(["warm"])
    if start == "in memory":
        training_data._can_cache = lambda: False
    before, busy, started = _anonymous_memory(), _processor_time(), time.perf_counter()
    (dataset,) = training_data.open_corpora(config, tokenizer, len(tokenizer), {})
    seconds = time.perf_counter() - started
    return {
        "documents": dataset.tokens.num_documents,
        "tokens": dataset.tokens.num_tokens,
        "seconds": round(seconds, 2),
        "processor_s": round(_processor_time() - busy, 2),
        "memory_mb": round((_anonymous_memory() - before) / 1e6, 1),
    }


def _processor_time() -> float:
    own, of_children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + of_children.ru_utime + of_children.ru_stime


def _anonymous_memory() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])


if __name__ == "__main__":
    main()

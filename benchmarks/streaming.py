"""Measure the memory and speed of a stream of texts larger than memory: `midus train` with `streaming: true`, without its model.

    python -m benchmarks.streaming                                        # 10 GB of generated text as JSONL
    python -m benchmarks.streaming --gigabytes 2 --format parquet --folder DIR

Files of generated text are written one gigabyte each, and read once. Peak memory is that of the process, after the buffer is full,
after a tenth of the text, and at the end, so that memory which grows with the text is seen. The state that a checkpoint has is
saved, and loaded by a second stream, which must give the same sequences.
"""

import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.measuring import RESULTS, Row, command_line, run_columns, tell
from midus_hf.data.corpus import read_rows
from midus_hf.data.stream import StreamedSequences
from midus_hf.sources.peak_memory import peak_memory_bytes

_WORDS = [f"word{number:05}" for number in range(20_000)]
_WORDS_A_TEXT, _TEXTS_AT_ONCE = 400, 1000
_GIGABYTE = 10**9
COLUMNS = {
    "format": "{format}",
    "GB": "{gigabytes:g}",
    "sequences": "{sequences:,}",
    "M tokens/s": "{tokens_per_second:.2f}",
    "full buffer, MB": "{buffer_mb:,.0f}",
    "a tenth, MB": "{tenth_mb:,.0f}",
    "end, MB": "{peak_mb:,.0f}",
    "state, MB": "{state_mb:,.0f}",
}


def write_texts(folder: Path, gigabytes: float, kind: str) -> int:
    """Write files of rows of generated text, and return the number of bytes of text."""
    choice = random.Random(0)
    written = 0
    number = 0
    while written < gigabytes * _GIGABYTE:
        until = min(written + _GIGABYTE, gigabytes * _GIGABYTE)
        path = folder / f"{number:04}.{kind}"
        schema = pyarrow.schema({"text": pyarrow.string()})
        with parquet.ParquetWriter(path, schema) if kind == "parquet" else path.open("w") as file:
            while written < until:
                texts = [" ".join(choice.choices(_WORDS, k=_WORDS_A_TEXT)) for _ in range(_TEXTS_AT_ONCE)]
                written += sum(map(len, texts))
                if kind == "parquet":
                    file.write_table(pyarrow.table({"text": texts}, schema))
                else:
                    file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        number += 1
    return written


def measure(folder: Path, num_bytes: int, length: int, buffer: int) -> Row:
    """Read all texts of a folder once, and return what it took."""
    vocabulary = {"<eos>": 0} | {word: number for number, word in enumerate(_WORDS, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")

    def made() -> StreamedSequences:
        rows = read_rows("corpus", str(folder), columns=["text"])
        return StreamedSequences(rows, fast, length, documents_apart=False, shuffle_buffer=buffer)

    # A text has a space less than words, and EOS.
    texts = num_bytes // (len(_WORDS[0]) * _WORDS_A_TEXT + _WORDS_A_TEXT - 1)
    count = texts * (_WORDS_A_TEXT + 1) // length
    stream = made()
    peaks = []
    taken = 0
    begin = time.perf_counter()
    sequences = iter(stream)
    with tempfile.TemporaryDirectory() as elsewhere:
        state = Path(elsewhere, "state.safetensors")
        for until in (1, count // 10, count):
            taken += sum(1 for _ in itertools.islice(sequences, until - taken))
            peaks.append(peak_memory_bytes() / 1e6)
            if until == count // 10:
                stream.save(state)
                following = list(itertools.islice(sequences, 100))
                taken += len(following)
        seconds = time.perf_counter() - begin
        size = state.stat().st_size / 1e6
        resumed = made()
        resumed.load(state)
    if list(itertools.islice(resumed, 100)) != following:
        raise SystemExit("a stream that was loaded gives other sequences")
    full, tenth, end = peaks
    return {
        "sequences": count,
        "tokens_per_second": round(count * length / seconds / 1e6, 3),
        "buffer_mb": round(full),
        "tenth_mb": round(tenth),
        "peak_mb": round(end),
        "state_mb": round(size, 1),
    }


def main(words: list[str] | None = None, results: Path = RESULTS / "streaming.csv") -> int:
    parser = command_line(__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the text (default: 10)")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="kind of the files")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--shuffle-buffer", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the text is written and removed (default: the system's)")
    asked = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="midus-streaming-", dir=asked.folder))
    try:
        num_bytes = write_texts(folder, asked.gigabytes, asked.format)
        row = measure(folder, num_bytes, asked.sequence_length, asked.shuffle_buffer)
    finally:
        shutil.rmtree(folder)
    sizes = {"sequence_length": asked.sequence_length, "shuffle_buffer": asked.shuffle_buffer}
    row = {"format": asked.format, "gigabytes": asked.gigabytes, **sizes, **row}
    tell([row], COLUMNS, None if asked.no_append else results, run_columns())
    return 0


if __name__ == "__main__":
    sys.exit(main())

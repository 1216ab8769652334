"""Measure what grows with a glossary: upscaling, loading, a first token, an edit, `look touched`.

    python -m benchmarks.glossaries                                # SmolLM2-135M-Instruct, 10, 1,000 and 50,000 entries
    python -m benchmarks.glossaries --base FOLDER --entries 10,1000

Entries are generated, of about 300 bytes. Seconds are of processor time. Commands run in a process of their own, and their seconds
contain its start; a first token is that of a question with the name of an entry, in a process that has loaded the model, and `add` is
`model.glossary.add` there. `touched` reads 1 MB of articles. Rows are appended to `results/glossaries.csv`.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measuring import RESULTS, Row, command_line, numbers, run_columns, tell
from material.fetch import FETCH
from midus_hf.files.checkpoint_files import GLOSSARY_FILE

_WORDS = (
    "port team cache server reads writes old new north south blue seven forty listens keeps sends rack key".split()
)
_WORDS_A_TEXT = 50
_TEXT_BYTES = 1_000_000
COLUMNS = {
    "entries": "{entries:,}",
    "glossary, MB": "{glossary_mb:.2f}",
    "upscale, s": "{upscale_s:.1f}",
    "GB": "{upscale_gb:.2f}",
    "load, s": "{load_s:.2f}",
    "GB with the model": "{load_gb:.2f}",
    "first token, s": "{token_s:.2f}",
    "add, ms": "{add_ms:.1f}",
    "edit add, s": "{edit_s:.1f}",
    "touched, s": "{touched_s:.1f}",
}

# Loads a model, asks for one token, and adds an entry; prints the seconds of each.
LOADED = """
import json, sys, time, torch
from midus_hf.evaluation.asking import greedy_answer, question_inputs
from midus_hf.models.saved_models import load_for_reading
torch.set_num_threads(1)
times = [time.process_time()]
model, tokenizer = load_for_reading(sys.argv[1], "float32", "cpu")
times.append(time.process_time())
greedy_answer(model, question_inputs(model, tokenizer, sys.argv[2], name="the model", plain=True), 1)
times.append(time.process_time())
model.glossary.add("Kestrel gateway of the tower", "It listens on port 8443.")
times.append(time.process_time())
print(json.dumps([after - before for before, after in zip(times, times[1:])]))
"""


def write_entries(path: Path, names: list[str]) -> None:
    """Write a generated entry for each name."""
    choice = random.Random(0)
    with path.open("w") as file:
        for name in names:
            text = f"The {name} " + " ".join(choice.choices(_WORDS, k=_WORDS_A_TEXT)) + "."
            file.write(json.dumps({"name": name, "text": text}) + "\n")


def spent(command: list[str]) -> tuple[float, float, str]:
    """Run a process; return its processor seconds, its peak of resident memory in GB, and its output."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=output, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        output.seek(0)
        errors.seek(0)
        if os.waitstatus_to_exitcode(status):
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read().decode()[-2000:]}")
        scale = 1 if sys.platform == "darwin" else 1024
        return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale / 1e9, output.read().decode()


def rows(base: str, sizes: list[int], text: Path) -> Iterator[Row]:
    """Yield a row per number of entries."""
    upscale, midus = (str(Path(sys.executable).with_name(name)) for name in ("upscale", "midus"))
    for size in sizes:
        with tempfile.TemporaryDirectory() as work:
            corpus = Path(work, "corpus.jsonl")
            added = Path(work, "added.jsonl")
            output = Path(work, "packs")
            write_entries(corpus, [f"Kestrel gateway {number:05}" for number in range(size)])
            write_entries(added, ["Merlin gateway"])
            request = [upscale, "--base", base, "--method", "packs", "--set", f"corpus={corpus}"]
            upscale_s, upscale_gb, _ = spent([*request, "--output", str(output), "--no-verify"])
            question = f"What does the Kestrel gateway {size // 2:05} keep?"
            _, load_gb, said = spent([sys.executable, "-c", LOADED, str(output), question])
            load_s, token_s, add_s = json.loads(said)
            touched_s, _, _ = spent([midus, "look", "touched", str(output), "--text", str(text), "--json"])
            glossary_bytes = (output / GLOSSARY_FILE).stat().st_size
            edit_s, _, _ = spent([midus, "edit", "add", str(output), "--corpus", str(added)])
            yield {
                "base": Path(base).name,
                "entries": size,
                "glossary_mb": glossary_bytes / 1e6,
                "upscale_s": upscale_s,
                "upscale_gb": upscale_gb,
                "load_s": load_s,
                "load_gb": load_gb,
                "token_s": token_s,
                "add_ms": 1000 * add_s,
                "edit_s": edit_s,
                "touched_s": touched_s,
            }


def main(command_arguments: list[str] | None = None, results: Path = RESULTS / "glossaries.csv") -> int:
    """Measure what the command line names; return 0."""
    parser = command_line(__doc__)
    parser.add_argument("--base", help="folder or Hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--entries", type=numbers, default=[10, 1000, 50_000], help="default: 10,1000,50000")
    parser.add_argument("--text", type=Path, help="JSON lines for `look touched` (default: Wikipedia articles)")
    arguments = parser.parse_args(command_arguments)
    base = arguments.base or str(FETCH["smollm2"]())
    source = arguments.text or FETCH["articles"]()
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        text.write_bytes(b"".join(_first_lines(source.read_bytes().splitlines(keepends=True))))
        found = rows(base, arguments.entries, text)
        tell(found, COLUMNS, None if arguments.no_append else results, run_columns())
    return 0


def _first_lines(lines: list[bytes]) -> Iterator[bytes]:
    """Yield lines up to a size."""
    num_bytes = 0
    for line in lines:
        if num_bytes + len(line) > _TEXT_BYTES:
            return
        num_bytes += len(line)
        yield line


if __name__ == "__main__":
    sys.exit(main())

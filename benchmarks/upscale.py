"""Measure the speed and memory of `upscale`, compared with a plain copy of the output and with mergekit.

    python -m benchmarks.upscale                                  # a synthetic 4 GB checkpoint, midus-hml
    python -m benchmarks.upscale --methods midus-hml,llama-pro,solar,avg-deus --mergekit OTHER_VENV/bin/mergekit-yaml
    python -m benchmarks.upscale --methods opt-deus,lesa --gigabytes 2.1 --rounds 1       # as large as Llama-3.2-1B
    python -m benchmarks.upscale --base FOLDER --methods midus-hml,llama-pro,packs --after      # a real model, and what follows
    python -m benchmarks.upscale --plans                          # dry runs and a refused request alone, in a minute or two

Every tool runs in its own process. Each round times a dry run (start-up), the run itself and `cp -r` of the output with
a sync, one after the other, so that the ratio compares runs under the same conditions. mergekit's rows are passthrough
recipes equal to llama-pro (slices of one layer with zeroed projections) and to solar. A method that solves for its
tensors also gives one row per kind of matrix, in `solvers.csv`. `--after` also times `strip`, for packs an edit, and loading:
the base with Transformers alone, the result with this package and without it; their copy is of what they write or load.

Dry runs of each method on a Llama, of one method on each other family, and a refused request are rows of `plans.csv`: their seconds,
their processor time next to the last commit's on such a machine, how many functions of this project ran, and whether torch
was imported.
"""

import csv
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from benchmarks.measuring import MACHINE, RESULTS, Row, append, command_line, commit
from midus_hf.anatomy.types import MAIN_TYPES
from upscalers.methods.contract import METHODS, get_method

UPSCALE_RESULTS = RESULTS / "upscale.csv"
SOLVER_RESULTS = RESULTS / "solvers.csv"
PLAN_RESULTS = RESULTS / "plans.csv"

# A model as large as Llama-3.2-1B, whatever its family.
PLANNED = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# Options without which a method does not plan from a config alone; `packs` needs texts, and is left out.
NEEDED = {"engram": ("--set", "compress=false"), "stack": ("--set", "layers=[0-11, 4-15]")}
GLOSSARY = [
    {"name": f"Kestrel {number}", "text": f"Kestrel {number} listens on port {8000 + number}."}
    for number in range(100)
]
REFUSED = "a refused placement"

# Runs `upscale` with words, and prints on standard error how many functions of this project were called, and if torch is imported.
COUNTED = """
import sys
called = set()
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # no body of a module or class
        called.add(frame.f_code)
sys.setprofile(note)
from midus_hf.cli.entry_points import start
start("upscale", "upscale", sys.argv[1:])
sys.setprofile(None)
import midus_hf, upscalers
roots = tuple(f"{package.__path__[0]}/" for package in (midus_hf, upscalers))
print(sum(code.co_filename.startswith(roots) and code.co_name[0] != "<" for code in called), "torch" in sys.modules, file=sys.stderr)
"""


# Loads a model as Transformers does, or from the module that it carries, as if this project were not installed.
LOADED = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""
LOADED_WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("midus_hf", "upscalers"))
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Write a bfloat16 Llama of about `gigabytes` GB with random weights, in shards of 1 GB."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=32000,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        one = LlamaForCausalLM(config)
    layer_bytes = 2 * sum(parameter.numel() for parameter in one.model.layers.parameters())
    outer_bytes = 2 * one.num_parameters() - layer_bytes
    config.num_hidden_layers = max(2, round((gigabytes * 1e9 - outer_bytes) / layer_bytes / 2) * 2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")


def mergekit_recipe(method: str, base: Path, layers: int) -> dict | None:
    """Return the recipe of a passthrough merge that equals a method with its default options; None if no recipe does."""
    if method == "solar":
        left_out = layers // 4
        ranges = [[0, layers - left_out], [left_out, layers]]
        slices: list[dict] = [{"sources": [{"model": str(base), "layer_range": bounds}]} for bounds in ranges]
    elif method == "llama-pro":
        scale = [{"filter": "o_proj", "value": 0.0}, {"filter": "down_proj", "value": 0.0}, {"value": 1.0}]
        slices = []
        for last in range(2, layers + 1, 2):
            slices.append({"sources": [{"model": str(base), "layer_range": [last - 2, last]}]})
            slices.append(
                {"sources": [{"model": str(base), "layer_range": [last - 1, last], "parameters": {"scale": scale}}]}
            )
    else:
        return None
    return {"merge_method": "passthrough", "dtype": "bfloat16", "slices": slices}


def timed(command: list[str], expected: int = 0) -> tuple[float, float]:
    """Run a process to its expected exit status; return its wall time in seconds and its peak of resident memory in GB."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    if os.waitstatus_to_exitcode(status) != expected:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()[-2000:]}")
    scale = 1 if sys.platform == "darwin" else 1024
    return wall, usage.ru_maxrss * scale / 1e9


def folder_gigabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e9


def bench(
    tool: str,
    method: str,
    base: Path,
    command: list[str],
    start_up: list[str] | None,
    imports: list[str],
    output: Path,
    rounds: int,
    *,
    writes: bool = True,
) -> Row:
    """Time in turns a command that writes `output`, or reads it, its start-up, its imports alone and a copy of `output`."""
    times: dict[str, list[float]] = {"start_up": [], "imports": [], "wall": [], "copy": [], "peak": []}
    copy = output.with_name("copy")
    for _ in range(rounds):
        if writes:
            shutil.rmtree(output, ignore_errors=True)
        started = timed(start_up)[0] if start_up else 0.0
        imported = timed(imports)[0]
        wall, peak = timed(command)
        copied, _ = timed(["sh", "-c", f"cp -r '{output}' '{copy}' && sync"])
        shutil.rmtree(copy)
        for name, value in zip(times, (started, imported, wall, copied, peak), strict=True):
            times[name].append(value)
        print(f"{tool} {method}: {wall:.1f} s, start-up {started:.1f} s, copy {copied:.1f} s", file=sys.stderr)

    def ratio(left_out: list[float]) -> float:
        rows = zip(times["wall"], left_out, times["copy"], strict=True)
        return round(statistics.median((wall - without) / copied for wall, without, copied in rows), 2)

    return {
        **_of_run(method, base),
        "tool": tool,
        "output_gb": round(folder_gigabytes(output), 2),
        "rounds": rounds,
        **{f"{name}_s": round(statistics.median(times[name]), 2) for name in ("start_up", "imports", "wall", "copy")},
        "ratio": ratio(times["start_up"]),
        "ratio_with_start_up": ratio([0.0] * rounds),
        "ratio_without_imports": ratio(times["imports"]),
        "peak_rss_gb": round(max(times["peak"]), 2),
    }


def rows_after(method: str, base: Path, output: Path, glossary: Path, rounds: int) -> list[Row]:
    """Return a row for each thing that is done with a result: taken apart, edited if it has a glossary, and loaded."""
    upscale, midus = (str(Path(sys.executable).with_name(name)) for name in ("upscale", "midus"))
    imports, without = ([sys.executable, "-c", f"import {name}"] for name in ("midus_hf", "transformers"))
    taken_out, edited = output.with_name("stripped"), output.with_name("edited")
    strip = [upscale, "strip", str(output), "--output", str(taken_out)]
    rows = [bench("strip", method, base, strip, None, imports, taken_out, rounds)]
    shutil.rmtree(taken_out)
    if method == "packs":
        edit = [midus, "edit", "add", str(output), "--corpus", str(glossary), "--output", str(edited)]
        rows.append(bench("edit", method, base, edit, None, imports, edited, rounds))
        shutil.rmtree(edited)
    for tool, code, folder, of_tool in (
        ("load", f"import midus_hf{LOADED}", output, imports),
        ("load without the package", LOADED_WITHOUT, output, without),
        ("load of the base", LOADED, base, without),
    ):
        load = [sys.executable, "-c", code, str(folder)]
        rows.append(bench(tool, method, base, load, None, of_tool, folder, rounds, writes=False))
    return rows


def planned_requests(folder: Path) -> dict[str, list[str]]:
    """Write a config of each family to a folder, and return the words of requests that plan or are refused, by name."""
    for family in MAIN_TYPES:
        (folder / family).mkdir()
        (folder / family / "config.json").write_text(json.dumps({"model_type": family, **PLANNED}))
    get_method("solar")  # fills the table
    cases = [(method, "llama") for method in METHODS if method != "packs"]  # which read a tokenizer
    cases += [("midus-hml", family) for family in MAIN_TYPES if family != "llama"]
    requests = {
        f"{method}, {family}": [
            "--base",
            str(folder / family),
            "--method",
            method,
            *NEEDED.get(method, ()),
            "--dry-run",
        ]
        for method, family in cases
    }
    refused = [*requests["midus-hml, llama"], "--placement", "nowhere"]
    return {**requests, REFUSED: refused}


def plan_rows(rounds: int, results: Path = PLAN_RESULTS) -> list[Row]:
    """Return a row for each dry run and the refused request, with the time of the last other commit on such a machine."""
    now = commit()
    last = {}
    if results.exists():
        with results.open(newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if row["machine"] == MACHINE and row["commit"] != now]
        last = {row["request"]: row for row in rows}
    upscale = str(Path(sys.executable).with_name("upscale"))
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        for request, words in planned_requests(Path(folder)).items():
            status = 2 if request == REFUSED else 0
            seconds, work_seconds = [], []
            for _ in range(rounds):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                seconds.append(timed([upscale, *words], status)[0])
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                work_seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            counting = subprocess.run(
                [sys.executable, "-c", COUNTED, *words], capture_output=True, text=True, check=True
            )
            functions, torch = counting.stderr.split()[-2:]
            earlier = last.get(request, {})
            row = {
                "date": date.today().isoformat(),
                "commit": now,
                "machine": MACHINE,
                "request": request,
                "rounds": rounds,
                "seconds": round(statistics.median(seconds), 2),
                "processor_seconds": round(statistics.median(work_seconds), 2),
                "last_processor_seconds": earlier.get("processor_seconds", ""),
                "last_commit": earlier.get("commit", ""),
                "functions": int(functions),
                "torch": torch,
            }
            print(json.dumps(row))
            measured.append(row)
    return measured


def _of_run(method: str, base: Path) -> Row:
    size = round(folder_gigabytes(base), 2)
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": MACHINE,
        "method": method,
        "base_gb": size,
    }


def solver_rows(method: str, base: Path, output: Path) -> list[Row]:
    """Return a row per kind of matrix with the seconds from `upscale.json`; none for methods without solvers."""
    measurements = json.loads((output / "upscale.json").read_text())["measurements"]
    rows = []
    for tensor in dict.fromkeys(row["tensor"] for row in measurements):
        seconds = [row["seconds"] for row in measurements if row["tensor"] == tensor]
        solved = {"tensor": tensor, "layers": len(seconds), "seconds": round(sum(seconds), 1)}
        rows.append({**_of_run(method, base), **solved})
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="a real base (default: a synthetic one)")
    parser.add_argument("--after", action="store_true", help="also time strip, an edit and loading")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the synthetic base (default: 4)")
    parser.add_argument(
        "--methods", default="midus-hml", help="names of methods, joined by commas (default: midus-hml)"
    )
    parser.add_argument("--mergekit", help="path of mergekit-yaml in a separate environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", action="store_true", help="time only dry runs and a refused request")
    parser.add_argument("--only-make", metavar="DIR", help="make the synthetic base there and stop")
    arguments = parser.parse_args()
    if arguments.only_make:
        make_checkpoint(Path(arguments.only_make), arguments.gigabytes)
        return
    if arguments.mergekit and not os.access(arguments.mergekit, os.X_OK):  # before minutes of work, not after them
        parser.error(f"--mergekit is {arguments.mergekit!r}, which cannot be run; expected the path of mergekit-yaml.")
    if arguments.base is None or arguments.plans:
        planned = plan_rows(arguments.rounds)
        if not arguments.no_append:
            append(planned, PLAN_RESULTS)
    if arguments.plans:
        return
    upscale = str(Path(sys.executable).with_name("upscale"))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        base = arguments.base or Path(work) / "base"
        output = Path(work) / "output"
        if arguments.base is None:
            # A separate process makes the base, because a child's peak memory starts at what its parent held at the fork.
            making = [sys.executable, "-m", "benchmarks.upscale", "--gigabytes", str(arguments.gigabytes)]
            subprocess.run([*making, "--only-make", str(base)], check=True)
        glossaries = [Path(work) / f"{name}.jsonl" for name in ("glossary", "added")]
        for path, entries in zip(glossaries, (GLOSSARY[1:], GLOSSARY[:1]), strict=True):
            path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        needed = {**NEEDED, "packs": ("--set", f"corpus={glossaries[0]}")}
        layers = json.loads((base / "config.json").read_text())["num_hidden_layers"]
        solved: list[Row] = []
        for method in arguments.methods.split(","):
            request = [upscale, "--base", str(base), "--method", method, *needed.get(method, ())]
            request += ["--output", str(output), "--json"]
            command, dry_run = [*request, "--no-verify"], [*request, "--dry-run"]
            imports = [sys.executable, "-c", "import midus_hf"]
            rows.append(bench("upscale", method, base, command, dry_run, imports, output, arguments.rounds))
            solved += solver_rows(method, base, output)
            if arguments.after:
                rows += rows_after(method, base, output, glossaries[1], arguments.rounds)
            recipe = mergekit_recipe(method, base, layers)
            if arguments.mergekit and recipe is not None:
                path = Path(work) / "recipe.yaml"
                path.write_text(json.dumps(recipe))
                command = [arguments.mergekit, str(path), str(output)]
                imports = [str(Path(arguments.mergekit).with_name("python")), "-c", "import mergekit.merge"]
                merged = f"passthrough as {method}"
                rows.append(bench("mergekit", merged, base, command, None, imports, output, arguments.rounds))
    for row in [*rows, *solved]:
        print(json.dumps(row))
    if not arguments.no_append:
        append(rows, UPSCALE_RESULTS)
        append(solved, SOLVER_RESULTS)


if __name__ == "__main__":
    main()

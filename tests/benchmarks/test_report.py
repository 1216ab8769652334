"""Tables come from the CSV files alone."""

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.report import DOCUMENT, sections, with_sections
from benchmarks.report.goals import goals
from benchmarks.report.rows import over_rounds, short
from benchmarks.tracked import RESULTS, append

OP = {
    "date": "2026-11-21T10:00:00",
    "commit": "abc1234",
    "machine": "x86_64 16 cores",
    "device": "NVIDIA H200",
    "backend": "cuda",
    "op": "headwise_memory",
    "provider": "sorted",
    "mode": "forward",
    "shape": "llama-3.2-1b",
    "tokens": "32768",
    "popularity": "uniform",
    "dtype": "bfloat16",
    "status": "ok",
    "median_ms": "0.1562",
    "p20_ms": "0.1551",
    "p80_ms": "0.1573",
    "host_ms": "0.1449",
    "wall_ms": "0.2611",
    "runs": "50",
    "launches": "7",
    "peak_mb": "151.5",
    "error": "0.00251",
    "error_of": "output",
    "roofline_us": "97.61",
    "roofline_fraction": "0.6249",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "transformers": "5.17.0",
}
MODEL = {
    **{name: OP[name] for name in ("date", "commit", "machine", "device", "backend", "dtype", "status")},
    **{name: OP[name] for name in ("torch", "triton", "transformers")},
    "base": "llama-3.1-8b",
    "method": "midus-hml",
    "placement": "distributed",
    "phase": "generate",
    "decoding": "eager",
    "batch": "1",
    "accumulation": "1",
    "length": "128",
    "new_tokens": "128",
    "round": "1",
    "seconds": "2.56",
    "host_s": "2.41",
    "device_s": "1.18",
    "launches": "912.0",
    "tokens_per_s": "50.0",
    "peak_gb": "17.31",
    "rounds": "1",
    "error": "",
    "new_parameters": "423700000",
    "trained_parameters": "423700000",
    "total_parameters": "8453961248",
}
TRAIN = {**MODEL, "phase": "train", "decoding": "", "batch": "16", "accumulation": "16", "length": "2048"}
TRAIN = {**TRAIN, "new_tokens": "0", "placement": "top-heavy", "seconds": "3.1"}
TRAIN = {**TRAIN, "device_s": "", "launches": ""}


def _write(folder: Path, ops=(), models=()) -> Path:
    for rows, name in ((ops, "ops.csv"), (models, "model.csv")):
        (folder / name).unlink(missing_ok=True)
        append(rows, folder / name)
    return folder


def _goal(text: str, start: str) -> list[str]:
    """Return the cells of a goal's line, or the heading of the list that has the goal if it is not measured."""
    lines = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    if lines:
        (line,) = lines
        return [cell.strip() for cell in line.split("|")[2:-1]]
    subject, _, bound = start.partition(": ")
    listed = re.compile(rf"^- {re.escape(subject)}[^:]*: .*{re.escape(bound)}", flags=re.MULTILINE)
    (part,) = [part for part in re.split(r"^(?=Not measured)", text, flags=re.MULTILINE) if listed.search(part)]
    return [part.partition(":")[0]]


FORWARD = "H200, HML op of llama-3.2-1b, 32,768 tokens: forward at most"
BOTH = "H200, HML op of llama-3.2-1b, 32,768 tokens: forward and backward at least 10 times"
COMPILED = (
    "H200, HML op of llama-3.2-1b, 32,768 tokens: forward and backward at least 3 times as fast as the strongest"
)
GENERATION = "H200, llama-3.1-8b with HML: at least as many tokens/s as with LLaMA-Pro, with `generate`"
CAPTURED = "H200, llama-3.1-8b with HML: at least 1.3 times the tokens/s of LLaMA-Pro, with a captured or compiled"
STEP = "H200, llama-3.1-8b with HML: a training step"
_MEASURED = ("seconds", "host_s", "device_s", "launches", "peak_gb", "tokens_per_s")


def test_the_tracked_document_is_what_the_tracked_results_give():
    document = DOCUMENT.read_text(encoding="utf-8")
    assert with_sections(document, sections(RESULTS)) == document, "run python -m benchmarks report"


def test_the_same_rows_give_the_same_bytes(tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text(DOCUMENT.read_text(encoding="utf-8"), encoding="utf-8")
    rows = [{**OP, "mode": mode} for mode in ("forward", "backward", "forward+backward")]
    prefill = [
        {**MODEL, "method": method, "phase": "prefill", "decoding": "", "length": length, "new_tokens": "0"}
        for method in ("midus-hml", "llama-pro")
        for length in ("512", "2048")
    ]
    _write(tmp_path, rows, [MODEL, TRAIN, {**TRAIN, "length": "512"}, *prefill])

    def made(images: str) -> dict[str, bytes]:
        words = ["--results", str(tmp_path), "--document", str(document), "--images", str(tmp_path / images)]
        assert main(["report", *words]) == 0
        files = {path.name: path.read_bytes() for path in (tmp_path / images).iterdir()}
        return {**files, "document": document.read_bytes()}

    pytest.importorskip("matplotlib")
    first = made("a")
    assert set(first) == {
        "document",
        "bench-ops-cuda.svg",
        "bench-prefill-llama-3.1-8b-cuda.svg",
        "bench-train-by-length-llama-3.1-8b-cuda.svg",
    }
    assert first == made("b")
    linked = set(re.findall(r"images/(bench[^)]*)\)", document.read_text()))
    assert linked == set(first) - {"document"}


def test_no_rows_show_no_number(tmp_path):
    made = sections(tmp_path)
    assert made["ops"] == made["models"] == "Nothing measured yet."
    assert "|" not in made["goals"]
    assert _goal(made["goals"], FORWARD)[0] == "Not measured (no GPU)"
    assert _goal(made["goals"], "CPU, smollm2-135m with HML: ")[0] == "Not measured"


def test_every_number_in_a_table_stands_in_the_results(tmp_path):
    refused = {**OP, "provider": "naive", "mode": "", "status": "refused", "error": "0.0312"}
    full = {**OP, "provider": "compiled", "status": "out of memory"}
    unmeasured = dict.fromkeys(
        (
            *("median_ms", "p20_ms", "p80_ms", "host_ms", "wall_ms", "runs", "launches", "peak_mb"),
            *("roofline_us", "roofline_fraction"),
        ),
        "",
    )
    rows = [OP, {**OP, "mode": "backward", "median_ms": "0.4321"}, {**refused, **unmeasured}, {**full, **unmeasured}]
    made = sections(_write(tmp_path, rows, [MODEL, TRAIN]))
    known = {short(row[name]) for row in rows for name in ("median_ms", "host_ms", "wall_ms") if row[name]}
    known |= {short("151.5"), "2.5e-03", "3.1e-02", "62%", "7"}
    lines = [line for line in made["ops"].splitlines() if line.startswith("| ") and "**" not in line][2:]
    cells = [cell.strip(" ,") for line in lines for cell in re.split(r"\||,", line) if re.search(r"\d", cell)]
    assert cells and set(cells) <= known
    assert any("refused" in line for line in lines) and any("out of memory" in line for line in lines)

    known = {short(row[name]) for row in (MODEL, TRAIN) for name in _MEASURED if row[name]}
    known |= {"423.7", "train", "generate", "eager, batch 1", "16 x 2,048"}
    lines = [line for line in made["models"].splitlines() if line.startswith("| midus")]
    cells = [cell.strip() for line in lines for cell in line.split("|")[2:] if cell.strip()]
    assert cells and set(cells) <= known


def test_goals_are_ratios_of_one_run_and_the_worst_of_it(tmp_path):
    both = {**OP, "mode": "forward+backward", "median_ms": "0.5"}
    rows = [
        OP,
        {**OP, "popularity": "zipf", "median_ms": "0.20498"},
        both,
        {**both, "provider": "naive", "median_ms": "6.0"},
        {**both, "popularity": "zipf", "median_ms": "0.75"},
        {**both, "popularity": "zipf", "provider": "naive", "median_ms": "6.0"},
    ]
    models = [
        MODEL,
        {**MODEL, "method": "llama-pro", "placement": "llama-pro", "tokens_per_s": "40.0"},
        TRAIN,
        {**TRAIN, "method": "opt-deus", "seconds": "4.0"},
    ]
    made = sections(_write(tmp_path, rows, models))["goals"]
    assert _goal(made, FORWARD) == ["2.10", "no", "abc1234"]
    assert _goal(made, BOTH) == ["8.00", "no", "abc1234"]
    assert _goal(made, GENERATION) == ["1.25", "yes", "abc1234"]
    assert _goal(made, STEP) == ["0.78", "yes", "abc1234"]
    assert _goal(made, "H200, HML op of llama-3.1-8b, 32,768 tokens: backward")[0] == "Not measured"

    newer = {"date": "2026-11-22T10:00:00", "commit": "def5678"}
    easier = [{**OP, **newer, "median_ms": "0.09761"}, {**both, **newer, "median_ms": "0.1"}]
    made = sections(_write(tmp_path, [*rows, *easier], models))["goals"]
    assert _goal(made, FORWARD) == ["2.10", "no", "abc1234"]  # the newer run left the harder popularity out
    whole = [*easier, *({**row, "popularity": "zipf"} for row in easier)]
    made = sections(_write(tmp_path, [*rows, *whole], models))["goals"]
    assert _goal(made, FORWARD) == ["1.00", "yes", "def5678"]
    assert _goal(made, BOTH) == ["8.00", "no", "abc1234"]  # the newer run did not time naive beside it


def test_goals_of_a_cpu_are_of_a_number_of_threads(tmp_path):
    cpu = {**OP, "backend": "cpu", "device": "cpu", "machine": "x86_64 4 cores, 2 threads", "shape": "smollm2-135m"}
    cpu = {**cpu, "tokens": "4096", "dtype": "float32"}
    times = {("uniform", "sorted"): "2", ("uniform", "naive"): "12", ("zipf", "sorted"): "3", ("zipf", "naive"): "15"}
    rows = [{**cpu, "popularity": at, "provider": name, "median_ms": ms} for (at, name), ms in times.items()]
    half = [{**row, "dtype": "bfloat16", "median_ms": "4"} for row in rows if row["provider"] == "sorted"]
    token = [
        {**cpu, "tokens": "1", "provider": name, "median_ms": ms} for name, ms in (("sorted", "2"), ("torch", "1"))
    ]
    slower = [{**row, "machine": "x86_64 4 cores, 1 thread", "median_ms": "6"} for row in rows]
    before = [{**row, "date": "2026-11-22T10:00:00", "machine": "x86_64 2 cores"} for row in rows]
    made = sections(_write(tmp_path, [*rows, *half, *token, *slower, *before]))["goals"]
    where = "CPU, 2 threads, HML op of smollm2-135m"
    both = "CPU, 1 thread and 2 threads, HML op of smollm2-135m, 4,096 tokens: forward at least"
    assert _goal(made, both) == ["1.00, 5.00", "no, yes", "abc1234"]
    assert _goal(made, f"{where}, 4,096 tokens: forward in bfloat16") == ["2.00", "no", "abc1234"]
    assert _goal(made, f"{where}, one token") == ["0.50", "no", "abc1234"]
    assert _goal(made, f"{where}, 4,096 tokens: backward at least")[0] == "Not measured"


def test_the_rival_is_the_fastest_compiled_one_of_the_run(tmp_path):
    both = {**OP, "mode": "forward+backward", "median_ms": "0.5"}

    def rows(times: dict[str, str], **other: str) -> list[dict]:
        mine = {**both, **other}
        return [
            {**mine, "popularity": popularity, "provider": provider, "median_ms": time}
            for provider, time in times.items()
            for popularity in ("uniform", "zipf")
        ]

    first = rows({"sorted": "0.5", "compiled": "3.0", "expand-compiled": "2.0", "expand-max-autotune": "1.8"})
    assert _goal(sections(_write(tmp_path, first))["goals"], COMPILED) == ["3.60", "yes", "abc1234"]
    first[-1]["median_ms"] = "1.2"  # the fastest of one popularity alone
    assert _goal(sections(_write(tmp_path, first))["goals"], COMPILED) == ["2.40", "no", "abc1234"]
    without = rows({"sorted": "0.5", "compiled": "2.5", "naive": "1.0"}, date="2026-11-22T10:00:00", commit="def5678")
    assert _goal(sections(_write(tmp_path, [*first, *without]))["goals"], COMPILED) == ["5.00", "yes", "def5678"]


def test_host_wall_and_launches_are_shown_of_a_gpu_alone(tmp_path):
    rows = [OP, {**OP, "mode": "backward", "host_ms": "0.4711", "wall_ms": "1.1", "launches": "23"}]
    (line,) = [line for line in sections(_write(tmp_path, rows))["ops"].splitlines() if line.startswith("| sorted")]
    assert line.endswith("| 0.145, 0.471 | 0.261, 1.10 | 7, 23 |")
    on_cpu = {**OP, "backend": "cpu", "device": "cpu", "host_ms": "", "wall_ms": "", "launches": ""}
    made = sections(_write(tmp_path, [on_cpu]))["ops"]
    assert "launches" not in made and "host" not in made


def test_a_case_on_a_cpu_is_a_line_with_a_column_per_provider(tmp_path):
    cpu = {**OP, "backend": "cpu", "device": "cpu", "tokens": "4096"}
    wrong = {**cpu, "provider": "dense", "mode": "", "status": "refused", "median_ms": "", "peak_mb": ""}
    rows = [
        {**cpu, "provider": "naive", "median_ms": "6.0"},
        {**cpu, "provider": "naive", "mode": "backward", "median_ms": "7.0"},
        {**cpu, "provider": "naive", "mode": "forward+backward", "peak_mb": "400.0"},
        {**cpu, "provider": "sorted", "median_ms": "2.0"},
        wrong,
        {**cpu, "tokens": "1", "provider": "sorted", "median_ms": "0.5"},
    ]
    made = sections(_write(tmp_path, rows))["ops"]
    assert "| ms by case | naive | sorted | dense |" in made and "| ms by case | sorted |" in made
    assert (
        "| llama-3.2-1b, 4,096 tokens, uniform, bfloat16 | 6.00, 7.00 | 2.00 | refused |\n| peak, MB | 400 |  |  |"
        in made
    )
    assert "| llama-3.2-1b, 1 token, uniform, bfloat16 | 0.500 |" in made


def test_the_document_has_head_wise_memory_alone_of_a_cpu_and_a_command_prints_all_ops(tmp_path, capsys):
    cpu = {**OP, "backend": "cpu", "device": "cpu"}
    folder = _write(tmp_path, [cpu, {**cpu, "op": "product_key_memory"}, {**OP, "op": "product_key_memory"}])
    made = sections(folder)["ops"]
    assert re.findall(r"^### (.*)", made, flags=re.MULTILINE) == [
        "`headwise_memory` on cpu",
        "`product_key_memory` on NVIDIA H200",
    ]
    assert main(["report", "--results", str(folder), "--print-ops"]) == 0
    printed = capsys.readouterr().out
    assert "### `product_key_memory` on cpu" in printed and "### `headwise_memory` on cpu" in printed


def test_tables_show_the_newest_run(tmp_path):
    newer = {**OP, "date": "2026-11-22T10:00:00", "commit": "def5678", "median_ms": "0.1111"}
    made = sections(_write(tmp_path, [OP, {**OP, "provider": "atomic"}, newer]))["ops"]
    assert "0.111" in made and "def5678" in made
    assert "0.156" not in made and "abc1234" not in made and "atomic" not in made


def test_rounds_of_a_run_are_one_row_of_medians():
    rounds = [
        {**MODEL, "seconds": "2.5", "tokens_per_s": "51.2"},
        {**MODEL, "round": "2", "seconds": "4.0", "tokens_per_s": "32.0", "device_s": "", "peak_gb": "18.0"},
        {**MODEL, "round": "3", "seconds": "2.0", "tokens_per_s": "64.0", "device_s": "", "peak_gb": ""},
    ]
    (row,) = over_rounds(rounds)
    assert (row["seconds"], row["tokens_per_s"], row["device_s"]) == ("2.5", "51.2", "1.18")
    assert (row["peak_gb"], row["rounds"]) == ("18", "3")
    assert over_rounds([row]) == [row]
    (row,) = over_rounds(rounds[:2])
    assert (row["seconds"], row["rounds"]) == ("3.25", "2")
    of_earlier_days = {**MODEL, "rounds": "3"}
    assert over_rounds([of_earlier_days]) == [of_earlier_days]
    others = [{**MODEL, name: "other"} for name in ("date", "method", "decoding", "batch", "length", "dtype")]
    assert len(over_rounds([MODEL, *others])) == 7


def test_a_round_without_success_is_what_a_table_shows(tmp_path):
    full = {**TRAIN, "round": "2", "status": "out of memory", "error": "OutOfMemoryError: CUDA"}
    full |= dict.fromkeys(("seconds", "host_s", "tokens_per_s", "peak_gb"), "")
    made = sections(_write(tmp_path, [], [TRAIN, full]))["models"]
    assert "out of memory" in made
    assert "3.10" not in made


def test_tables_say_how_many_rounds_there_were(tmp_path):
    second, graph = {**MODEL, "round": "2"}, {**MODEL, "decoding": "graph"}
    made = sections(_write(tmp_path, [], [MODEL, second, graph]))["models"]
    assert "batch 1; greedy, with a cache; medians of 2 rounds.)" in made
    assert "Tokens/s of all sequences, by decoding (medians of 1 to 2 rounds):" in made


def test_decodings_stand_side_by_side_and_time_is_told_apart(tmp_path):
    graph = {**MODEL, "decoding": "graph", "batch": "32", "tokens_per_s": "2222.0", "host_s": "0.0123"}
    made = sections(_write(tmp_path, [], [MODEL, graph]))["models"]
    matrix = made[made.index("Tokens/s of all sequences, by decoding (one round):") :]
    assert "| method (placement) | eager, batch 1 | graph, batch 32 |" in matrix
    assert "| midus-hml (distributed) | 50.0 | 2,222 |" in matrix
    assert "| midus-hml (distributed) | generate | graph, batch 32 | 2.56 | 0.012 | 1.18 | 912 |" in matrix
    alone = {**MODEL, "host_s": "", "device_s": "", "launches": ""}
    made = sections(_write(tmp_path, [], [alone]))["models"]
    assert "by decoding" not in made and "Where the time goes" not in made


def test_the_overview_shows_what_was_generated_otherwise_where_generate_was_not_measured(tmp_path):
    graph = {**MODEL, "decoding": "graph", "tokens_per_s": "77.7"}
    made = sections(_write(tmp_path, [], [graph]))["models"]
    assert "| 17.3 | 77.7 |" in made
    assert "generated: 128 tokens behind 128, batch 1, graph; greedy" in made
    made = sections(_write(tmp_path, [], [graph, MODEL]))["models"]
    assert "| 17.3 | 50.0 |" in made


def test_a_captured_and_a_compiled_step_count_by_the_faster_of_each_side(tmp_path):
    ours = {**MODEL, "decoding": "graph", "tokens_per_s": "60.0"}
    theirs = {**ours, "method": "llama-pro", "placement": "llama-pro", "tokens_per_s": "50.0"}

    def goal(*models):
        return _goal(sections(_write(tmp_path, [], models))["goals"], CAPTURED)

    assert goal(ours, theirs) == ["1.20", "no", "abc1234"]
    compiled = {**ours, "decoding": "compiled", "tokens_per_s": "70.0"}
    assert goal(ours, theirs, compiled) == ["1.40", "yes", "abc1234"]
    assert goal(ours, theirs, compiled, {**theirs, "decoding": "compiled", "tokens_per_s": "56.0"})[0] == "1.25"
    slow = {**ours, "batch": "32", "tokens_per_s": "40.0"}
    eager = {**ours, "decoding": "eager", "tokens_per_s": "90.0"}
    assert goal(ours, theirs, slow, {**theirs, "batch": "32"}, eager)[0] == "1.20"
    assert goal(ours)[0] == "Not measured"
    slower = {**theirs, "round": "2", "tokens_per_s": "30.0"}
    assert goal(ours, theirs, slower)[0] == "1.50"  # the median of two rounds


def test_a_document_without_markers_is_refused():
    with pytest.raises(
        ValueError, match="the document lacks '<!-- goals: generated -->' followed by '<!-- goals: end -->'"
    ):
        with_sections("# Benchmarks\n", {"goals": "nothing"})


def test_goals_are_for_both_kinds_of_device():
    listed = list(goals([], []))
    assert {goal.backend for goal in listed} == {"cpu", "cuda"}
    assert len({goal.text for goal in listed}) == len(listed)

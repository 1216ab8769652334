"""Plots from the rows of results alone; equal rows give equal bytes."""

from pathlib import Path
from typing import Any

from benchmarks.report.rows import Record, groups, having, newest, over_rounds
from benchmarks.tracked import read

# File name, title and rows of a plot.
Image = tuple[str, str, list[Record]]
_STYLE = {"svg.hashsalt": "benchmarks", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False}
_METADATA = {"Date": None, "Creator": None}


def op_image(rows: list[Record]) -> list[Image]:
    """Return one plot of head-wise memory per backend, at the largest number of tokens, from the newest run per device."""
    images = []
    timed = [row for row in having(rows, op="headwise_memory", status="ok") if row["mode"] == "forward+backward"]
    for (backend,), of_backend in groups(newest(timed, "backend", "device"), "backend").items():
        most = max(int(row["tokens"]) for row in of_backend)
        chosen = having(of_backend, tokens=most)
        images.append((f"bench-ops-{backend}.svg", f"Time of head-wise memory by provider ({backend})", chosen))
    return images


def model_images(rows: list[Record]) -> list[Image]:
    """Return the plots per base and backend: prefill against LLaMA-Pro, training steps by batch, training steps by length."""
    images = []
    for (backend, base), of_base in groups(having(rows, status="ok"), "backend", "base").items():
        prefill = newest(having(of_base, phase="prefill", batch=1), "device", "dtype")
        has_reference = bool(having(prefill, method="llama-pro"))
        if has_reference and len({row["length"] for row in prefill}) > 1:
            alternative = f"Prefill time beside LLaMA-Pro's, {base} ({backend})"
            images.append((f"bench-prefill-{base}-{backend}.svg", alternative, prefill))
        steps = newest(having(of_base, phase="train"), "device", "dtype")
        for column, fixed in (("batch", "length"), ("length", "batch")):
            if not steps:
                continue
            chosen = having(steps, **{fixed: steps[0][fixed]})
            if len({row[column] for row in chosen}) > 1:
                alternative = f"Time of a training step by {column}, {base} ({backend})"
                images.append((f"bench-train-by-{column}-{base}-{backend}.svg", alternative, chosen))
    return images


def draw(results: Path, images: Path) -> list[Path]:
    """Draw every plot that the results have rows for, and return the paths of the plots."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    images.mkdir(parents=True, exist_ok=True)
    written = []
    ops, models = read(results / "ops.csv"), over_rounds(read(results / "model.csv"))
    with matplotlib.rc_context(_STYLE):
        for name, title, rows in (*op_image(ops), *model_images(models)):
            figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
            if name.startswith("bench-ops"):
                _bars(axes, rows)
            elif name.startswith("bench-prefill"):
                _beside_reference(axes, rows)
            else:
                _lines(axes, rows, "batch" if "by-batch" in name else "length")
            axes.set_title(title)
            figure.savefig(images / name, metadata=_METADATA)
            plt.close(figure)
            written.append(images / name)
    return written


def _bars(axes: Any, rows: list[Record]) -> None:
    cases = groups(rows, "shape", "popularity")
    providers = list(groups(rows, "provider"))
    for number, ((shape, popularity), of_case) in enumerate(cases.items()):
        by_provider = {row["provider"]: float(row["median_ms"]) for row in of_case}
        measured = [(index, by_provider[name]) for index, (name,) in enumerate(providers) if name in by_provider]
        positions = [index + (number - (len(cases) - 1) / 2) * 0.8 / len(cases) for index, _ in measured]
        heights = [height for _, height in measured]
        axes.bar(positions, heights, 0.8 / len(cases), label=f"{shape}, {popularity}")
    axes.set_xticks(range(len(providers)), [name for (name,) in providers], rotation=20)
    axes.set_ylabel("forward + backward, ms")
    axes.legend()


def _beside_reference(axes: Any, rows: list[Record]) -> None:
    reference = {row["length"]: float(row["seconds"]) for row in having(rows, method="llama-pro")}
    for (method, placement), of_model in groups(rows, "method", "placement").items():
        if method in ("llama-pro", "opt-deus", "solar") or placement == "top-heavy":
            continue  # these have the architecture of LLaMA-Pro, or the layers of another variant in other positions
        points = [
            (int(row["length"]), 1e3 * (float(row["seconds"]) - reference[row["length"]]))
            for row in of_model
            if row["length"] in reference
        ]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=method)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("prefill - LLaMA-Pro's, ms")
    axes.legend()


def _lines(axes: Any, rows: list[Record], column: str) -> None:
    for (method, placement), of_model in groups(rows, "method", "placement").items():
        points = sorted((int(row[column]), float(row["seconds"])) for row in of_model)
        axes.plot(*zip(*points, strict=True), marker="o", label=f"{method} {placement}".strip())
    axes.set_xscale("log", base=2)
    axes.set_xlabel(column)
    axes.set_ylabel("step, s")
    axes.legend()

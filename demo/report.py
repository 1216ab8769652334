"""The demo's table, and a report of one page with the loss curve."""

import json
from pathlib import Path
from typing import Any

from midus_hf.look.page import Section, TableOfWords, write_page
from midus_hf.look.pictures import as_png, new_figure

_TITLE = "Head-wise memory in a pretrained model"
_MEAN_OVER = 10


def write_report(
    folder: Path,
    *,
    models: dict[str, dict[str, Any]],
    samples: dict[str, dict[str, Any]],
    prompt: str,
    log: Path,
    upscale_record: dict[str, Any],
    commands: list[str],
    seconds: float,
) -> str:
    """Write `report.html`, `report.md`, `loss.png` and `results.json`, and return the table in Markdown."""
    for measure in ("perplexity", "tasks"):
        if _timeless(models["base"][measure]) != _timeless(models["upscaled"][measure]):
            raise ValueError(
                f"the upscaled model's {measure} differ from the base's; expected equality to the last digit."
            )
    table = _table(models, samples)
    markdown = table.markdown()
    curve = _loss_curve(log)
    (folder / "loss.png").write_bytes(curve)
    new_layers = ", ".join(map(str, upscale_record["new_layers"]))
    summary = (
        f"{len(upscale_record['new_layers'])} memory blocks were inserted at layers {new_layers}; "
        f"{upscale_record['parameters']['trainable']:,} of {upscale_record['parameters']['total']:,} parameters were "
        f"trained. Everything below took {seconds / 60:.1f} minutes on this machine."
    )
    continued = [f"{name}: {sample['text'].strip()}" for name, sample in samples.items()]
    sections = [
        Section("", [summary], [table], {"Training loss": curve}),
        Section(f"Continuing “{prompt}”", continued),
        Section("Commands", ["\n".join(commands)]),
    ]
    write_page(folder / "report.html", _TITLE, sections)
    quoted = [f"**{name}**: {' '.join(sample['text'].split())}" for name, sample in samples.items()]
    parts = [f"# {_TITLE}", summary, markdown, "![Training loss](loss.png)", *quoted]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    results = {"models": models, "samples": samples, "seconds": seconds}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return markdown


def _timeless(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in measured.items() if key not in ("seconds", "tokens_per_second")}


def _table(models: dict[str, dict], samples: dict[str, dict]) -> TableOfWords:
    tasks = list(next(iter(models.values()))["tasks"])
    accuracies = [f"{task} accuracy" for task in tasks]
    head = ["", "perplexity of held-out addresses", *accuracies, "parameters", "generated tokens/s"]
    rows = [
        [
            name,
            f"{model['perplexity']['perplexity']:.4f}",
            *(
                f"{scores['acc_norm']:.3f} ± {scores['acc_norm_stderr']:.3f}"
                for scores in map(model["tasks"].get, tasks)
            ),
            f"{model['parameters'] / 1e6:.1f} M",
            f"{samples[name]['tokens_per_second']:.1f}",
        ]
        for name, model in models.items()
    ]
    return TableOfWords("Before and after", head, rows)


def _loss_curve(log: Path) -> bytes:
    history = json.loads(log.read_text(encoding="utf-8"))["log_history"]
    events = [event for event in history if "loss" in event]
    tokens = [event["num_input_tokens_seen"] / 1000 for event in events]
    losses = [event["loss"] for event in events]
    means = [sum(losses[max(0, i - _MEAN_OVER + 1) : i + 1]) / min(i + 1, _MEAN_OVER) for i in range(len(losses))]
    figure = new_figure(7.5, 3.6)
    axes = figure.subplots()
    axes.plot(tokens, losses, color="#9db7dd", linewidth=1, label="a step")
    axes.plot(tokens, means, color="#2458a8", linewidth=2, label=f"mean of the last {_MEAN_OVER} steps")
    axes.set_xlabel("thousand tokens")
    axes.set_ylabel("training loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return as_png(figure)

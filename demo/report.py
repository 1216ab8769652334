"""Tables of the demo, and a one-page report with the loss curves."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from midus_hf.look.page import Section, TextTable, as_png, curves, draw_panels, write_page

_TITLE = "Head-wise memory in a pretrained model"
_CURVES = "Losses while it trains"


def write_report(
    folder: Path,
    *,
    models: dict[str, dict[str, Any]],
    samples: dict[str, dict[str, Any]],
    prompt: str,
    log: Path,
    texts: Mapping[str, str],
    upscale_record: dict[str, Any],
    weights: dict[str, dict[str, Any]],
    commands: list[str],
    seconds: Mapping[str, float],
    machine: str,
) -> str:
    """Write `report.html`, `report.md`, `loss.png` and `report.json`, and return the tables in Markdown.

    Args:
        folder: Folder of the report.
        models: Report of `midus eval` for each model, by its name.
        samples: Text that each model writes after the prompt, and its speed.
        prompt: The prompt.
        log: State of the Trainer, with its log.
        texts: Description of each text that the run evaluated, by its name among `eval_text`.
        upscale_record: Content of `upscale.json`.
        weights: Number, bytes and digest of the base's tensors, and of those that `upscale strip` restored.
        commands: The commands that were run.
        seconds: How long each phase took, also in calls that were interrupted, by name; `training` is one of them.
        machine: Description of the machine.
    """
    if models["base"]["perplexity"] != models["upscaled"]["perplexity"]:
        raise ValueError(
            "the upscaled model's perplexity differs from the base's; expected equality to the last digit."
        )
    base, given_back = weights.values()
    if base != given_back:
        raise ValueError(f"strip gave back {given_back}; expected the base's {base}.")
    events = json.loads(log.read_text(encoding="utf-8"))["log_history"]
    losses = {text: _losses(events, f"eval_{name}_loss") for name, text in texts.items()}
    tables = [_models_table(models, samples), _texts_table(losses), _weights_table(weights), _phases_table(seconds)]
    markdown = "\n\n".join(table.markdown() for table in tables)
    picture = _draw(_losses(events, "loss"), losses)
    (folder / "loss.png").write_bytes(picture)
    new_layers = ", ".join(map(str, upscale_record["new_layers"]))
    summary = (
        f"{len(upscale_record['new_layers'])} memory layers were inserted at {new_layers}; "
        f"{upscale_record['parameters']['trainable']:,} of {upscale_record['parameters']['total']:,} parameters were "
        f"trained. Training, with what it measured, took {seconds['training'] / 60:.1f} minutes, everything below "
        f"{sum(seconds.values()) / 60:.1f}, on {machine}."
    )
    continued = [f"{name}: {sample['text'].strip()}" for name, sample in samples.items()]
    sections = [
        Section("", [summary], tables, {_CURVES: picture}),
        Section(f"Continuing “{prompt}”", continued),
        Section("Commands", ["\n".join(commands)]),
    ]
    write_page(folder / "report.html", _TITLE, sections)
    quoted = [f"**{name}**: {' '.join(sample['text'].split())}" for name, sample in samples.items()]
    parts = [f"# {_TITLE}", summary, markdown, f"![{_CURVES}](loss.png)", *quoted]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    results = {"models": models, "losses": losses, "samples": samples, "weights": weights}
    results |= {"seconds": dict(seconds), "machine": machine}
    (folder / "report.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return markdown


def _losses(events: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    """Return the thousands of tokens that were trained on, and the loss, of each event with a key."""
    return [(event["num_input_tokens_seen"] / 1000, event[key]) for event in events if key in event]


def _models_table(models: dict[str, dict], samples: dict[str, dict]) -> TextTable:
    head = ["", "perplexity of held-out addresses", "parameters", "generated tokens/s"]
    rows = [
        [
            name,
            f"{model['perplexity']['perplexity']:.4f}",
            f"{model['parameters'] / 1e6:.1f} M",
            f"{samples[name]['tokens_per_second']:.1f}",
        ]
        for name, model in models.items()
    ]
    return TextTable("Before and after", head, rows)


def _texts_table(losses: Mapping[str, Sequence[tuple[float, float]]]) -> TextTable:
    ends = {text: (points[0][1], points[-1][1]) for text, points in losses.items()}
    rows = [[text, f"{start:.4f}", f"{end:.4f}", f"{end - start:+.4f}"] for text, (start, end) in ends.items()]
    head = ["", "before training", "after", "change"]
    return TextTable("Losses of texts that are not trained on, as the run measured them (nats per token)", head, rows)


def _weights_table(weights: Mapping[str, Mapping[str, Any]]) -> TextTable:
    rows = [[name, str(one["tensors"]), f"{one['bytes']:,}", one["sha256"][:16]] for name, one in weights.items()]
    head = ["", "tensors", "bytes", "SHA-256 of names, dtypes, shapes and bytes"]
    return TextTable("The base, and what strip takes out of the trained model: equal", head, rows)


def _phases_table(seconds: Mapping[str, float]) -> TextTable:
    rows = [[name, f"{taken / 60:.1f}"] for name, taken in {**seconds, "all": sum(seconds.values())}.items()]
    return TextTable("Minutes, of all calls", ["", "minutes"], rows)


def _draw(training: Sequence[tuple[float, float]], losses: Mapping[str, Sequence[tuple[float, float]]]) -> bytes:
    width = -(-len(training) // 10)  # steps whose losses are averaged, since those of single steps scatter
    groups = [training[first : first + width] for first in range(0, len(training), width)]
    means = [(group[-1][0], fmean(loss for _, loss in group)) for group in groups]

    def line(points: Sequence[tuple[float, float]], start: float = 0.0) -> tuple[list[float], list[float]]:
        return [tokens for tokens, _ in points], [loss - start for _, loss in points]

    changes = {text: line(points, points[0][1]) for text, points in losses.items()}
    x = "thousand tokens trained on"
    panels = {
        "training text": curves({f"means of {width} steps": line(means)}, x, "loss (nats per token)"),
        "texts that are not trained on: below 0 better, above 0 worse": curves(changes, x, "change of the loss"),
    }
    return as_png(draw_panels(panels))

"""The demo's table, and a report of one page with the loss curve."""

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_MEAN_OVER = 10
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Head-wise memory in a pretrained model</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 3rem auto; padding: 0 1rem; color: #1c1e21; }}
table {{ border-collapse: collapse; margin: 1.5rem 0; }}
th, td {{ white-space: nowrap; padding: .35rem .7rem; border-bottom: 1px solid #d8dbe0; text-align: right; }}
th {{ white-space: normal; }}
th:first-child, td:first-child {{ text-align: left; }}
img {{ max-width: 100%; }}
pre, blockquote {{ background: #f4f5f7; padding: .8rem 1rem; margin: .5rem 0 1rem; overflow-x: auto; white-space: pre-wrap; }}
</style>
<h1>Head-wise memory in a pretrained model</h1>
<p>{summary}</p>
{table}
<img alt="Training loss" src="data:image/png;base64,{curve}">
<h2>Continuing &ldquo;{prompt}&rdquo;</h2>
{samples}
<h2>Commands</h2>
<pre>{commands}</pre>
</html>
"""


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
    """Write `report.html`, `report.md`, `loss.png` and `results.json`.

    Args:
        folder: An existing folder.
        models: What `midus eval` measured, by the name of the row.
        samples: What each model wrote, and how fast.
        prompt: What they continued.
        log: The log of the training run.
        upscale_record: `upscale.json` of the upscaled model.
        commands: What was run.
        seconds: Wall time of all of it.

    Returns:
        The table, as Markdown.

    Raises:
        ValueError: If the upscaled model does not measure exactly what the base does.
    """
    for measure in ("perplexity", "tasks"):
        if _timeless(models["base"][measure]) != _timeless(models["upscaled"][measure]):
            raise ValueError(
                f"the upscaled model's {measure} differ from the base's; expected equality to the last digit."
            )
    head, rows = _table(models, samples)
    markdown = "\n".join(
        [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    )
    curve = _loss_curve(log)
    (folder / "loss.png").write_bytes(curve)
    new_layers = ", ".join(map(str, upscale_record["new_layers"]))
    summary = (
        f"{len(upscale_record['new_layers'])} memory blocks were inserted at layers {new_layers}; "
        f"{upscale_record['parameters']['trainable']:,} of {upscale_record['parameters']['total']:,} parameters were "
        f"trained. Everything below took {seconds / 60:.1f} minutes on this machine."
    )
    page = _PAGE.format(
        summary=html.escape(summary),
        table=_html_table(head, rows),
        curve=base64.b64encode(curve).decode(),
        prompt=html.escape(prompt),
        samples="".join(
            f"<h3>{name}</h3><blockquote>{html.escape(sample['text'].strip())}</blockquote>"
            for name, sample in samples.items()
        ),
        commands=html.escape("\n".join(commands)),
    )
    (folder / "report.html").write_text(page, encoding="utf-8")
    quoted = [f"**{name}**: {' '.join(sample['text'].split())}" for name, sample in samples.items()]
    parts = ["# Head-wise memory in a pretrained model", summary, markdown, "![Training loss](loss.png)", *quoted]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    results = {"models": models, "samples": samples, "seconds": seconds}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return markdown


def _timeless(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in measured.items() if key not in ("seconds", "tokens_per_second")}


def _table(models: dict[str, dict], samples: dict[str, dict]) -> tuple[list[str], list[list[str]]]:
    tasks = list(next(iter(models.values()))["tasks"])
    head = [
        "",
        "perplexity of held-out addresses",
        *(f"{task} accuracy" for task in tasks),
        "parameters",
        "generated tokens/s",
    ]
    rows = [
        [
            name,
            f"{model['perplexity']['perplexity']:.4f}",
            *(_accuracy(model["tasks"][task]) for task in tasks),
            f"{model['parameters'] / 1e6:.1f} M",
            f"{samples[name]['tokens_per_second']:.1f}",
        ]
        for name, model in models.items()
    ]
    return head, rows


def _accuracy(scores: dict[str, Any]) -> str:
    return f"{scores['acc_norm']:.3f} ± {scores['acc_norm_stderr']:.3f}"


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join(lines) + "</table>"


def _loss_curve(log: Path) -> bytes:
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    events = [event for event in events if "loss" in event]
    tokens = [event["num_input_tokens_seen"] / 1000 for event in events]
    losses = [event["loss"] for event in events]
    means = [sum(losses[max(0, i - _MEAN_OVER + 1) : i + 1]) / min(i + 1, _MEAN_OVER) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(7.5, 3.6), dpi=120)
    axes.plot(tokens, losses, color="#9db7dd", linewidth=1, label="a step")
    axes.plot(tokens, means, color="#2458a8", linewidth=2, label=f"mean of the last {_MEAN_OVER} steps")
    axes.set_xlabel("thousand tokens")
    axes.set_ylabel("training loss (nats per token)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, format="png")
    plt.close(figure)
    return image.getvalue()

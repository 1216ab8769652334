"""The section on training in the card of a trained model."""

from pathlib import Path

import yaml

from midus_hf.training.output.output_folder import as_yaml
from midus_hf.training.run_options import RunOptions


def add_training(
    card: bytes, config: RunOptions, steps: int, tokens: int, loss: float | None, best_step: int | None = None
) -> bytes:
    """Append the section "Trained with" to a model card.

    The card shows only the last part of local paths, since cards are made to be shared.

    Args:
        card: The `README.md` of the model that was trained, in UTF-8.
        config: Options of the run, which the card shows without locations of local files.
        steps: Number of optimizer steps.
        tokens: Number of tokens trained on.
        loss: Mean loss of the last log event; None if nothing was logged.
        best_step: Step whose model was saved, chosen by held-out text. Default: None, the last step.
    """
    final_loss = "not logged" if loss is None else f"{loss:.4f}"
    note_on_best_step = ""
    if best_step is not None and best_step != steps:
        text = f"the held-out text {name}" if (name := next(iter(config.eval_texts), "")) else "held-out text"
        note_on_best_step = f"\nThe weights are those after step {best_step:,}, where {text} was predicted best.\n"
    section = f"""

## Trained with

| steps | tokens | final loss |
|---|---|---|
| {steps:,} | {tokens:,} | {final_loss} |
{note_on_best_step}
```yaml
{as_yaml(config.to_share(_label))}```
"""
    return card.rstrip() + section.encode()


def new_card(config: RunOptions) -> bytes:
    """Return the card of a model made from a config, without the section on training; the card names no base."""
    assert config.config_name is not None
    metadata = yaml.safe_dump(
        {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["midus_hf"]}, sort_keys=False
    )
    text = f"""---
{metadata}---

# {Path(config.output_dir).name}

Trained from the beginning: the weights were made at random by seed {config.seed}, for the config `{_label(config.config_name)}`. The
model is based on no other.
"""
    return text.encode()


def _label(name: str) -> str:
    path = Path(name).expanduser()
    return path.resolve().name if path.exists() else name

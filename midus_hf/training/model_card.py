"""What the card of a trained model says about its training."""

import dataclasses
from pathlib import Path
from typing import Any

from midus_hf.training.options import TrainConfig
from midus_hf.training.output_folder import as_yaml


def add_training(
    card: bytes, config: TrainConfig, steps: int, tokens: int, loss: float | None, best_step: int | None = None
) -> bytes:
    """Append the section "Trained with" to a model card.

    Of local paths the card tells the last part alone: it is made to be shared.

    Args:
        card: The `README.md` of the model that was trained, in UTF-8.
        config: The options of the run.
        steps: Optimizer steps.
        tokens: Tokens trained on.
        loss: Mean loss of the last log event, if there was one.
        best_step: The step whose model it is, chosen by held-out text. Default: the last.
    """
    final_loss = "not logged" if loss is None else f"{loss:.4f}"
    chosen = ""
    if best_step is not None and best_step != steps:
        chosen = f"\nThe weights are those after step {best_step:,}, where held-out text was predicted best.\n"
    section = f"""

## Trained with

| steps | tokens | final loss |
|---|---|---|
| {steps:,} | {tokens:,} | {final_loss} |
{chosen}
```yaml
{as_yaml(_without_local_paths(config))}```
"""
    return card.rstrip() + section.encode()


def _without_local_paths(config: TrainConfig) -> TrainConfig:
    def label(name: str) -> str:
        path = Path(name).expanduser()
        return path.resolve().name if path.exists() else name

    corpora = [dataclasses.replace(corpus, path=label(corpus.path), cache_dir=None) for corpus in config.corpora]
    corpus: Any = corpora if isinstance(config.corpus, list) else corpora[0]
    return dataclasses.replace(
        config,
        model=label(config.model),
        output=label(config.output),
        # Where the model would have gone is of no interest to whom it is shared with.
        output_on_failure=None,
        eval_text=None if config.eval_text is None else label(config.eval_text),
        corpus=corpus,
        resume=bool(config.resume),
    )

"""What the card of a trained model says about its training."""

from midus_hf.training.options import TrainConfig
from midus_hf.training.output_folder import as_yaml


def add_training(card: bytes, config: TrainConfig, steps: int, tokens: int, loss: float | None) -> bytes:
    """Append the section "Trained with" to a model card.

    Args:
        card: The `README.md` of the model that was trained, in UTF-8.
        config: The options of the run.
        steps: Optimizer steps.
        tokens: Tokens trained on.
        loss: Mean loss of the last log event, if there was one.
    """
    final_loss = "not logged" if loss is None else f"{loss:.4f}"
    section = f"""

## Trained with

| steps | tokens | final loss |
|---|---|---|
| {steps:,} | {tokens:,} | {final_loss} |

```yaml
{as_yaml(config)}```
"""
    return card.rstrip() + section.encode()

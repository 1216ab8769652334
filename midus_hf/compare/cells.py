"""One arm at one rate with one seed: what it runs, and where."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from midus_hf.compare.arms import Arm
from midus_hf.compare.options import Comparison
from midus_hf.compare.rates import Rate, rate_name
from midus_hf.config.options import finite_number


@dataclasses.dataclass(frozen=True)
class Cell:
    """A run of a comparison.

    Args:
        arm: What is trained.
        rate: One of its rates.
        seed: Of new parameters and of the order of texts.
    """

    arm: Arm
    rate: Rate
    seed: int

    @property
    def name(self) -> str:
        """Its path within the comparison's `cells`."""
        return f"{self.arm.name}/{rate_name(self.rate)}/seed-{self.seed}"

    @property
    def upscaled_name(self) -> str | None:
        """Of the upscaled model, which cells that differ in their training alone share; None if it trains the base."""
        if self.arm.upscale is None:
            return None
        return f"{self.arm.control_of or self.arm.name}-{_digest(dict(self.arm.upscale))}-seed-{self.seed}"

    def training_keys(self, comparison: Comparison, model: Path | str, output: Path) -> dict[str, Any]:
        """Keys of `midus train`.

        Args:
            comparison: What it belongs to.
            model: What is trained.
            output: Folder of the run.

        Raises:
            ValueError: If it cannot be told how often texts are measured.
        """
        keys = {
            **self.arm.train,
            **self.rate,
            "model_name_or_path": str(model),
            "output_dir": str(output),
            "seed": self.seed,
        }
        if comparison.seconds is not None:
            keys["max_seconds"] = comparison.seconds
        if not comparison.texts:
            return keys
        if keys.get("eval_steps") is None:
            if keys.get("max_steps") is None:
                raise ValueError(
                    f"arms.{self.arm.name} has no max_steps, by which texts would be measured {comparison.evaluations} times; set "
                    "train.max_steps, or train.eval_steps, the steps between measurements."
                )
            # YAML takes 1e3 for text. What is no number at all is left to midus train's own words.
            steps = finite_number(keys["max_steps"])
            keys["eval_steps"] = 1 if steps is None else max(1, int(steps) // comparison.evaluations)
        keys.setdefault("save_steps", keys["eval_steps"])
        keys.setdefault("save_total_limit", 1)
        return {**keys, "eval_text": comparison.texts}

    def fine_tuning_keys(self, model: Path | str, output: Path) -> dict[str, Any]:
        """Keys of `midus sft`.

        Args:
            model: What is fine-tuned.
            output: Folder of the run.
        """
        assert self.arm.fine_tune is not None, "asked for"
        return {**self.arm.fine_tune, "model_name_or_path": str(model), "output_dir": str(output), "seed": self.seed}

    def request(self, comparison: Comparison) -> dict[str, Any]:
        """All that its result depends on."""
        tuning = {} if self.arm.fine_tune is None else {"fine_tune": self.fine_tuning_keys("", Path())}
        return {
            **tuning,
            "base": comparison.base,
            "upscale": None if self.arm.upscale is None else dict(self.arm.upscale),
            "train": self.training_keys(comparison, "", Path()),
            "tasks": None if comparison.tasks is None else dataclasses.asdict(comparison.tasks),
        }


def cells_of(arm: Arm, comparison: Comparison) -> list[Cell]:
    """The cells of an arm, seed by seed.

    Args:
        arm: Of the comparison.
        comparison: Which has the seeds.
    """
    return [Cell(arm, rate, seed) for seed in comparison.seeds for rate in arm.rates]


def changed_keys(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Names of what differs between two requests.

    Args:
        before: A request, or part of one.
        now: The other.
        prefix: What stands before a name. Default: nothing.
    """
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [prefix or "all"]
    missing = object()
    return [
        name
        for key in {**before, **now}
        for name in changed_keys(
            before.get(key, missing), now.get(key, missing), f"{prefix}.{key}" if prefix else str(key)
        )
    ]


def _digest(keys: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(keys, sort_keys=True, default=str).encode()).hexdigest()[:8]

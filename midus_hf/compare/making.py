"""The models of a run: how they are upscaled and trained, and what is known of them afterwards."""

import dataclasses
import gc
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.functions import teach
from midus_hf.compare.variants import Variant
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.checkpoint_files import CERTIFICATE


@dataclasses.dataclass(frozen=True)
class UpscaledModel:
    """An upscaled model: its config, and the fields of a `Result` that its making gives."""

    config: Mapping[str, Any]
    measured: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model: how many parameters and tokens it was trained on, its cost, and the events of the training log."""

    parameters: int
    tokens: int
    seconds: float
    peak_memory_bytes: int
    events: Sequence[Mapping[str, Any]]


def upscaled_model(base: str, output: Path, seed: int, keys: Mapping[str, Any]) -> UpscaledModel:
    """Upscale a model with keys of `upscale --config`, and return what is known of the new one."""
    from upscalers.runs.upscale import upscale

    report = upscale(base=base, output=str(output), seed=seed, **keys)
    difference = report.identity.max_abs_diff
    config = json.loads((output / "config.json").read_text(encoding="utf-8"))
    measured = {
        "new_parameters": report.parameters.new,
        "starts_at_base": None if difference is None else difference == 0.0,
        "is_causal": config["upscale"].get("causal", True),
    }
    return UpscaledModel(config, measured)


def made_together(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a `Result` that several upscalings of one run give together, from the fields of each upscaling."""
    starts = [one["starts_at_base"] for one in made]
    return {
        "new_parameters": sum(one["new_parameters"] for one in made),
        "starts_at_base": False if False in starts else None if None in starts else True,
        "is_causal": all(one["is_causal"] for one in made),
    }


def trained_model(keys: Mapping[str, Any]) -> TrainedModel:
    """Train a model with keys of `midus train`, and return what is known of the trained model."""
    from midus_hf.training.arguments import TrainArguments
    from midus_hf.training.run import train

    outcome = train(from_mapping(TrainArguments, keys))
    steps = finite_number(keys.get("max_steps", -1))
    if steps is not None and outcome.steps < steps:
        raise ValueError(
            f"training ended after {outcome.steps} of {steps:g} steps: the corpus has fewer sequences than a batch; expected more "
            "text, or a smaller per_device_train_batch_size."
        )
    last = outcome.log[-1]
    seconds = [event["train_runtime"] for event in outcome.log if "train_runtime" in event]
    free_memory()
    return TrainedModel(
        last["trained_parameters"], outcome.tokens, seconds[-1], last["peak_memory_bytes"], outcome.log
    )


def taught_model(variant: Variant, base: str, output: Path, seed: int, keys: Mapping[str, Any]) -> TrainedModel:
    """Let the function of a variant make a model from a base, and return what is known of the model.

    `keys` are the variant's keys of `midus train`, with corpus and rate.
    """
    from midus_hf.training.run import peak_memory_bytes

    assert variant.function is not None
    started = time.perf_counter()
    counts = teach(variant.name, variant.function, base, output, seed, keys)
    seconds, peak = time.perf_counter() - started, peak_memory_bytes()
    free_memory()
    return TrainedModel(counts["trained_parameters"], counts["tokens"], seconds, peak, [])


def certificate_of(model: Path) -> dict[str, Any] | None:
    """Return the content of the certificate beside a trained model; None if there is none."""
    file = model / CERTIFICATE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def free_memory() -> None:
    """Free the memory of models that were measured, on GPUs too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""The models of a run: upscaled, trained by `midus train` or by a person's function, and what is known of them afterwards.

A function is called as `teach(base=DIR, corpus=PATH, output=DIR, seed=INT, keys={...})`, where `keys` are the keys of `midus train`
that its variant has, the rate among them. It writes a model that `AutoModelForCausalLM` loads, or adapters of PEFT, to `output`, and
returns `{"trained_parameters": N, "tokens": M}`.
"""

import dataclasses
import gc
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import split_function
from midus_hf.compare.results import Point, Result
from midus_hf.compare.runs import Run
from midus_hf.compare.variants import Variant
from midus_hf.config.options import finite_number
from midus_hf.config.yaml_options import from_mapping
from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, CONFIG_FILE

_RETURNED = ("trained_parameters", "tokens")


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model: how many parameters and tokens it was trained on, its cost, and the events of the training log."""

    parameters: int
    tokens: int
    seconds: float
    peak_memory_bytes: int
    events: Sequence[Mapping[str, Any]]


def upscaled_model(
    base: str, output: Path, seed: int, keys: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Upscale a model with keys of `upscale --config`, and return its config, and the fields of a `Result` that follow."""
    from upscalers.runs.upscale import upscale

    report = upscale(base=base, output=str(output), seed=seed, **keys)
    difference = report.identity.max_abs_diff
    config = json.loads((output / CONFIG_FILE).read_text(encoding="utf-8"))
    return config, {
        "new_parameters": report.parameters.new,
        "starts_at_base": None if difference is None else difference == 0.0,
        "is_causal": config["upscale"].get("causal", True),
    }


def made_together(made: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a `Result` that several upscalings of one run give together, from the fields of each; none of none."""
    if not made:
        return {}
    starts = [one["starts_at_base"] for one in made]
    return {
        "new_parameters": sum(one["new_parameters"] for one in made),
        "starts_at_base": False if False in starts else None if None in starts else True,
        "is_causal": all(one["is_causal"] for one in made),
    }


def trained_model(keys: Mapping[str, Any]) -> TrainedModel:
    """Train a model with keys of `midus train`, and return what is known of the trained model.

    Raises:
        ValueError: If the corpus ended before the last step.
    """
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

    Adapters are merged into the base, and a model without a tokenizer gets the base's.

    Args:
        variant: Variant with a function.
        base: Folder or Hub id of the base.
        output: Folder that the function writes the model to, which does not exist.
        seed: Seed of the run.
        keys: Keys of `midus train` of the run, with `corpus` and the rate.

    Raises:
        ValueError: If the function returns no counts, or wrote no model.
    """
    from midus_hf.saved_models import load_tokenizer
    from midus_hf.training.run import peak_memory_bytes

    assert variant.function is not None
    started = time.perf_counter()
    teach = _load(variant.function)
    returned = teach(base=base, corpus=keys["corpus"], output=str(output), seed=seed, keys=dict(keys))
    counts = returned if isinstance(returned, Mapping) else {}
    if not all(isinstance(counts.get(name), int) and counts[name] >= 0 for name in _RETURNED):
        raise ValueError(
            f"variants.{variant.name}.function returned {returned!r}; expected a mapping with the whole numbers "
            f"{' and '.join(_RETURNED)}."
        )
    if (output / ADAPTER_CONFIG).is_file() and not (output / CONFIG_FILE).is_file():
        from peft import AutoPeftModelForCausalLM

        adapted = AutoPeftModelForCausalLM.from_pretrained(output, dtype="auto", trust_remote_code=False)
        adapted.merge_and_unload().save_pretrained(output)
    if not (output / CONFIG_FILE).is_file():
        raise ValueError(
            f"variants.{variant.name}.function wrote no {CONFIG_FILE} to its output; expected a model, as save_pretrained writes it."
        )
    if not (output / "tokenizer_config.json").is_file():
        load_tokenizer(base).save_pretrained(output)
    seconds, peak = time.perf_counter() - started, peak_memory_bytes()
    free_memory()
    return TrainedModel(int(counts["trained_parameters"]), int(counts["tokens"]), seconds, peak, [])


def result_of(run: Run, curve: list[Point], learned: Sequence[TrainedModel], **measured: Any) -> Result:
    """Return the result of a run, with the trained parameters of one stage if it learned several models.

    Args:
        run: Run whose variant, rate and seed the result names.
        curve: Losses of the texts, by rising steps.
        learned: The trained model; of stages, the model after each of them.
        measured: Further fields of the result.
    """
    return Result(
        variant=run.variant.name,
        rate=dict(run.rate),
        seed=run.seed,
        curve=curve,
        control=run.variant.control,
        control_of=run.variant.control_of,
        trained_parameters=max(one.parameters for one in learned),
        tokens=sum(one.tokens for one in learned),
        seconds=sum(one.seconds for one in learned),
        peak_memory_bytes=max(one.peak_memory_bytes for one in learned),
        **measured,
    )


def free_memory() -> None:
    """Free the memory of models that were measured, on GPUs too."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load(function: str) -> Callable[..., Any]:
    """Run the file of a function, and return the function."""
    file, name = split_function(function)
    specification = importlib.util.spec_from_file_location("midus_compared_function", file)
    assert specification is not None and specification.loader is not None, "the file is one of Python"
    module = importlib.util.module_from_spec(specification)
    # As for a script: what the file defines finds its module, and what lies beside the file can be imported.
    sys.modules[specification.name] = module
    sys.path.insert(0, str(file.absolute().parent))
    specification.loader.exec_module(module)
    loaded: Callable[..., Any] = getattr(module, name)
    return loaded

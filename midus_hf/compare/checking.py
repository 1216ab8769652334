"""Checks of a comparison before anything runs."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import Comparison
from midus_hf.compare.runs import runs_of
from midus_hf.compare.variants import Variant
from midus_hf.config.yaml_options import from_mapping
from midus_hf.sft.options import SftConfig
from midus_hf.training.optim.rates import Rates
from midus_hf.training.options import TrainConfig
from midus_hf.training.run.held_out import check_held_out

# Keys of `midus train` that hold a learning rate: the numeric fields of `Rates`.
_RATES = [field.name for field in dataclasses.fields(Rates) if isinstance(field.default, float | None)]


def check(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that a comparison can be run: it has domain texts, all of its texts exist, and `check_runs` accepts its runs.

    Args:
        comparison: Comparison that `plan` returned.
        variants: Variants that `plan` returned.

    Raises:
        ValueError: If there is no domain text, a text does not exist, or `check_runs` raises.
    """
    if not comparison.domain:
        raise ValueError("domain is empty; expected held-out text by which learning is measured, by name.")
    for kind in ("domain", "retention"):
        for name, path in getattr(comparison, kind).items():
            if not Path(path).exists():
                raise ValueError(
                    f"{kind}.{name} is {path!r}, which does not exist; expected a file or a folder of text."
                )
    check_runs(comparison, variants)


def check_runs(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that `midus train`, and `midus sft` after it, accept the keys of every run.

    Args:
        comparison: Comparison that `plan` returned.
        variants: Variants that `plan` returned.

    Raises:
        ValueError: If a key is unknown or a value out of range, a variant measures texts with another `eval_max_tokens` than the
            comparison, or the output folder is a file.
    """
    assert isinstance(comparison.train, Mapping), "files have been read"
    output = Path(comparison.output_dir)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir is {comparison.output_dir!r}, a file; expected a folder.")
    for variant in variants:
        for key in {key for rate in variant.rates for key in rate}:
            if key not in _RATES:
                raise ValueError(f"variants.{variant.name} has a rate {key!r}; expected one of: {', '.join(_RATES)}.")
        own, shared = variant.train.get("eval_max_tokens"), comparison.train.get("eval_max_tokens")
        if own != shared:
            raise ValueError(
                f"variants.{variant.name}.train.eval_max_tokens is {own}, and train.eval_max_tokens is {shared}; expected the same, "
                "since all variants are measured alike. Set train.eval_max_tokens."
            )
        for run in runs_of(variant, comparison):
            keys = run.training_keys(comparison, model="model", output=Path("trained"))
            _check_keys(variant, "midus train", TrainConfig, keys)
            if variant.fine_tune is not None:
                _check_keys(variant, "midus sft", SftConfig, run.fine_tuning_keys("model", Path("tuned")))


def _check_keys(variant: Variant, command: str, options: type[Any], keys: Mapping[str, Any]) -> None:
    try:
        check_held_out(from_mapping(options, keys))
    except ValueError as error:
        raise ValueError(f"variants.{variant.name}, as a run of {command}: {error}") from error

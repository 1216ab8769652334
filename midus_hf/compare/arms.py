"""What is compared, ready to run: files read, sizes fitted, parameters counted."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.compare.options import (
    OWN_FINE_TUNING_KEYS,
    OWN_TRAINING_KEYS,
    OWN_UPSCALING_KEYS,
    ArmOptions,
    Comparison,
)
from midus_hf.compare.rates import Rate, as_keys
from midus_hf.config.wording import near_matches


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method, or a way to train the base.

    Args:
        name: Of the arm.
        upscale: Keys of `upscale --config`; None where the base itself is trained.
        train: Keys of `midus train`.
        rates: At each of which it is trained.
        controls: Which null controls are put beside it; true for all that its memory has.
        new_parameters: Parameters that the base does not have.
        trained_parameters: Parameters that the method trains; None where only training knows.
        fitted: What was chosen to meet the budget of parameters, such as `num_new_layers=4`. Default: nothing.
        fine_tune: Keys of `midus sft`. Default: none, trained models are not fine-tuned.
        control: Which null control it is. Default: none.
        control_of: Of which arm. Default: none.
    """

    name: str
    upscale: Mapping[str, Any] | None
    train: Mapping[str, Any]
    rates: Sequence[Rate]
    controls: Sequence[str] | bool
    new_parameters: int = 0
    trained_parameters: int | None = None
    fitted: str | None = None
    fine_tune: Mapping[str, Any] | None = None
    control: str | None = None
    control_of: str | None = None


def plan(comparison: Comparison) -> tuple[Comparison, list[Arm]]:
    """Read the files that a comparison names, and size its arms; nothing is written.

    Returns:
        The comparison without names of files, and its arms in their order.

    Raises:
        ValueError: If a key is unknown or not an arm's to give, a file cannot be read, or a method refuses the base.
    """
    shared = _keys("train", comparison.train, OWN_TRAINING_KEYS)
    tuning = None
    if comparison.fine_tune is not None:
        tuning = _keys("fine_tune", comparison.fine_tune, OWN_FINE_TUNING_KEYS)
    comparison = dataclasses.replace(comparison, train=shared, fine_tune=tuning)
    return comparison, [_planned(name, options, comparison, shared) for name, options in comparison.arms.items()]


def upscaled_sizes(base: str, keys: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters that an upscaling adds, and that its method trains, by a dry run.

    Args:
        base: Folder or Hub id.
        keys: Of `upscale --config`.

    Raises:
        ValueError: If the method refuses the base.
    """
    from upscalers.runs.upscale import upscale

    counts = upscale(base=base, dry_run=True, **keys).parameters
    return counts.new, counts.trainable


def _planned(name: str, options: ArmOptions, comparison: Comparison, shared: Mapping[str, Any]) -> Arm:
    train: dict[str, Any] = {**shared, **_keys(f"arms.{name}.train", options.train, OWN_TRAINING_KEYS)}
    rates = options.rates or comparison.rates
    arm = Arm(
        name=name,
        upscale=None,
        train=train,
        fine_tune=_fine_tuning(name, options, comparison),
        rates=[{}] if rates is None else [as_keys(rate) for rate in rates],
        controls=comparison.controls if options.controls is None else options.controls,
    )
    if options.upscale is None:
        # A base does not say what trains of it; adapters do.
        return arm if train.get("adapters") else dataclasses.replace(arm, train={"trainable": "all", **train})
    keys = _keys(f"arms.{name}.upscale", options.upscale, OWN_UPSCALING_KEYS)
    sized = [
        (*_sizes(name, comparison.base, tried, word), tried, word)
        for tried, word in _candidates(name, keys, options.fit)
    ]
    budget = comparison.trained_parameters
    new, trained, keys, word = min(sized, key=lambda one: abs(one[1] - budget)) if options.fit and budget else sized[0]
    return dataclasses.replace(arm, upscale=keys, new_parameters=new, trained_parameters=trained, fitted=word)


def _fine_tuning(name: str, options: ArmOptions, comparison: Comparison) -> dict[str, Any] | None:
    own = _keys(f"arms.{name}.fine_tune", options.fine_tune, OWN_FINE_TUNING_KEYS)
    if comparison.fine_tune is None:
        if own:
            raise ValueError(
                f"arms.{name}.fine_tune is given, and fine_tune of all is not; expected it, since all or none are."
            )
        return None
    return {**_keys("fine_tune", comparison.fine_tune, OWN_FINE_TUNING_KEYS), **own}


def _keys(where: str, given: Mapping[str, Any] | str | None, own: Sequence[str]) -> dict[str, Any]:
    """The keys of a mapping or a file, without those that a comparison sets."""
    if isinstance(given, str):
        from midus_hf.config.yaml_options import read_mapping

        given = {key: value for key, value in read_mapping(Path(given)).items() if key not in own}
    _check_own(where, given or {}, own)
    return dict(given or {})


def _check_own(where: str, keys: Mapping[str, Any], own: Sequence[str]) -> None:
    for key in keys:
        if key in own:
            raise ValueError(f"{where} has {key!r}, which the comparison sets for each run; leave it out.")


def _check_upscaling(name: str, keys: Mapping[str, Any]) -> None:
    known = (
        "method",
        "num_new_layers",
        "placement",
        "options",
        "dtype",
        "max_shard_size",
        "verify",
        "allow_nan",
    )
    if "revision" in keys:
        raise ValueError(
            f"arms.{name}.upscale has 'revision', but what is measured and trained beside it would be another revision of the base; "
            "leave it out, and give a folder with that revision as base."
        )
    for key in keys:
        if key not in known:
            raise ValueError(f"arms.{name}.upscale has no option {key!r}. {near_matches(str(key), list(known))}")
    if "method" not in keys:
        raise ValueError(f"arms.{name}.upscale has no 'method'; name one, as 'upscale methods' lists them.")
    if not isinstance(keys.get("options"), dict | None):
        raise ValueError(f"arms.{name}.upscale.options is {keys['options']!r}; expected a mapping.")


def _sizes(name: str, base: str, keys: Mapping[str, Any], fitted: str | None) -> tuple[int, int]:
    where = f"arms.{name}.upscale" if fitted is None else f"arms.{name}.upscale with {fitted}"
    _check_own(f"arms.{name}.upscale", keys, OWN_UPSCALING_KEYS)
    _check_upscaling(name, keys)
    try:
        return upscaled_sizes(base, keys)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _candidates(
    name: str, keys: Mapping[str, Any], fit: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Keys of `upscale` with each value of the one that is fitted, and words for it."""
    if not fit:
        yield dict(keys), None
        return
    ((path, values),) = fit.items()
    for value in values:
        tried: dict[str, Any] = copy.deepcopy(dict(keys))
        *outer, last = path.split(".")
        inner = tried
        for part in outer:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ValueError(f"arms.{name}.fit names {path!r}, but {part!r} of upscale has no keys of its own.")
        inner[last] = value
        yield tried, f"{path}={value}"

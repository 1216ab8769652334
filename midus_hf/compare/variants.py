"""Variants of a comparison, ready to run, with their files read and parameters counted; and their null controls."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import UpscaleRecord, language_entry, record_of
from midus_hf.compare.options import Comparison, Rate, as_keys, rate_name
from midus_hf.config.errors import RequestError, name_in_request_errors
from midus_hf.config.wording import one_of
from midus_hf.config.yaml_options import read_mapping
from midus_hf.memories.controls import controls_of
from midus_hf.memories.hierarchical.options import HierarchicalOptions
from midus_hf.memories.registry import MEMORY_TYPES, memory_type, sample_tensors
from midus_hf.sources.names import saved_config
from midus_hf.training.keys import short_run_rates, trains_new_parts

BASE = "base"  # its name among runs: it is measured, and not trained

# Keys of `midus train` and of `upscale` that the comparison sets itself: they are dropped from recipes, and refused in mappings.
_OWN_TRAINING_KEYS = ("model_name_or_path", "output_dir", "seed", "eval_text", "resume_from_checkpoint")
_OWN_UPSCALING_KEYS = ("base", "output", "seed", "dry_run", "json", "overwrite", "push_to_hub", "private")
_KEYS = ["method", "num_new_layers", "placement", "options", "dtype", "max_shard_size", "verify"]  # of `upscale`

# Keys of `midus train` with the rate of values, in the order in which they count.
_RATES_OF_VALUES = ("value_learning_rate", "key_value_learning_rate")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of a comparison: keys of `upscale --config`, None if the base itself is trained, and keys of `midus train`.

    The variant named `base` is the base itself, which is only measured. A null control is called `VARIANT+CONTROL`;
    `control` and `control_of` are its two names. `trained_parameters` is None if only training knows.
    """

    name: str
    upscale: Mapping[str, Any] | None
    train: Mapping[str, Any]
    rates: Sequence[Rate]
    new_parameters: int = 0
    trained_parameters: int | None = None
    control: str | None = None
    control_of: str | None = None

    @property
    def is_base(self) -> bool:
        """True if this is the base, which is measured and not trained."""
        return self.name == BASE


def plan(comparison: Comparison) -> tuple[Comparison, list[Variant]]:
    """Return a comparison with the contents of files in place of their names, and its variants, whose parameters are counted.

    Raises:
        RequestError: If a key is unknown or set by the comparison itself, a file cannot be read, or a method refuses the base.
    """
    shared = _keys("train", comparison.train, _OWN_TRAINING_KEYS)
    comparison = dataclasses.replace(comparison, train=shared)
    variants = [_planned(name, comparison, shared) for name in comparison.variants]
    read = {
        variant.name: dataclasses.replace(comparison.variants[variant.name], rates=[*map(dict, variant.rates)])
        for variant in variants
        if any(variant.rates)
    }
    return dataclasses.replace(comparison, variants={**comparison.variants, **read}), variants


def _planned(name: str, comparison: Comparison, shared: Mapping[str, Any]) -> Variant:
    """Return a variant, sized by a dry run; `shared` are the keys that all variants train with."""
    from upscalers.methods.contract import get_method
    from upscalers.runs.upscale import upscale

    options = comparison.variants[name]
    train: dict[str, Any] = {**shared, **_keys(f"variants.{name}.train", options.train, _OWN_TRAINING_KEYS)}
    listed = options.rates or comparison.rates or [{}]
    if options.upscale is None:
        # A plain base does not record which parameters to train: all are trained, unless the recipe differs or trains adapters.
        train = train if train.get("adapters") else {"trainable": "all", **train}
        base = saved_config(comparison.base)
        types = [memory_type(entry.get("type")).type for entry in language_entry(base).get("memory") or []]
        rates = _rates(train, (record_of(base) or UpscaleRecord()).trainable, types, listed)
        return Variant(name, None, train, rates)
    keys = _keys(f"variants.{name}.upscale", options.upscale, _OWN_UPSCALING_KEYS)
    for key in keys:
        if key not in _KEYS:
            raise RequestError(f"variants.{name}.upscale has no option {key!r}. {one_of(_KEYS)}")
    if "method" not in keys:
        raise RequestError(f"variants.{name}.upscale has no 'method'; name one, as 'upscale methods' lists them.")
    if not isinstance(keys.get("options"), dict | None):
        raise RequestError(f"variants.{name}.upscale.options is {keys['options']!r}; expected a mapping.")
    with name_in_request_errors(f"variants.{name}.upscale"):
        sizes = upscale(base=comparison.base, dry_run=True, **keys).parameters
    rates = _rates(train, get_method(keys["method"]).trainable, _memory_types(keys), listed)
    return Variant(name, keys, train, rates, sizes.new, sizes.trainable)


def _keys(where: str, keys: Mapping[str, Any] | str | None, reserved: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a mapping or a recipe. Of a recipe, keys that the comparison sets are dropped; in a mapping, they raise."""
    if isinstance(keys, str):
        with name_in_request_errors(f"{where} names a file"):
            return {key: value for key, value in read_mapping(Path(keys)).items() if key not in reserved}
    for key in keys or {}:
        if key in reserved:
            raise RequestError(f"{where} has {key!r}, which the comparison sets for each run; leave it out.")
    return dict(keys or {})


def _rates(train: Mapping[str, Any], trainable: str | None, types: Sequence[str], rates: Sequence[Any]) -> list[Rate]:
    """Return rates as keys of `midus train`. A plain number is the rate of new parameters; values of memories learn faster.

    It is the rate of everything if no values are trained, if their rate is among the keys, or if more than new parameters is
    trained, by the `trainable` that upscaling recorded, None for a plain model.
    """
    has_value_rate = any(train.get(key) is not None for key in _RATES_OF_VALUES)
    apart = _learn_values(types) and trains_new_parts(train, trainable) and not has_value_rate
    return [as_keys(rate) if isinstance(rate, Mapping) or not apart else short_run_rates(rate) for rate in rates]


def _learn_values(types: Sequence[str]) -> bool:
    """Return whether one of some types of memory has values, or blocks that texts fetch, which learn at the rate of values."""
    known = [MEMORY_TYPES[each] for each in types if each in MEMORY_TYPES]
    tensors = [tensor for each in known for _, tensor in sample_tensors(each)]
    return any(tensor.role == "value" for tensor in tensors) or any(
        issubclass(each, HierarchicalOptions) for each in known
    )


def _memory_types(upscale: Mapping[str, Any] | None) -> list[str]:
    """Return the types of memory that an upscaling with these keys may add."""
    from upscalers.methods.contract import get_method

    method = None if upscale is None else get_method(upscale["method"])
    return [memory_type for _, memory_type in getattr(method, "positions", list)()]


def rate_words(rate: Rate, train: Mapping[str, Any], upscale: Mapping[str, Any] | None) -> str:
    """Return the name of a rate, with the rate of values that the keys of a run give an added memory, if the name lacks it."""
    if "value_learning_rate" in rate or not _learn_values(_memory_types(upscale)):
        return rate_name(rate)
    keys = {**train, **rate}
    values = next((keys[key] for key in (*_RATES_OF_VALUES, "learning_rate") if keys.get(key) is not None), None)
    return rate_name(rate) if values is None else f"{rate_name(rate)} (values {float(values):g})"


# The null control that is not trained: it is measured on the trained model of the variant itself.
SHUFFLED = "shuffled-addresses"

# Changes by name of the null control: `options` of the memory, or roles that are `trainable`; both empty for shuffled addresses.
Controls = Mapping[str, Mapping[str, Any]]


def available_controls(config: Mapping[str, Any]) -> Controls:
    """Return the null controls of the memory that an upscaling added, the first of several; none if the upscaling added no memory."""
    record = record_of(config) or UpscaleRecord()
    from upscalers.architecture.layout import layout_of

    memories = layout_of(dict(config)).memories
    new = {*record.new_layers}
    for entry in memories.entries:
        if entry.name in record.new_memories or (not entry.is_attached and new.issuperset(entry.layers)):
            return {
                name: {"options": dict(change.options), "trainable": list(change.trainable)}
                for name, change in controls_of(entry.options, memories.sizes, entry.layers).items()
            }
    return {}


def allowed_controls(variant: Variant, available: Controls) -> list[str]:
    """Return the names of the null controls that a variant's memory has and its training allows."""
    # A null control that trains only certain roles would lack more than addressing if the variant trains the base as well.
    trains_more = variant.train.get("trainable", "auto") not in ("auto", "new") or variant.train.get("adapters")
    return [name for name, change in available.items() if not (trains_more and change["trainable"])]


def control_variants(variant: Variant, available: Controls, rate: Rate) -> list[Variant]:
    """Return the variants to train as null controls of a variant, each of which differs from it by a single change."""
    assert variant.upscale is not None or not available, "a variant without an upscaling has no memory"
    controls = []
    for name in allowed_controls(variant, available):
        if name == SHUFFLED:
            continue
        change, keys = available[name], copy.deepcopy(dict(variant.upscale or {}))
        if change["options"]:
            keys["options"] = {**(keys.get("options") or {}), **change["options"]}
        train = {**variant.train, "trainable": change["trainable"]} if change["trainable"] else variant.train
        made = dataclasses.replace(variant, name=f"{variant.name}+{name}", control=name, control_of=variant.name)
        controls.append(dataclasses.replace(made, upscale=keys, train=train, rates=[rate]))
    return controls

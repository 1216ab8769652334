"""The plan of a comparison: variants ready to run, with files read, parameters counted and null controls; and early checks."""

import copy
import dataclasses
import filecmp
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import UpscaleRecord, language_entry, record_of
from midus_hf.compare.options import Comparison, Rate, as_keys, check_names
from midus_hf.compare.runs import Variant, searches_of, window_keys
from midus_hf.config.errors import RequestError, as_request_error, name_in_request_errors, one_of
from midus_hf.config.yaml_options import from_mapping, read_mapping
from midus_hf.memories.controls import controls_of
from midus_hf.memories.hierarchical.options import HierarchicalOptions
from midus_hf.memories.registry import MEMORY_TYPES, memory_type, sample_tensors
from midus_hf.sources.names import saved_config
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.keys import Rates, short_run_rates, trains_new_parts

# Keys of `midus train` and of `upscale` that the comparison sets itself: they are dropped from recipes, and refused in mappings.
_OWN_TRAINING_KEYS = ("model_name_or_path", "output_dir", "seed", "eval_text", "resume_from_checkpoint")
_OWN_UPSCALING_KEYS = ("base", "output", "seed", "dry_run", "json", "overwrite", "push_to_hub", "private")
_KEYS = ["method", "num_new_layers", "placement", "options", "dtype", "max_shard_size", "verify"]  # of `upscale`
# Keys of `midus train` that hold a learning rate, the numeric fields of `Rates`; and those of values, the first given one counts.
_RATES = [field.name for field in dataclasses.fields(Rates) if isinstance(field.default, float | None)]
_RATES_OF_VALUES = ("value_learning_rate", "key_value_learning_rate")
# The null control that is not trained: it is measured on the trained model of the variant itself.
SHUFFLED = "shuffled-addresses"


def plan(comparison: Comparison) -> tuple[Comparison, list[Variant]]:
    """Return a comparison with the contents of files in place of their names, and its variants, whose parameters are counted.

    Raises:
        RequestError: If a key is unknown or set by the comparison itself, a file cannot be read, or a method refuses the base.
    """
    shared = _read_keys("train", comparison.train, _OWN_TRAINING_KEYS)
    comparison = dataclasses.replace(comparison, train=shared)
    variants = [_plan_variant(name, comparison, shared) for name in comparison.variants]
    read = {
        variant.name: dataclasses.replace(comparison.variants[variant.name], rates=[*map(dict, variant.rates)])
        for variant in variants
        if any(variant.rates)
    }
    return dataclasses.replace(comparison, variants={**comparison.variants, **read}), variants


def _plan_variant(name: str, comparison: Comparison, shared: Mapping[str, Any]) -> Variant:
    """Return a variant, sized by a dry run; `shared` are the keys that all variants train with."""
    from upscalers.methods.contract import get_method
    from upscalers.runs.upscale import upscale

    options, label = comparison.variants[name], f"variants.{name}.upscale"
    train: dict[str, Any] = {**shared, **_read_keys(f"variants.{name}.train", options.train, _OWN_TRAINING_KEYS)}
    listed = options.rates or comparison.rates or [{}]
    if options.upscale is None:
        # A plain base does not record which parameters to train: all are trained, unless the recipe differs or trains adapters.
        train = train if train.get("adapters") else {"trainable": "all", **train}
        base = saved_config(comparison.base)
        types = [memory_type(entry.get("type")).type for entry in language_entry(base).get("memory") or []]
        rates = _resolve_rates(train, (record_of(base) or UpscaleRecord()).trainable, types, listed)
        return Variant(name, None, train, rates)
    keys = _read_keys(label, options.upscale, _OWN_UPSCALING_KEYS)
    for key in keys:
        if key not in _KEYS:
            raise RequestError(f"{label} has no option {key!r}. {one_of(_KEYS)}")
    if "method" not in keys:
        raise RequestError(f"{label} has no 'method'; name one, as 'upscale methods' lists them.")
    if not isinstance(keys.get("options"), dict | None):
        raise RequestError(f"{label}.options is {keys['options']!r}; expected a mapping.")
    with name_in_request_errors(label):
        sizes = upscale(base=comparison.base, dry_run=True, **keys).parameters
    method = get_method(keys["method"])
    rates = _resolve_rates(train, method.trainable, _added_types(keys), listed)
    controls = _find_controls(comparison.base, keys, train) if comparison.controls else {}
    return Variant(name, keys, train, rates, sizes.new, sizes.trainable, controls)


def _read_keys(where: str, keys: Mapping[str, Any] | str | None, reserved: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a mapping or a recipe. Of a recipe, keys that the comparison sets are dropped; in a mapping, they raise."""
    if isinstance(keys, str):
        with name_in_request_errors(f"{where} names a file"):
            return {key: value for key, value in read_mapping(Path(keys)).items() if key not in reserved}
    for key in keys or {}:
        if key in reserved:
            raise RequestError(f"{where} has {key!r}, which the comparison sets for each run; leave it out.")
    return dict(keys or {})


def _resolve_rates(
    train: Mapping[str, Any], trainable: str | None, types: Sequence[str], rates: Sequence[Any]
) -> list[Rate]:
    """Return rates as keys of `midus train`. A plain number is the rate of new parameters; values of memories learn faster.

    It is the rate of everything if no values are trained, if their rate is among the keys, or if more than new parameters is
    trained, by the `trainable` that upscaling recorded, None for a plain model.
    """
    has_value_rate = any(train.get(key) is not None for key in _RATES_OF_VALUES)
    apart = _have_values(types) and trains_new_parts(train, trainable) and not has_value_rate
    return [as_keys(rate) if isinstance(rate, Mapping) or not apart else short_run_rates(rate) for rate in rates]


def _have_values(types: Sequence[str]) -> bool:
    """Return whether one of some types of memory has values, or blocks that texts fetch, which learn at the rate of values."""
    known = [MEMORY_TYPES[each] for each in types if each in MEMORY_TYPES]
    has_values = any(tensor.role == "value" for each in known for _, tensor in sample_tensors(each))
    return has_values or any(issubclass(each, HierarchicalOptions) for each in known)


def _added_types(upscale: Mapping[str, Any]) -> list[str]:
    """Return the types of memory that an upscaling with these keys may add."""
    from upscalers.methods.contract import get_method

    return [memory_type for _, memory_type in getattr(get_method(upscale["method"]), "positions", list)()]


def _find_controls(base: str, upscale: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the null controls of the first memory that an upscaling adds, as far as training allows them; none without a memory."""
    from upscalers.architecture.layout import layout_of
    from upscalers.checkpoint.base_checkpoint import open_base
    from upscalers.checkpoint.source import resolve_source
    from upscalers.methods.contract import get_method
    from upscalers.request import parse_options

    if not _added_types(upscale):
        return {}
    method_class, placement = get_method(upscale["method"]), upscale.get("placement")
    method = method_class(parse_options(method_class.options_class, upscale.get("options") or {}, method_class.name))
    if isinstance(placement, list):
        placement = ",".join(map(str, placement))
    with resolve_source(base, config_only=True) as source:
        opened = open_base(source.folder, needs_weights=False)
        config = method.config(opened, method.plan(opened, upscale.get("num_new_layers"), placement))
    before = {entry.name for entry in opened.layout.memories.entries}
    memories = layout_of(dict(config)).memories
    added = next((entry for entry in memories.entries if entry.name not in before), None)
    if added is None:
        return {}
    # A null control that trains only certain roles would lack more than addressing if the variant trains the base as well.
    trains_more = train.get("trainable", "auto") not in ("auto", "new") or train.get("adapters")
    return {
        name: {"options": dict(change.options), "trainable": list(change.trainable)}
        for name, change in controls_of(added.options, memories.sizes, added.layers).items()
        if not (trains_more and change.trainable)
    }


def control_variants(variant: Variant, rate: Rate) -> list[Variant]:
    """Return the variants to train as null controls of a variant, each of which differs from it by a single change."""
    controls = []
    for name, change in variant.controls.items():
        if name == SHUFFLED:
            continue
        keys = copy.deepcopy(dict(variant.upscale or {}))
        if change["options"]:
            keys["options"] = {**(keys.get("options") or {}), **change["options"]}
        train = {**variant.train, "trainable": change["trainable"]} if change["trainable"] else variant.train
        names: dict[str, Any] = {
            "name": f"{variant.name}+{name}",
            "control": name,
            "control_of": variant.name,
            "controls": {},
        }
        controls.append(dataclasses.replace(variant, **names, upscale=keys, train=train, rates=[rate]))
    return controls


def check(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check early what a run would refuse late: keys of runs, texts, local corpora, tasks, and the base's tokenizer and positions.

    Raises a RequestError, or a ModuleNotFoundError if lm-eval, an extra that tasks need, is not installed.
    """
    assert isinstance(comparison.train, Mapping), "files have been read"
    check_names(comparison)
    _check_texts(comparison, variants)
    for variant in variants:
        _check_keys(variant, comparison, window_keys(comparison.train)["sequence_length"])
    if comparison.tasks is not None:
        from midus_hf.evaluation.harness import Tasks
        from midus_hf.sources.progress import quiet_libraries

        with quiet_libraries():
            Tasks(comparison.tasks.names, comparison.tasks.data)
    _check_reading(comparison, comparison.train, variants)


def _check_texts(comparison: Comparison, variants: Sequence[Variant]) -> None:
    """Check that all measured texts differ, and that none of them is trained on."""
    texts: dict[str, Path] = {}
    for name, path in comparison.texts.items():
        label, text = comparison.label(name), Path(path).expanduser()
        for other, before in texts.items():
            if _overlap(text, before):
                raise RequestError(
                    f"{label} is {path!r}, which shares text with {other}, {str(before)!r}; expected texts that differ."
                )
        texts[label] = text
    for each in variants:
        for corpus, (label, text) in itertools.product(each.corpora, texts.items()):
            if (place := Path(corpus).expanduser()).exists() and _overlap(text, place):
                raise RequestError(
                    f"{label} is {str(text)!r}, which {each.name} trains on, since its corpus is {corpus!r}; expected text that "
                    "no variant trains on."
                )


def _overlap(first: Path, second: Path) -> bool:
    """Return whether one of two paths is inside the other, or both are files with the same content."""
    one, other = first.resolve(), second.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        return True
    return one.is_file() and other.is_file() and filecmp.cmp(one, other, shallow=False)


def _check_keys(variant: Variant, comparison: Comparison, shared_length: int) -> None:
    """Check that `midus train` accepts the keys of every run of a variant."""
    for key in {key for rate in variant.rates for key in rate}:
        if key not in _RATES:
            raise RequestError(f"variants.{variant.name} has a rate {key!r}; expected one of: {', '.join(_RATES)}.")
    for run in searches_of(variant, comparison):
        keys = run.training_keys(comparison, "model", Path("trained"))
        if keys.get("streaming"):
            raise RequestError(
                f"variants.{variant.name} has streaming, and texts of a comparison are read whole, to be compared; expected a corpus "
                "that fits the disk. Leave streaming out."
            )
        with name_in_request_errors(f"variants.{variant.name}, as a run of midus train"):
            from_mapping(TrainArguments, keys)
    length = window_keys(variant.train)["sequence_length"]
    if length != shared_length:
        raise RequestError(
            f"variants.{variant.name}.train.sequence_length is {length}, and that of train is {shared_length}; expected the same, "
            "since all texts are measured alike. Set train.sequence_length."
        )


def _check_reading(comparison: Comparison, train: Mapping[str, Any], variants: Sequence[Variant]) -> None:
    """Check that the base has a tokenizer and positions for a sequence, that texts have one, and that local corpora are read."""
    from transformers import AutoConfig

    from midus_hf.data.corpus import read_corpus
    from midus_hf.data.packing import packed_sequences
    from midus_hf.sources.progress import limit_bars
    from midus_hf.sources.tokenizers import load_tokenizer
    from midus_hf.training.inputs import check_sequence_length

    length = window_keys(train)["sequence_length"]
    with as_request_error(
        f"base is {comparison.base!r}, whose config or tokenizer cannot be loaded", OSError, ValueError
    ):
        config = AutoConfig.from_pretrained(comparison.base, trust_remote_code=False)
        tokenizer = load_tokenizer(comparison.base)
    check_sequence_length("train.sequence_length", length, config)
    options: dict[str, Any] = {"documents_apart": bool(train.get("document_mask"))}
    options["vocab_size"] = config.get_text_config().vocab_size
    for name, path in comparison.texts.items():
        named = {"key": comparison.label(name), "text_column": window_keys(train)["column"]}
        with limit_bars():
            packed_sequences(read_corpus(path, **named), tokenizer, length, **named, **options)
    for one in variants:
        if all(Path(corpus).expanduser().exists() for corpus in one.corpora):
            key = (
                "train.corpus"
                if one.train.get("corpus") == train.get("corpus")
                else f"variants.{one.name}.train.corpus"
            )
            named = {"split": one.train.get("corpus_split"), "name": one.train.get("corpus_name")}
            read_corpus(one.train.get("corpus") or "", key=key, text_column=window_keys(one.train)["column"], **named)

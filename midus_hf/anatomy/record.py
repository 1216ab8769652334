"""The record of an upscaling in a model's config: what was added, and the base's config. No torch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from midus_hf.config.errors import RequestError

RECORD_KEY = "upscale"
#: Key of the language model's config within the config of a composite model.
LANGUAGE_KEY = "text_config"


@dataclass(frozen=True, kw_only=True)
class UpscaleRecord:
    """What `upscale` did to a base; the keys of the record are the names here."""

    method: str = ""
    new_layers: tuple[int, ...] = ()  #: indices of the layers that were added, ascending
    new_memories: tuple[str, ...] = ()  #: names of the memories that were attached
    trainable: str | None = (
        None  #: what training trains by default, `"new"` or `"all"`; None if a method has no choice
    )
    causal: bool = True  #: whether no token depends on later ones
    plan: tuple[Mapping[str, Any], ...] = ()  #: for each layer `{"base": i}` or a new layer's sources (`Plan.to_list`)
    options: Mapping[str, Any] = field(default_factory=dict)  #: the method's, without local folders
    seed: int | None = None
    base_dtype: str | None = None  #: as torch names it
    base_config: Mapping[str, Any] = field(default_factory=dict)  #: within a composite model, its language model's
    larger_base_config: Mapping[str, Any] | None = None  #: the composite base's
    base_sha256: str | None = None  #: digest of the base's weights; None if it is unknown
    zero_gains: Mapping[str, float] = field(default_factory=dict)  #: see `Surgery.zero_gains`
    edits: tuple[Mapping[str, Any], ...] = ()  #: of the base's memories since
    others: Mapping[str, Any] = field(default_factory=dict)  #: keys that this version does not know, which are kept

    @property
    def base_layers(self) -> dict[int, int]:
        """Index of the base's layer, by the index of each layer that is one."""
        return {index: layer["base"] for index, layer in enumerate(self.plan) if "base" in layer}

    @property
    def has_whole_base(self) -> bool:
        """Whether the model has all layers of the base, in their order."""
        kept = list(self.base_layers.values())
        return not kept or kept == list(range(self.base_config.get("num_hidden_layers", len(kept))))

    @property
    def whole_base_config(self) -> dict[str, Any]:
        """Content of the base's `config.json`."""
        if self.larger_base_config is None:
            return dict(self.base_config)
        # Edits change these.
        changed = {key: self.base_config[key] for key in ("memory", RECORD_KEY) if key in self.base_config}
        language = {**self.larger_base_config[LANGUAGE_KEY], **changed}
        return {**self.larger_base_config, LANGUAGE_KEY: language}

    def to_dict(self) -> dict[str, Any]:
        """Return the record as a config holds it, without values that are the default and not always written."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        always = {"method", "new_layers", "trainable", "plan", "options", "seed", "base_dtype", "base_config"}
        others = values.pop("others")
        written: dict[str, Any] = {}
        for name, value in values.items():
            is_default = value in (None, (), {}, True) if name == "causal" else value in (None, (), {})
            if name in always or not is_default:
                written[name] = list(value) if isinstance(value, tuple) else value
        return {**written, **others}


def language_entry(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a raw config that describes the language model, also of a composite model."""
    inner = config.get(LANGUAGE_KEY)
    return inner if isinstance(inner, Mapping) else config


def has_record(config: Mapping[str, Any]) -> bool:
    """Return whether the content of a `config.json` has a record with what `strip` needs."""
    entry = language_entry(config).get(RECORD_KEY)
    return isinstance(entry, dict) and {"method", "plan", "base_config", "new_layers"} <= entry.keys()


def record_of(config: Any) -> UpscaleRecord | None:
    """Return the record in a config, of JSON or transformers; None without one; refuse other values."""
    entry = language_entry(config).get(RECORD_KEY) if isinstance(config, Mapping) else record_entry(config)
    if not isinstance(entry, Mapping) or not entry:
        return None
    names = {each.name for each in fields(UpscaleRecord)} - {"others"}
    values = {name: value for name, value in entry.items() if name in names}
    for name, read in _READERS.items():
        try:
            values[name] = read(values.get(name) or ())
        except (TypeError, ValueError):
            raise RequestError(
                f"the config's {RECORD_KEY}.{name} is {values[name]!r}; expected what upscale wrote. Restore that config."
            ) from None
    return UpscaleRecord(**values, others={key: value for key, value in entry.items() if key not in names})


_READERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("new_layers", "new_memories"), tuple),
    **dict.fromkeys(("plan", "edits"), lambda entries: tuple(map(dict, entries))),
    **dict.fromkeys(("options", "base_config", "zero_gains"), dict),
}


# What follows is also in the code that checkpoints carry.


def record_entry(config: Any) -> Any:
    """Return the record as a config of transformers holds it; empty without one."""
    entry = getattr(config.get_text_config(), RECORD_KEY, None)
    return entry if isinstance(entry, Mapping) else {}


def base_layers(config: Any) -> dict[int, int]:
    """Return `UpscaleRecord.base_layers` of a config of transformers; empty without a record."""
    plan = record_entry(config).get("plan") or ()
    return {index: layer["base"] for index, layer in enumerate(plan) if "base" in layer}


def iter_recorded_options(entry: Any, method: str) -> Iterator[dict[str, Any]]:
    """Yield the options of a method in a config's record and its bases' records, to be changed in place."""
    while isinstance(entry, dict):
        if entry.get("method") == method and isinstance(entry.get("options"), dict):
            yield entry["options"]
        entry = (entry.get("base_config") or {}).get(RECORD_KEY)

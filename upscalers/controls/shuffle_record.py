"""Record of a shuffle of rows: in the config, in `upscale.json`, in the model card."""

import copy
from typing import Any

from midus_hf.files.ownership import CONFIG_KEY, has_config_entry
from upscalers.architecture.family import Config
from upscalers.record.provenance import SHUFFLES_KEY

# Record of one shuffle: `{"seed", "version", "memories", "same_function"}`.
Shuffle = dict[str, Any]

_HEADING = "## Shuffled rows of values"


def shuffled_config(config: Config, shuffle: Shuffle) -> Config:
    """Return the config with the shuffle recorded.

    If the base is an upscaled model too, its config, which `strip` restores, records the shuffle of the base's own
    memories as well: `strip` leaves their rows shuffled.

    Args:
        config: The raw config before the shuffle.
        shuffle: The record of the shuffle.
    """
    config = copy.deepcopy(config)
    names = {entry.get("name", entry["type"]) for entry in config.get("memory") or []}
    own = [name for name in shuffle["memories"] if name in names]
    if has_config_entry(config) and own:
        entry = config[CONFIG_KEY]
        entry[SHUFFLES_KEY] = [*(entry.get(SHUFFLES_KEY) or []), {**shuffle, "memories": own}]
        entry["base_config"] = shuffled_config(entry["base_config"], shuffle)
    return config


def shuffled_record(record: dict[str, Any], shuffle: Shuffle) -> dict[str, Any]:
    """Return the content of `upscale.json` with the shuffle recorded.

    Unless all shuffled values are zero, the result no longer says that the model computes what its base computes.

    Args:
        record: Content of `upscale.json` before the shuffle.
        shuffle: The record of the shuffle.
    """
    changed = {**record, SHUFFLES_KEY: [*(record.get(SHUFFLES_KEY) or []), shuffle]}
    if not shuffle["same_function"]:
        changed |= {"identity": {"checked": None, "max_abs_diff": None}, "promises_identity": False}
    return changed


def shuffled_card(card: str, shuffle: Shuffle) -> str:
    """Return a model card with a line about the shuffle at its end."""
    memories = ", ".join(shuffle["memories"])
    end = (
        "Every value is zero, so that the model computes what it did."
        if shuffle["same_function"]
        else "It does not compute what it did, and starts from another function than its base."
    )
    line = (
        f"- `upscale shuffle --seed {shuffle['seed']}` of midus_hf {shuffle['version']}: the rows of values of {memories} were "
        f"permuted: a null control, in which addresses have no meaning. {end}\n"
    )
    if _HEADING in card:
        return f"{card.rstrip()}\n{line}"
    return f"{card.rstrip()}\n\n{_HEADING}\n\n{line}"

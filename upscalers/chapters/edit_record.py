"""What a checkpoint says of the edits of its chapters: in its config, in `upscale.json`, in its model card."""

import copy
from typing import Any

from midus_config.memories.chapters import ChaptersOptions
from upscalers.architecture.families import Config
from upscalers.record.provenance import CONFIG_KEY, EDITS_KEY, has_config_entry

Edit = dict[str, Any]
"""`{"command", "chapters", "version", "memory", "banks"}`, chapters as people write them, and what else was asked for."""

_EDITED = ("memory_tokens", "chapters", "shared_chapters", "bank_bits")
"""The options that follow an edit."""

_HEADING = "## Edited chapters"


def edited_config(config: Config, memory: str, options: ChaptersOptions, edit: Edit) -> Config:
    """The config after an edit.

    Where the memory belongs to the base of an upscaling, that base's config in the record says the same, so that `strip` gives
    back a model whose config fits its tensors.

    Args:
        config: The raw config before it.
        memory: Name of the memory.
        options: That it has afterwards.
        edit: What is recorded.
    """
    config = copy.deepcopy(config)
    for entry in config.get("memory") or []:
        if entry.get("type") == options.type and entry.get("name", options.type) == memory:
            entry.update({name: getattr(options, name) for name in _EDITED})
            if has_config_entry(config):
                record = config[CONFIG_KEY]
                record[EDITS_KEY] = [*(record.get(EDITS_KEY) or []), edit]
                record["base_config"] = edited_config(record["base_config"], memory, options, edit)
    return config


def edited_card(card: str, edit: Edit) -> str:
    """A model card with one more edit at its end."""
    asked = ", ".join(f"{key} {_said(value)}" for key, value in edit.items() if key not in ("command", "version"))
    line = f"- `midus-chapters {edit['command']}` of midus_hf {edit['version']}: {asked}\n"
    if _HEADING in card:
        return f"{card.rstrip()}\n{line}"
    told = "What stands above tells of the upscaling, its numbers included. Since then:"
    return f"{card.rstrip()}\n\n{_HEADING}\n\n{told}\n\n{line}"


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

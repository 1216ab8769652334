"""Listing of the levels and blocks of a bank."""

from pathlib import Path
from typing import Any

from midus_hf.config.fetched_blocks import BANKS_FOLDER, level_file
from upscalers.banks.opened import find_layout, open_bank
from upscalers.checkpoint.source import resolve_source


def list_bank(model: str | Path, memory: str | None = None) -> dict[str, Any]:
    """Return the levels of a bank, and which of their blocks were written.

    Args:
        model: A checkpoint with a bank: a folder or a hub id.
        memory: Name of the memory, needed if the model has several with a bank. Default: the only one.

    Returns:
        `{"model", "memory", "type", "branching", "fetched", "bank", "levels"}`. `levels` has `{"level", "nodes",
        "parameters", "written", "generic", "bytes_on_disk"}` for each level with blocks: `parameters` is the number of
        parameters per block, `written` has the nodes whose blocks were written, and `generic` is whether the block of
        the generic memory was written.

    Raises:
        RequestError: If there is no bank.
    """
    with resolve_source(str(model)) as source:
        name, layout = find_layout(source.folder, memory)
        levels = []
        with open_bank(source.folder, name, layout) as bank:
            for level in layout.levels:
                written, nodes = bank.written(level), layout.blocks.nodes(level)
                path = source.folder / BANKS_FOLDER / name / level_file(level)
                levels.append(
                    {
                        "level": level,
                        "nodes": nodes,
                        "parameters": layout.record_numel(level),
                        "written": [node for node in written if node < nodes],
                        "generic": nodes in written,
                        "bytes_on_disk": path.stat().st_blocks * 512,
                    }
                )
    return {
        "model": str(model),
        "memory": name,
        "type": layout.memory_type,
        "branching": layout.blocks.branching,
        "fetched": layout.fetched,
        "bank": layout.bank,
        "levels": levels,
    }

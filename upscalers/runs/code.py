"""Code that lies beside a checkpoint which exists already."""

import re
from pathlib import Path
from typing import Any

_CODE = "modeling_midus.py"


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, so that the checkpoint loads without this package."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    write_code(folder, AutoConfig.from_pretrained(folder, local_files_only=True))


def inspect_code(folder: Path) -> dict[str, Any] | None:
    """Compare the code that a checkpoint carries with the code that the installed version generates for the checkpoint's config.

    Args:
        folder: Folder of the checkpoint.

    Returns:
        `{"file", "version", "as_generated"}`: the name of the file, the version that its header names (None
        without a header), and whether the file is byte for byte what this version generates. None if the checkpoint carries no code.
    """
    path = folder / _CODE
    if not path.is_file():
        return None
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import carried_module

    text = path.read_text(encoding="utf-8", errors="replace")
    header = re.search(r"^midus-hf (\S+) wrote this module", text, flags=re.MULTILINE)
    generated = carried_module(AutoConfig.from_pretrained(folder, local_files_only=True))
    return {"file": path.name, "version": header and header.group(1), "as_generated": text == generated}

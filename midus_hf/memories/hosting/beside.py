"""Banks beside a checkpoint: the folder that a model was loaded from, also one of the Hub, and the refusal to leave a bank behind."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import snapshot_download

from midus_hf.config.fetched_blocks import BANKS_FOLDER


def upload_leaves_bank() -> ValueError:
    """Return the refusal of an upload by Transformers, which writes no folders beside the weights."""
    return ValueError(
        "this model has a bank beside its weights, which an upload by Transformers would leave out; expected "
        "save_pretrained(folder), and then in a shell: hf upload REPO_ID folder."
    )


def folder_of_checkpoint(name: str | os.PathLike, options: Mapping[str, Any], *patterns: str) -> Path | None:
    """Return the folder with a checkpoint's files; for a hub id, download those of some patterns. None if they are not available.

    Args:
        name: Folder or hub id, the first argument of `from_pretrained`.
        options: Keyword arguments of `from_pretrained`.
        patterns: Patterns of files in the folder. Default: the files of banks.
    """
    folder = Path(name, options.get("subfolder") or "")
    if folder.is_dir():
        return folder
    known = ("revision", "cache_dir", "token", "local_files_only")
    hub_options = {key: options[key] for key in known if options.get(key) is not None}
    subfolder = options.get("subfolder") or "."
    wanted = [PurePosixPath(subfolder, each).as_posix() for each in patterns or (f"{BANKS_FOLDER}/**",)]
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(str(name), allow_patterns=wanted, **hub_options), subfolder)
    return None

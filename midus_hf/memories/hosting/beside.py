"""Banks beside a checkpoint: its folder, also on the Hub, the refusal to leave a bank behind, and what TRL hashes of it."""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.service import Service
from midus_hf.memories.module import MemoryModule


class ReadsBeside(Service):
    """Service whose memories read what lies beside the weights, so that models of the same weights can compute differently.

    TRL keeps log-probabilities of a reference model by a hash of its `state_dict`, to which it gets `digest` too. Nobody else does:
    a state is saved and loaded, and FSDP shards every tensor in it.
    """

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        model.register_state_dict_post_hook(_add_digests)

    def digest(self) -> str | None:
        """Return a digest of what the memories read, whatever its folder; None if nothing is open."""
        raise NotImplementedError


def _add_digests(stack: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Add the digests of a stack's services to its state, if TRL's `hash_module` asks for it, of the stack or of a model around."""
    frame = sys._getframe()
    while (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("hash_module", "trl.trainer.utils"):
        if frame.f_back is None:
            return
        frame = frame.f_back
    for key, service in stack.services.items():
        if isinstance(service, ReadsBeside) and (digest := service.digest()) is not None:
            state[f"{prefix}beside.{key}"] = torch.tensor(list(digest.encode()), dtype=torch.uint8)


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

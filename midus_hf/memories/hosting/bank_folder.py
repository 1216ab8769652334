"""Banks beside a checkpoint: the service that opens and saves them, the checkpoint's folder, also on the Hub, and what TRL hashes."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import ClassVar

import torch
from huggingface_hub import snapshot_download

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.hosting.service import HostStack, Service
from midus_hf.memories.module import MemoryModule


class BankService(Service):
    """Service of memories with a bank beside the weights, which it opens when a checkpoint is loaded, and writes in `after_saving`.

    Models of the same weights can compute differently. TRL keeps log-probabilities of a reference model by a hash of its
    `state_dict`, to which it gets `digest` too. Nobody else does: a state is saved and loaded, and FSDP shards every tensor in it.
    """

    #: Patterns of the files that are needed of a checkpoint on the Hub.
    files: ClassVar[tuple[str, ...]] = (f"{BANKS_FOLDER}/**",)
    #: Whether reading an open bank runs passes of the model.
    runs_passes: ClassVar[bool] = False

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        model.register_state_dict_post_hook(_add_digests)

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Open the bank in a checkpoint's folder, None if it is not at hand, with the arguments of `from_pretrained`."""
        raise NotImplementedError

    def digest(self) -> str | None:
        """Return a digest of what the memories read, whatever its folder; None if nothing is open."""
        raise NotImplementedError

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Open the bank that lies beside the checkpoint; none for a model that was made of a state."""
        if name is not None:
            self.open_bank(folder_of_checkpoint(name, arguments, self.files), arguments)

    def check_upload(self) -> None:
        """Refuse an upload while a bank is open: Transformers uploads before it is written, and leaves nested folders out."""
        if self.digest() is not None:
            raise RequestError(
                "this model has a bank beside its weights, which an upload by Transformers would leave out; expected "
                "save_pretrained(folder), and then in a shell: hf upload REPO_ID folder."
            )


def _add_digests(stack: HostStack, state: dict[str, torch.Tensor], prefix: str, _: object) -> None:
    """Add the digests of a stack's services to its state, if TRL's `hash_module` asks for it, of the stack or of a model around."""
    frame = sys._getframe()
    while (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("hash_module", "trl.trainer.utils"):
        if frame.f_back is None:
            return
        frame = frame.f_back
    for key, service in stack.services.items():
        if isinstance(service, BankService) and (digest := service.digest()) is not None:
            state[f"{prefix}beside.{key}"] = torch.tensor(list(digest.encode()), dtype=torch.uint8)


def folder_of_checkpoint(name: str | os.PathLike, options: Keywords, patterns: Sequence[str]) -> Path | None:
    """Return the folder with a checkpoint's files; for a hub id, download those of some patterns. None if they are not available.

    Args:
        name: Folder or hub id, the first argument of `from_pretrained`.
        options: Keyword arguments of `from_pretrained`.
        patterns: Patterns of files in the folder.
    """
    folder = Path(name, options.get("subfolder") or "")
    if folder.is_dir():
        return folder
    known = ("revision", "cache_dir", "token", "local_files_only")
    hub_options = {key: options[key] for key in known if options.get(key) is not None}
    subfolder = options.get("subfolder") or "."
    wanted = [PurePosixPath(subfolder, each).as_posix() for each in patterns]
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(str(name), allow_patterns=wanted, **hub_options), subfolder)
    return None

"""What a stack of layers needs whose memories fetch blocks: banks, and what the texts of a pass fetch from them."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download

from midus_hf.banks.bank_description import check_same_tree
from midus_hf.banks.level_file import BankError
from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.banks.tiers import TIERS, TierStatistics
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BANKS_FOLDER, BankLayout
from midus_hf.config.installed import needed_for, not_carried
from midus_hf.config.memory_entries import memories_of
from midus_hf.memory.fetched import FetchedBatch

IDS, BLOCKS = "memory_ids", "memory_blocks"
"""Arguments of a forward pass: which blocks the rows fetch, and blocks that were fetched before."""


class Banks:
    """The banks of a model, by the name of the memory.

    Args:
        layouts: That the config implies.
    """

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.layouts = dict(layouts)
        self._open: dict[str, MemoryBank | TrainedBank] = {}
        self._serves = False
        self._tree: str | None = None
        self._tree_folder: Path | None = None
        self._copies: Sequence[Path] = ()
        self._num_copies: int | None = None
        self.trainable = False
        """Whether a Trainer trains their blocks; `set_trainable` says so."""

    @property
    def read_without_ids(self) -> bool:
        """Whether texts read something that name no blocks."""
        return any(layout.blocks.without_ids == "generic" for layout in self.layouts.values())

    def open(self, folder: str | os.PathLike, **options: Any) -> None:
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's.
            options: Of `MemoryBank`.

        Raises:
            BankError: If one is absent, or that of another model.
            ValueError: If an option does not fit.
        """
        self._open = {
            name: MemoryBank(Path(folder, BANKS_FOLDER, name), layout, **options)
            for name, layout in self.layouts.items()
        }

    @not_carried
    def train(self) -> dict[str, TrainedBank]:
        """Let blocks be trained from now on: passes that want gradients give them to blocks that were fetched.

        Returns:
            The banks by the name of the memory; those that were trained before go on from there.

        Raises:
            BankError: If one is not open.
        """
        trained = {}
        for name in self.layouts:
            bank = self.of(name)
            trained[name] = bank if isinstance(bank, TrainedBank) else TrainedBank(bank)
            trained[name].tree = self._tree or trained[name].tree
            trained[name].tree_folder = self._tree_folder
        self._open |= trained
        return trained

    @not_carried
    def train_with_tree(self, tree: str | None, folder: Path | None) -> None:
        """Let banks that `train` makes know the tree by whose paths they are trained.

        Args:
            tree: Its fingerprint; None if nobody knows it: then banks keep what they know.
            folder: That has the files of the tree, which are saved with the banks; None where they are not at hand.
        """
        self._tree, self._tree_folder = tree, folder

    def of(self, name: str) -> MemoryBank | TrainedBank:
        """The bank of a memory.

        Raises:
            BankError: If none is open.
        """
        if name not in self._open:
            raise BankError(
                f"memory {name!r} fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded "
                "from its folder. Call open_banks(folder) on a model that was made otherwise."
            )
        return self._open[name]

    @not_carried
    def check_tree(self, tree: str | None, whose: str, remedy: str) -> None:
        """Refuse a tree by whose paths an open bank was not trained.

        Args:
            tree: Its fingerprint; None if nobody knows it.
            whose: What a message calls whatever has the tree.
            remedy: What a message says last: a sentence.

        Raises:
            ValueError: If the tree is another than that of a bank, and both are known.
        """
        for bank in self._open.values():
            check_same_tree(bank.tree, tree, whose, remedy)

    @property
    def are_open(self) -> bool:
        """Whether there are banks, and they are open."""
        return bool(self._open)

    def save(self, folder: str | os.PathLike) -> None:
        """Write those that are open beside a checkpoint in another folder."""
        for name, bank in self._open.items():
            copies = [bank.folder, *(Path(checkpoint, BANKS_FOLDER, name) for checkpoint in self._copies)]
            number = self._num_copies
            link_from = None if number is None or len(copies) < number else copies[-number]
            bank.save(Path(folder, BANKS_FOLDER, name), link_from=link_from)

    @contextlib.contextmanager
    def linking(self, checkpoints: Sequence[Path], num_copies: int) -> Iterator[None]:
        """Within it `save` links the files of levels that hold what those of an earlier copy hold, as `MemoryBank.save` does.

        Args:
            checkpoints: That have copies, earliest first. The banks that are open count as a copy before the first.
            num_copies: How many files with the contents of a level are to be kept, if as many copies have it: of 2, the one before
                the last is linked, so that damage to one file leaves the other.
        """
        self._copies, self._num_copies = checkpoints, num_copies
        try:
            yield
        finally:
            self._copies, self._num_copies = (), None

    def fetch(
        self, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, FetchedBatch]:
        """What the rows of a batch fetch, by the name of the memory; nothing of one that reads none without ids.

        Args:
            memory_ids: As `MemoryBank.fetch` takes them; None where none are given.
            batch: B.
            device: To put blocks on.
            dtype: To cast them to.

        Raises:
            ValueError: If ids have another shape or are out of range, or no bank is open.
        """
        fetched = {}
        for name, layout in self.layouts.items():
            if memory_ids is not None:
                if len(memory_ids) != batch:
                    raise ValueError(
                        f"memory_ids has {len(memory_ids)} rows; expected {batch}, one for each text of the batch."
                    )
                fetched[name] = self.of(name).fetch(memory_ids, device, dtype)
            elif layout.blocks.without_ids == "generic":
                bank = self.of(name)
                fetched[name] = bank.fetch(bank.generic_ids(batch), device, dtype)
        return {name: batch.joined() for name, batch in fetched.items()} if self._serves else fetched

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """While the context lasts, what is fetched serves many passes, and its levels are joined."""
        before, self._serves = self._serves, True
        try:
            yield
        finally:
            self._serves = before

    @not_carried
    def prefetch(self, memory_ids: torch.Tensor) -> None:
        """Let threads read what rows are to fetch soon; returns at once.

        Args:
            memory_ids: As for `fetch`.

        Raises:
            ValueError: As `fetch`.
        """
        for name in self.layouts:
            self.of(name).prefetch(memory_ids)

    @not_carried
    def statistics(self) -> dict[str, TierStatistics]:
        """What fetches found in each tier since banks were opened, in all of them together."""
        found: dict[str, TierStatistics] = {tier: TierStatistics() for tier in TIERS}
        for bank in self._open.values():
            found = {tier: found[tier].plus(counts) for tier, counts in bank.statistics().items()}
        return found


@needed_for("banks")
class HostsBanks:
    """Mixin for a model whose memories may fetch blocks from banks beside the checkpoint."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As the family's; the banks that lie beside the checkpoint are opened.

        Raises:
            BankError: If one is absent, or that of another model.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if memories_of(model.config).banks and pretrained_model_name_or_path is not None:
            folder = folder_of_checkpoint(pretrained_model_name_or_path, kwargs)
            if folder is not None:
                model.open_banks(folder)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """As the family's; banks that are open are written beside the weights.

        Raises:
            ValueError: If it shall be uploaded as well, and a bank is open: it would be uploaded before the bank is written.
        """
        if kwargs.get("push_to_hub") and self.banks.are_open:
            raise ValueError(
                "save_pretrained is given push_to_hub, and this model has a bank beside its weights; expected push_to_hub(repo_id), "
                "which uploads both."
            )
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.banks.save(save_directory)
        return saved

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As the family's; banks that are open are uploaded with the weights, in folders of folders, which transformers does not.

        Args:
            repo_id: Of the repository, which is made if need be.
            kwargs: As the family's takes them.
        """
        if not self.banks.are_open:
            return super().push_to_hub(repo_id, **kwargs)
        return upload(self.save_pretrained, repo_id, **kwargs)

    @property
    def banks(self) -> Banks:
        """The banks that memories of the model fetch blocks from."""
        stack: Any = self
        return (stack if hasattr(stack, "own_banks") else stack.model).own_banks

    def open_banks(self, folder: str | os.PathLike, **options: Any) -> None:
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's.
            options: Of `MemoryBank`, such as `tiers`, which are those of each bank.

        Raises:
            BankError: If one is absent, or that of another model.
            ValueError: If an option does not fit.
        """
        self.banks.open(folder, **options)

    def fetch_memory(self, memory_ids: torch.Tensor) -> dict[str, FetchedBatch]:
        """Fetch the blocks of paths ahead of a pass, which takes them as `memory_blocks`: it then asks no bank, and can be compiled.

        Args:
            memory_ids: `[B, p]`, as for `forward`.
        """
        model: Any = self
        return self.banks.fetch(memory_ids, len(memory_ids), model.device, model.dtype)

    @not_carried
    def prefetch_memory(self, memory_ids: torch.Tensor) -> None:
        """Let threads read the blocks of paths that are to be fetched soon; returns at once.

        The fetch waits for what is under way, and raises what went wrong with it.

        Args:
            memory_ids: `[B, p]`, as for `forward`.
        """
        self.banks.prefetch(memory_ids)


def upload(
    save: Callable[..., Any],
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    **save_options: Any,
) -> Any:
    """Save a model to a temporary folder, and upload that in one commit.

    Args:
        save: `save_pretrained` of the model.
        repo_id: Of the repository, which is made if need be.
        commit_message: Default: `"Upload model"`.
        commit_description: Default: none.
        private: Whether a new repository is a private one. Default: its owner's.
        token: Default: that of whoever is logged in.
        revision: A branch. Default: the main one.
        create_pr: Whether to open a pull request. Default: false.
        save_options: What else `save` takes, such as `max_shard_size`.

    Returns:
        What the commit made.
    """
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, **save_options)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )


def folder_of_checkpoint(name: str | os.PathLike, options: Mapping[str, Any]) -> Path | None:
    """Where the files of a checkpoint lie; those of banks are downloaded if it is on the hub. None if there are none.

    Args:
        name: Folder or hub id, as given to `from_pretrained`.
        options: What else was given to it.
    """
    folder = Path(name, options.get("subfolder") or "")
    if folder.is_dir():
        return folder
    known = ("revision", "cache_dir", "token", "local_files_only")
    given = {key: options[key] for key in known if options.get(key) is not None}
    subfolder = options.get("subfolder") or "."
    pattern = PurePosixPath(subfolder, BANKS_FOLDER, "**").as_posix()
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(str(name), allow_patterns=[pattern], **given), subfolder)
    return None

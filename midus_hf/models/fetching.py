"""Banks of a stack of layers whose memories fetch blocks, and the blocks that the texts of a pass fetch."""

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download

from midus_hf.banks.bank_description import check_same_tree, growth_of
from midus_hf.banks.level_file import BankError
from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BANKS_FOLDER, BankLayout
from midus_hf.config.memory_entries import Memories, memories_of
from midus_hf.memory.fetched import FetchedBatch
from midus_hf.memory.needs import SERVICES, Service, mixin_for, register
from midus_hf.memory.registry import MemoryModule

# Names of arguments of a forward pass: paths whose blocks the rows fetch, and blocks that have been fetched already.
IDS, BLOCKS = "memory_ids", "memory_blocks"


class Banks:
    """Banks of a model, by the name of the memory.

    Args:
        layouts: Layout of each bank, by the name of the memory, as the config implies.
    """

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.layouts = dict(layouts)
        self._open: dict[str, MemoryBank | TrainedBank] = {}
        self._tree: str | None = None
        self._tree_folder: Path | None = None
        # Whether a Trainer trains the blocks of the banks; set by `set_trainable`.
        self.trainable = False

    @property
    def read_without_ids(self) -> bool:
        """True if texts without ids read blocks too, from the generic memory."""
        return any(layout.blocks.without_ids == "generic" for layout in self.layouts.values())

    def open(self, folder: str | os.PathLike) -> None:
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's folder.

        Raises:
            BankError: If a bank is absent, or belongs to another model.
        """
        self._open = {
            name: MemoryBank(Path(folder, BANKS_FOLDER, name), layout) for name, layout in self.layouts.items()
        }
        self.layouts = {name: bank.layout for name, bank in self._open.items()}

    def train_blocks(self) -> dict[str, TrainedBank]:
        """Make blocks trainable: from now on, passes with gradients compute gradients of the blocks that were fetched.

        Returns:
            The banks by the name of the memory; a bank that was trained before continues from its state.

        Raises:
            BankError: If a bank is not open.
        """
        trained = {}
        for name in self.layouts:
            bank = self.of(name)
            if isinstance(bank, MemoryBank):
                bank.grow(tree=self._tree, **growth_of(self._tree_folder))
            trained[name] = bank if isinstance(bank, TrainedBank) else TrainedBank(bank)
            trained[name].tree = trained[name].bank.tree
            # Paths of a tree that the bank's tree was grown from leave the bank its own tree.
            trained[name].tree_folder = self._tree_folder if trained[name].tree == self._tree else None
        self._open |= trained
        return trained

    def train_with_tree(self, tree: str | None, folder: Path | None) -> None:
        """Set the tree whose paths train the banks that `train_blocks` makes trainable.

        Args:
            tree: The tree's fingerprint; None if unknown: banks then keep the fingerprint they have.
            folder: Folder with the files of the tree, which are saved with the banks; None if not available.
        """
        self._tree, self._tree_folder = tree, folder

    def of(self, name: str) -> MemoryBank | TrainedBank:
        """Return the bank of a memory.

        Raises:
            BankError: If the bank is not open.
        """
        if name not in self._open:
            raise BankError(
                f"memory {name!r} fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded "
                "from its folder. Call open_banks(folder) on a model that was made otherwise."
            )
        return self._open[name]

    def check_tree(
        self, tree: str | None, owner: str, remedy: str, *, roots: int | None = None, grown_from: Collection[str] = ()
    ) -> None:
        """Refuse a tree if an open bank was trained by the paths of another tree, unless one was grown from the other.

        Paths may name the nodes of a tree that was grown from the bank's from then on.

        Args:
            tree: The tree's fingerprint; None if unknown.
            owner: Owner of the tree, for the message.
            remedy: Last sentence of the message.
            roots: Nodes of the tree's first level; None if unknown. Default: None.
            grown_from: Fingerprints of the trees that the tree was grown from. Default: none.

        Raises:
            ValueError: If a bank's tree differs from this tree, and both are known.
        """
        for bank in self._open.values():
            own = bank if isinstance(bank, MemoryBank) else bank.bank
            check_same_tree(bank.tree, tree, owner, remedy, {*own.description["grown_from"], *grown_from})
            own.grow(roots)
            bank.layout = own.layout
        self.layouts |= {name: bank.layout for name, bank in self._open.items()}

    @property
    def are_open(self) -> bool:
        """True if there are banks, and they are open."""
        return bool(self._open)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the open banks beside a checkpoint in another folder."""
        for name, bank in self._open.items():
            bank.save(Path(folder, BANKS_FOLDER, name))

    def fetch(
        self, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, FetchedBatch]:
        """Fetch the blocks of a batch's rows, by the memory's name. Without ids, only memories with generic blocks fetch blocks.

        Args:
            memory_ids: `[B, p]`, in the form that `MemoryBank.fetch` takes; None if there are no ids.
            batch: B, number of rows.
            device: Device to put blocks on.
            dtype: Dtype to cast blocks to.

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
        return fetched


@register(SERVICES, "fetched")
class FetchesBlocks(Service):
    """Blocks that the texts of a pass fetch from banks."""

    def __init__(self, model: Any, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        model.memory_input_names |= {IDS, BLOCKS}

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> Mapping[str, FetchedBatch]:
        """Return the blocks of the texts of the pass, by the name of the memory."""
        memory_ids, memory_blocks = own.get(IDS), own.get(BLOCKS)
        if memory_ids is not None and memory_blocks is not None:
            raise ValueError("memory_ids and memory_blocks are given; expected one of them.")
        if memory_ids is None and memory_blocks is None and not model.own_banks.read_without_ids:
            return {}
        tokens = arguments["inputs_embeds"] if arguments["input_ids"] is None else arguments["input_ids"]
        if memory_blocks is None:
            return _fetch(model, memory_ids, len(tokens), tokens.device)
        for batch in memory_blocks.values():
            if batch.num_rows != len(tokens):
                raise ValueError(
                    f"memory_blocks were fetched for {batch.num_rows} rows; expected {len(tokens)}, one for each text of the "
                    "batch."
                )
        return memory_blocks

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the blocks of the layer."""
        return {"fetched": value[name].of(layer)}


@torch.compiler.disable
def _fetch(model: Any, memory_ids: torch.Tensor | None, batch: int, device: torch.device) -> dict[str, FetchedBatch]:
    return model.own_banks.fetch(memory_ids, batch, device, model.dtype)


@mixin_for("fetched")
class HoldsBanks:
    """Mixin for a stack of layers whose memories may fetch blocks from banks."""

    def __init__(self, config: Any):
        super().__init__(config)
        self.own_banks = Banks(memories_of(config).banks)


@mixin_for("fetched")
class GeneratesFromBanks:
    """Mixin for a language model whose memories may fetch blocks from banks."""

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Generate for several requests in one row, as the family does.

        Raises:
            ValueError: If paths or blocks are passed: a row fetches the same blocks for all of its tokens.
        """
        for name in (IDS, BLOCKS):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} is given, and continuous batching lays the tokens of several requests in one row, where all would read "
                    "the same blocks; expected `generate`, or none."
                )
        return super().generate_batch(*args, **kwargs)


@mixin_for("fetched")
class HostsBanks:
    """Mixin for a model whose memories may fetch blocks from banks beside the checkpoint."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as the family does, and open the banks that lie beside the checkpoint.

        Raises:
            BankError: If a bank is absent, or belongs to another model.
        """
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if memories_of(model.config).banks and pretrained_model_name_or_path is not None:
            folder = folder_of_checkpoint(pretrained_model_name_or_path, kwargs)
            if folder is not None:
                model.open_banks(folder)
        return loaded

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """Save the model as the family does, and write open banks beside the weights.

        Raises:
            ValueError: If `push_to_hub` is set and a bank is open.
        """
        if kwargs.get("push_to_hub"):
            self._refuse_upload()
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            self.banks.save(save_directory)
        return saved

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the model as the family does.

        Raises:
            ValueError: If a bank is open.
        """
        self._refuse_upload()
        return super().push_to_hub(*args, **kwargs)

    def _refuse_upload(self) -> None:
        # Transformers uploads before the bank is written, and leaves nested folders out.
        if self.banks.are_open:
            raise ValueError(
                "this model has a bank beside its weights, which an upload by Transformers would leave out; expected "
                "save_pretrained(folder), and then in a shell: hf upload REPO_ID folder."
            )

    @property
    def banks(self) -> Banks:
        """Banks that memories of the model fetch blocks from."""
        model: Any = self
        return (model if hasattr(model, "own_banks") else model.stack).own_banks

    def open_banks(self, folder: str | os.PathLike) -> None:
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's folder.

        Raises:
            BankError: If a bank is absent, or belongs to another model.
        """
        self.banks.open(folder)

    def fetch_memory(self, memory_ids: torch.Tensor) -> dict[str, FetchedBatch]:
        """Fetch blocks before a pass. A pass that gets the blocks as `memory_blocks` reads no bank, and can be compiled.

        Args:
            memory_ids: `[B, p]`, the paths whose blocks the rows fetch.
        """
        model: Any = self
        return self.banks.fetch(memory_ids, len(memory_ids), model.device, model.dtype)


def folder_of_checkpoint(name: str | os.PathLike, options: Mapping[str, Any]) -> Path | None:
    """Return the folder with a checkpoint's files; for a hub id, download the files of banks. None if they are not available.

    Args:
        name: Folder or hub id, the first argument of `from_pretrained`.
        options: Keyword arguments of `from_pretrained`.
    """
    folder = Path(name, options.get("subfolder") or "")
    if folder.is_dir():
        return folder
    known = ("revision", "cache_dir", "token", "local_files_only")
    hub_options = {key: options[key] for key in known if options.get(key) is not None}
    subfolder = options.get("subfolder") or "."
    pattern = PurePosixPath(subfolder, BANKS_FOLDER, "**").as_posix()
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(str(name), allow_patterns=[pattern], **hub_options), subfolder)
    return None

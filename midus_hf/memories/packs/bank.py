"""A bank of packs beside a checkpoint: keys and values of each entry's text in mapped files, and the names that open them."""

import bisect
import os
import shutil
from pathlib import Path
from typing import Any

import safetensors
import torch

from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, PackLayout
from midus_hf.files.json_text import parse_json
from midus_hf.memories.packs.names import NameTable

PACKS_FORMAT = 2
_NAMES_TRIED = 32
NAMES_FILE, TITLES_FILE = "names.safetensors", "names.json"


class PackBank:
    """Packs of a model, for reading. Their files are mapped: what was read is kept by the system, as pages of the files.

    Args:
        folder: Folder of the bank.
        layout: Layout that the model's config implies.

    Raises:
        BankError: If the bank is absent, cannot be read, or belongs to another model.
    """

    def __init__(self, folder: str | os.PathLike, layout: PackLayout):
        self.folder, self.layout = Path(folder), layout
        path = self.folder / BANK_DESCRIPTION
        try:
            self.description: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
            if self.description.get("format") != PACKS_FORMAT or "files" not in self.description:
                raise BankError(
                    f"{path} is not of format {PACKS_FORMAT}; expected a bank of packs that this version reads. Upscale again."
                )
            difference = layout.difference(self.description.get("layout"))
            if difference:
                raise BankError(
                    f"the bank of packs in {self.folder} belongs to another model: {difference}. Put the model's own there."
                )
            with safetensors.safe_open(self.folder / NAMES_FILE, "pt") as file:
                edges, ends, self._starts, angles = (
                    file.get_tensor(name) for name in ("edges", "ends", "starts", "angles")
                )
        except BankError:
            raise
        except OSError as error:
            raise BankError(
                f"there is no bank of packs in {self.folder} ({error}); expected one beside the model. Copy the model's whole folder."
            ) from None
        except (ValueError, LookupError, AttributeError, safetensors.SafetensorError) as error:
            raise BankError(
                f"the bank of packs in {self.folder} cannot be read ({error}); expected whole files. Copy the bank again."
            ) from None
        self.names = NameTable(edges, ends, self.description["vocab_size"], self.description["longest"])
        # Angles by which a position rotates keys, [G, r], in radians, and which of the G kinds each layer has.
        self.angles, kinds = angles.unique(dim=0, return_inverse=True)
        self.kinds = tuple(kinds.tolist())
        # The first entry of each file, and the files that were opened.
        self._firsts = [file["first"] for file in self.description["files"]]
        self._files: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackBank":
        """Return this bank itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process opens the same bank."""
        return PackBank, (self.folder.absolute(), self.layout)

    def num_tokens(self, entry: int) -> int:
        """Return m, the number of tokens of an entry, counted from 1."""
        return int(self._starts[entry] - self._starts[entry - 1])

    def pack(self, entry: int) -> torch.Tensor:
        """Return the keys and values of an entry, counted from 1, `[m, L, 2, K, d]`; keys are rotated to the positions -m to -1.

        Raises:
            BankError: If the file cannot be read.
        """
        number = bisect.bisect_right(self._firsts, entry) - 1
        if number not in self._files:
            self._files[number] = self._opened(number)
        first = int(self._starts[self._firsts[number] - 1])
        return self._files[number][int(self._starts[entry - 1]) - first : int(self._starts[entry]) - first]

    def titles(self) -> list[list[str]]:
        """Return the names of each entry."""
        titles: list[list[str]] = parse_json((self.folder / TITLES_FILE).read_text(encoding="utf-8"))
        return titles

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer by which the first names are tokens that the bank does not know.

        Raises:
            BankError: If it is another one than the bank was made with.
        """
        for title in [title for entry in self.titles()[:_NAMES_TRIED] for title in entry]:
            ids = tokenizer(title, add_special_tokens=False)["input_ids"]
            if not ids or not self.names.entries(torch.tensor([ids]))[0, -1]:
                raise BankError(
                    f"the tokenizer makes tokens {ids} of the name {title!r}, which the packs in {self.folder} do not know; "
                    "expected the tokenizer that the packs were made with. Copy it beside the model, or upscale again."
                )

    def _opened(self, number: int) -> torch.Tensor:
        described = self.description["files"][number]
        path = self.folder / described["name"]
        try:
            with safetensors.safe_open(path, "pt") as file:
                packs = file.get_tensor("packs")
        except (OSError, safetensors.SafetensorError) as error:
            raise BankError(
                f"{path} cannot be read ({error}); expected a whole file of packs. Copy the bank again."
            ) from None
        if packs.shape != (described["tokens"], *self.layout.token_shape):
            expected = [described["tokens"], *self.layout.token_shape]
            raise BankError(
                f"{path} has packs of shape {list(packs.shape)}; expected {expected}. It belongs to another model."
            )
        return packs

    def copy_to(self, folder: str | os.PathLike) -> None:
        """Copy the bank into another folder, unless the bank is already there."""
        if not (Path(folder).exists() and self.folder.samefile(folder)):
            shutil.rmtree(folder, ignore_errors=True)  # other checkpoints may link to files there
            shutil.copytree(self.folder, folder)

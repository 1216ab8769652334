"""Files with blocks of a bank and a description of the bank that the blocks fit."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import whole_file
from upscalers.banks.opened import Node
from upscalers.request.errors import RequestError

if TYPE_CHECKING:
    import torch

_KEY = "midus_blocks"


@dataclass(frozen=True)
class BlockFile:
    """A safetensors file with one tensor per block, named `LEVEL.NODE`, the layout of the bank, and a tree's fingerprint.

    Args:
        nodes: Nodes whose blocks the file holds, ascending.
        tree: Fingerprint of the tree whose paths the blocks were trained with; None if unknown.
    """

    path: Path
    nodes: tuple[Node, ...]
    tree: str | None

    @staticmethod
    def write(path: Path, layout: BankLayout, tree: str | None, blocks: Mapping[Node, "torch.Tensor"]) -> None:
        """Write a file with the record `[numel]` of each block of a bank of this layout."""
        from safetensors.torch import save_file

        tensors = {f"{level}.{index}": record for (level, index), record in blocks.items()}
        with whole_file(path) as partial:
            save_file(tensors, partial, metadata={_KEY: json.dumps({**layout.to_dict(), "tree": tree})})

    @classmethod
    def read(cls, path: Path, layout: BankLayout) -> "BlockFile":
        """Open a file of blocks and check that the blocks fit a bank.

        Raises:
            RequestError: If the file is no file of blocks, or is of a model with other sizes, other layers or another
                base.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                description: Any = parse_json((file.metadata() or {})[_KEY])
                pairs = [tuple(map(int, name.split("."))) for name in file.keys()]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise RequestError(f"{path} is no file of blocks that midus edit export wrote ({error}).") from None
        difference = layout.difference(description)
        if difference is not None:
            raise RequestError(
                f"{path} has blocks of another model: {difference}. Export them from a model that began from the same weights."
            )
        return cls(path, tuple(sorted((level, index) for level, index in pairs)), description.get("tree"))

    def records(self) -> Iterator[tuple[Node, "torch.Tensor"]]:
        """Yield each node and the record of its block."""
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            for level, index in self.nodes:
                yield (level, index), file.get_tensor(f"{level}.{index}")

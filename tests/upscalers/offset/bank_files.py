"""The vector next to a checkpoint."""

import shutil

import torch
from safetensors.torch import save_file

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.bank import MemoryFiles

FILE = "vector.safetensors"


class OffsetFile(MemoryFiles):
    """The vector, in one file."""

    files = (f"{BANKS_FOLDER}/*/{FILE}",)

    def folder(self, checkpoint):
        return checkpoint / BANKS_FOLDER / self.entry.name

    def create(self, folder, dtype, seed):
        self.folder(folder).mkdir(parents=True)
        save_file({"vector": torch.zeros(self.memories.sizes.hidden_size)}, self.folder(folder) / FILE)

    def copy(self, source, folder):
        shutil.copytree(self.folder(source), self.folder(folder))

    @property
    def parameters(self):
        return self.memories.sizes.hidden_size

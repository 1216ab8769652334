"""The layer, and the service that opens the vector."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hosting.service import BankService
from midus_hf.memories.hosting.sites import BehindLayer
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import register_layer
from tests.upscalers.offset.options import OffsetOptions


class OpensOffset(BankService):
    """The vectors of all memories, each as `vector`."""

    key = "offset"

    def __init__(self, model, memories, hosted):
        super().__init__(model, memories, hosted)
        self.names, self.vectors = {name for name, _ in hosted}, {}

    def open_bank(self, folder, arguments):
        for name in self.names:
            self.vectors |= {name: load_file(Path(folder, BANKS_FOLDER, name, "vector.safetensors"))["vector"]}

    def after_saving(self, folder):
        for name, vector in self.vectors.items():
            Path(folder, BANKS_FOLDER, name).mkdir(parents=True, exist_ok=True)
            save_file({"vector": vector}, Path(folder, BANKS_FOLDER, name, "vector.safetensors"))

    def digest(self):
        return repr({name: vector.tolist() for name, vector in self.vectors.items()}) if self.vectors else None

    def prepare_pass(self, model, arguments, own):
        return self.vectors

    @staticmethod
    def layer_arguments(value, name, layer):
        return {"vector": value[name]}


@register_layer(OffsetOptions)
class OffsetMemory(MemoryModule):
    """Adds the vector."""

    sites = (BehindLayer,)
    services = (OpensOffset,)

    def forward(self, hidden_states, vector):
        return vector.to(hidden_states).expand_as(hidden_states)

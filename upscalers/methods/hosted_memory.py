"""What methods share that give a model memory, in layers of its own or attached to the base's."""

from abc import abstractmethod

from midus_config.declared_tensors import ZEROS, DeclaredTensor
from midus_config.memory_entries import MemoryEntry
from upscalers.architecture.families import FAMILIES, MEMORY_PREFIX, Config
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import Method
from upscalers.plan.plan import Plan
from upscalers.request.errors import RequestError
from upscalers.tensors.recipes import Fill, Initialise, Recipe, tensor_seed


class HostedMemoryMethod(Method):
    """A method whose result is a model of the family that hosts memory, with one more entry in its `memory` list."""

    def check(self, base: BaseModel) -> None:
        if not base.family.hosts_memory:
            raise RequestError(
                f"model_type is {base.family.model_type!r}, which cannot host memory; expected one of: "
                f"{', '.join(name for name, family in FAMILIES.items() if family.hosts_memory)}. Dense methods take it."
            )

    @abstractmethod
    def entry(self, base: BaseModel, plan: Plan) -> MemoryEntry:
        """The entry that is added to the config's `memory` list."""

    def config(self, base: BaseModel, plan: Plan) -> Config:
        config = super().config(base, plan)
        config["model_type"] = MEMORY_PREFIX + base.family.model_type
        config["architectures"] = [f"Midus{base.family.class_name}ForCausalLM"]
        config["memory"] = [*(config.get("memory") or []), self.entry(base, plan).to_dict()]
        return config


def initialised(tensor: DeclaredTensor, full_name: str, seed: int) -> Recipe:
    """The recipe of a new tensor of a memory: what its declaration says that it starts as; zeros are a hole in the file."""
    if tensor.initial == ZEROS:
        return Fill(tensor.shape, 0.0)
    return Initialise(tensor.shape, tensor.initial.fill, tensor_seed(seed, full_name))

"""What methods share whose new layers are attention and a memory, no feed-forward network."""

from typing import ClassVar

from midus_config.memory_entries import MemoryEntry
from midus_config.memory_types import InsertedOptions
from upscalers.architecture.families import FAMILIES, MEMORY_PREFIX, Config
from upscalers.architecture.layer_tensors import kept_roles
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import Method
from upscalers.methods.papers import MIDUS
from upscalers.plan.plan import New, Plan
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.tensors.recipes import Copy, Initialise, Recipe, tensor_seed


class MemoryMethod(Method):
    """Inserts `M(x) = x + Mem(Attn'(LN(x)))`; attention and norm are copied from the next layer (MIDUS, section 4.1)."""

    paper = MIDUS
    identity = True
    options_class: ClassVar[type[InsertedOptions]]
    options: InsertedOptions

    def check(self, base: BaseModel) -> None:
        if not base.family.hosts_memory:
            raise RequestError(
                f"model_type is {base.family.model_type!r}, which cannot host memory; expected one of: "
                f"{', '.join(name for name, family in FAMILIES.items() if family.hosts_memory)}. Dense methods take it."
            )
        with refusing_requests():
            self.options.check(base.family.sizes(base.config))

    def sources(self, base: BaseModel, layer: New, index: int, number: int) -> tuple[int, ...]:
        """The next base layer of its phase that has all that the block keeps, or the nearest before it: memory blocks may lack
        some.
        """
        wanted = {
            tensor.role
            for tensor in base.family.layer_tensors(base.config).values()
            if tensor.role in kept_roles(self.options)
        }
        period = layer.period
        if layer.next is not None:
            following = layer.next
        else:
            assert layer.previous is not None
            following = layer.previous + period
        for source in (*range(following, base.num_layers, period), *range(following - period, -1, -period)):
            if wanted <= {tensor.role for tensor in base.layer_tensors(source).values()}:
                return (source,)
        raise RequestError(
            f"new layer {index} needs an attention with an output projection, which no layer of the base has; expected one "
            "to copy. Choose midus-hml without output_projection."
        )

    def config(self, base: BaseModel, plan: Plan) -> Config:
        config = super().config(base, plan)
        config["model_type"] = MEMORY_PREFIX + base.family.model_type
        config["architectures"] = [f"Midus{base.family.class_name}ForCausalLM"]
        config["memory"] = [*(config.get("memory") or []), self.entry(plan).to_dict()]
        return config

    def entry(self, plan: Plan) -> MemoryEntry:
        """The entry of the config's `memory` list."""
        return MemoryEntry(self.options, "inserted", tuple(plan.new_indices))

    def new_layer_recipes(self, base: BaseModel, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        donor, roles = layer.sources[0], kept_roles(self.options)
        sources = base.layer_names(donor)
        recipes: dict[str, Recipe] = {
            name: Copy(tensor.shape, sources[name])
            for name, tensor in base.layer_tensors(donor).items()
            if tensor.role in roles
        }
        for name, tensor in self.options.tensors(base.family.sizes(base.config)).items():
            full_name = base.new_name(index, f"memory.{name}")
            initialise = Initialise(tensor.shape, tensor.initial.fill, tensor_seed(seed, full_name))
            recipes[f"memory.{name}"] = initialise
        return recipes

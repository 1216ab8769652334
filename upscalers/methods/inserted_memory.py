"""What methods share whose new layers are attention and a memory, no feed-forward network."""

from typing import ClassVar

from midus_config.memory_entries import INSERTED, MemoryEntry
from midus_config.memory_types import InsertedOptions
from upscalers.architecture.layer_tensors import kept_roles
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.hosted_memory import HostedMemoryMethod, initialised
from upscalers.methods.papers import MIDUS
from upscalers.plan.plan import New, Plan
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.tensors.recipes import Copy, Recipe


class InsertedMemoryMethod(HostedMemoryMethod):
    """Inserts `M(x) = x + Mem(Attn'(LN(x)))`; attention and norm are copied from the next layer (MIDUS, section 4.1)."""

    paper = MIDUS
    identity = True
    options_class: ClassVar[type[InsertedOptions]]
    options: InsertedOptions

    def check(self, base: BaseModel) -> None:
        super().check(base)
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

    def entry(self, base: BaseModel, plan: Plan) -> MemoryEntry:
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
            name = f"{INSERTED}.{name}"
            recipes[name] = initialised(tensor, base.new_name(index, name), seed)
        return recipes

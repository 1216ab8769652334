"""One upscaling that was decided on: its config, tensors, parameter counts, and the check of the result."""

import math
from dataclasses import dataclass
from functools import cached_property

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.memory_entries import Memories
from midus_hf.files.ownership import CONFIG_KEY
from upscalers.architecture.family import Config
from upscalers.architecture.layer_tensors import memories_of
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.merged_adapter import Adapter
from upscalers.checkpoint.safetensors_format import INTEGERS, ITEM_BYTES, SAFETENSORS_NAMES, TORCH_NAMES, StoredTensor
from upscalers.checkpoint.source import Source
from upscalers.methods.contract import Method
from upscalers.plan.attention_pattern import pattern_concern
from upscalers.plan.layer_config import followed_quantization
from upscalers.plan.plan import Base, Plan
from upscalers.record.provenance import config_entry
from upscalers.record.report import ParameterCounts
from upscalers.request.errors import MethodError, RequestError, one_line
from upscalers.request.progress import Progress
from upscalers.tensors.layer_blocks import LayerBlocks
from upscalers.tensors.recipe_check import check_recipes
from upscalers.tensors.recipes import Copy, Integers, Recipe
from upscalers.tensors.solver import solved_parts
from upscalers.tensors.writer import OutputTensor, in_file_order


@dataclass(frozen=True)
class Job:
    """Everything that is decided before the first byte is written.

    Args:
        method: The method with its options.
        base: The opened base checkpoint.
        source: Source of the base.
        plan: The layer plan.
        seed: Seed of everything random.
        dtype: Name of the output's dtype in torch; `"auto"` keeps the base's.
        adapter: The LoRA that is merged into the base. Default: None.

    Raises:
        MethodError: If the method breaks its contract.
        RequestError: If new layers do not fit among the base's layers.
    """

    method: Method
    base: BaseModel
    source: Source
    plan: Plan
    seed: int
    dtype: str
    adapter: Adapter | None = None

    def __post_init__(self) -> None:
        try:
            check_recipes(self.method.name, self.base, self.plan, self.config, self.layers, self._outer)
        except MethodError as error:
            if not self.base.family.layers_may_follow_from_indices:
                raise
            raise RequestError(
                f"the layers of {self.base.family.model_type!r} differ, and a new layer gets another kind than its source has "
                f"({one_line(error)}). {self._remedy}"
            ) from None
        change = self.base.family.layer_that_changes(self.base.config, self.config, self.plan.sources)
        if change:
            raise RequestError(
                f"layers of {self.base.family.model_type!r} compute otherwise at another index or among more layers: {change}. "
                f"{self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        """A sentence that says which layers or methods the base's family takes."""
        leading = self.base.family.num_leading_layers(self.base.config)
        if leading == self.base.num_layers or not self.method.adds_layers:
            return "Choose a method that adds no layer."
        return (
            f"Choose a --placement of new layers in front of base layer {leading}, which gives its keys and values to later "
            "layers, or a method that adds no layer."
        )

    @cached_property
    def config(self) -> Config:
        """The raw config of the upscaled model, as far as the config is known before anything is written."""
        config = self.method.config(self.base, self.plan)
        memories = memories_of(self.base.family, config)
        if self.base.parts:
            config["quantization_config"] = followed_quantization(config, self.plan, self._new_modules)
        config[CONFIG_KEY] = config_entry(self.method, self.base, self.plan, self.seed, memories)
        if self.dtype != "auto":
            config.pop("torch_dtype", None)
            config["dtype"] = self.dtype
        return config

    @cached_property
    def _memories(self) -> Memories:
        """Memories of the upscaled model."""
        return memories_of(self.base.family, self.config)

    @property
    def _new_modules(self) -> list[str]:
        """Paths of modules that the upscaling adds: new layers, and parts of other layers that only the result has."""
        new = [f"model.layers.{index}" for index, layer in enumerate(self.plan.layers) if not isinstance(layer, Base)]
        made = [
            f"layers.{index}.{name}"
            for index, recipes in enumerate(self.layers)
            for name, recipe in recipes.items()
            if isinstance(self.plan.layers[index], Base) and not isinstance(recipe, Copy)
        ]
        made += [
            name.removeprefix(self.base.prefix) for name, recipe in self._outer.items() if not isinstance(recipe, Copy)
        ]
        return [*new, *(f"model.{name.rpartition('.')[0]}" for name in made)]

    @cached_property
    def concerns(self) -> list[str]:
        """Facts that a person should know about the result, before the work begins and whenever the model is used."""
        remedy = self.method.pattern_remedy(self.base, self.plan)
        pattern = pattern_concern(self.base, self.config, remedy)
        return [*self.method.concerns(self.base, self.plan), *([] if pattern is None else [pattern])]

    @cached_property
    def layers(self) -> list[dict[str, Recipe]]:
        """Recipes of each layer's tensors, by their name within the layer."""
        return self.method.recipes(self.base, self.plan, self.seed)

    @cached_property
    def _outer(self) -> dict[str, Recipe]:
        return self.method.outer_recipes(self.base, self.plan, self.seed)

    @cached_property
    def tensors(self) -> list[OutputTensor]:
        """Every tensor that is written, in the order of the files."""
        # Layers of the base carry the parts of a packed weight along; new layers have the weight itself.
        in_parts = {
            self.base.new_name(index, name)
            for index, recipes in enumerate(self.layers)
            for name, recipe in recipes.items()
            if isinstance(self.plan.layers[index], Base)
            and isinstance(recipe, Copy)
            and recipe.source in self.base.packed
        }
        return [tensor for tensor in self._made if tensor.name not in in_parts]

    @cached_property
    def _made(self) -> list[OutputTensor]:
        """Every tensor of the upscaled model, as the model reads it."""
        outer = [
            OutputTensor(
                name,
                recipe,
                self._dtype_of_copy(recipe.source)
                if isinstance(recipe, Copy | LayerBlocks)
                else INTEGERS
                if isinstance(recipe, Integers)
                else self.cast(self.base.dtype),
            )
            for name, recipe in self._outer.items()
        ]
        layers = [
            OutputTensor(self.base.new_name(index, name), recipe, self._dtype_of(index, name, recipe))
            for index, recipes in enumerate(self.layers)
            for name, recipe in recipes.items()
        ]
        return in_file_order(outer, layers)

    def _dtype_of(self, index: int, name: str, recipe: Recipe) -> str:
        """Return the dtype of a tensor in the output: a copy's from its source, any other's from its layer's source."""
        if isinstance(recipe, Copy) and isinstance(self.plan.layers[index], Base):
            return self._dtype_of_copy(recipe.source)
        if isinstance(recipe, Copy):  # new layers are trained, and no weight in FP8 can be
            return self.cast(self.base.tensors[recipe.source].dtype)
        source = self.base.layer_names(self.plan.sources[index]).get(name)
        return self.cast(self.base.dtype if source is None else self.base.tensors[source].dtype)

    def _dtype_of_copy(self, source: str) -> str:
        """Return the dtype of a tensor that is carried along from the base: quantised weights and their scales keep theirs."""
        stored = self.base.tensors[source].as_stored.dtype
        return stored if source in self.base.parts else self.cast(stored)

    def cast(self, dtype: str) -> str:
        """Return the dtype that a tensor of the base has in the output, as safetensors names both dtypes."""
        return dtype if self.dtype == "auto" or dtype not in TORCH_NAMES else SAFETENSORS_NAMES[self.dtype]

    def counts(self) -> ParameterCounts:
        """Return the numbers of parameters, without buffers."""
        uncounted, memories = self.base.uncounted_names(), self._memories
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        layers = range(self.plan.num_layers)
        buffers = {self.base.new_name(layer, name) for layer in layers for name in memories.buffers(layer)}
        buffers |= {self.base.prefix + name for name in memories.table_buffers()}
        total = sum(
            math.prod(tensor.recipe.shape)
            for tensor in self._made
            if tensor.name not in buffers
            and not (isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted)
        )
        new = sum(
            math.prod(tensor.recipe.shape)
            for tensor in self._made
            if tensor.name not in buffers and self.plan.owns(tensor.name)
        )
        trainable = new if self.method.trained == "new" else total
        if not self.new_banks:
            return ParameterCounts(base, new, total, trainable)
        fetched, bank = (
            sum(getattr(layout, name) for layout in self.new_banks.values()) for name in ("fetched", "bank")
        )
        return ParameterCounts(base, new, total, trainable + bank, fetched, bank)

    @cached_property
    def new_banks(self) -> dict[str, BankLayout]:
        """Layout of each bank that the upscaled model has and the base does not, by the name of its memory."""
        banks = self._memories.banks
        return {name: layout for name, layout in banks.items() if name in self.plan.new_memories}

    def scratch_bytes(self) -> int:
        """Return the bytes of disk that solvers need while they work."""
        solvers = {part.solver for tensor in self.tensors for part in solved_parts(tensor.recipe)}
        return sum(solver.scratch_bytes for solver in solvers)

    def check_memory(self, progress: Progress) -> None:
        """Check, before anything is written, that the free memory suffices for comparing the result with the base.

        Raises:
            RequestError: If it does not, or torch and transformers cannot be loaded.
        """
        progress.stage("loading libraries", 1)  # the free memory is known only once they are loaded
        try:
            from upscalers.runs.verify import available_bytes, comparison_bytes  # brings torch and transformers
        except (ImportError, OSError, MemoryError) as error:
            raise RequestError(
                f"torch and transformers cannot be loaded ({type(error).__name__}: {one_line(error)}). Make room in memory or raise "
                "the limit on it (ulimit -v); if it is not that, install midus-hf again."
            ) from None
        progress.advance()
        dtype = self.cast(self.base.dtype)
        new = {
            tensor.name: StoredTensor(dtype if tensor.dtype.startswith("F8") else tensor.dtype, tensor.recipe.shape)
            for tensor in self._made
        }
        needed = comparison_bytes(self.base.tensors, new, self.base.config, dtype)
        if self.base.family.is_converted(self.base.config):
            needed += sum(tensor.num_bytes for tensor in new.values())  # such a model is not streamed
        # The blocks of one path: drawn in float32, then cast, then kept.
        banks = self._memories.banks
        needed += sum(layout.fetched for layout in banks.values()) * (ITEM_BYTES["F32"] + 2 * ITEM_BYTES[dtype])
        free = available_bytes()
        if needed > free:
            raise RequestError(
                f"comparing both models layer by layer takes {needed / 1e9:.2f} GB of memory, but {free / 1e9:.2f} GB is free. Make "
                "room, or pass --no-verify."
            )

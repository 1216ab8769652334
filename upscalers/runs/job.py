"""One upscaling that was decided on: its config, tensors, parameter counts, and the check of the result."""

import math
from dataclasses import dataclass
from functools import cached_property

from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.files.ownership import CONFIG_KEY
from upscalers.architecture.family import Config, Layout
from upscalers.architecture.inferred import change_of_settings
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.merged_adapter import Adapter
from upscalers.checkpoint.safetensors_format import INTEGERS, ITEM_BYTES, SAFETENSORS_NAMES, TORCH_NAMES, StoredTensor
from upscalers.checkpoint.source import Source
from upscalers.methods.contract import Method
from upscalers.plan.layer_config import followed_quantization, pattern_concern
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
        base, after = self.base, self.layout
        try:
            check_recipes(self.method.name, base, self.plan, self.config, after, self.layers, self.outer)
        except MethodError as error:
            if not base.family.is_inferred:
                raise
            raise RequestError(
                f"the layers of {base.family.model_type!r} differ, and a new layer gets another kind than its source has "
                f"({one_line(error)}). {self._remedy}"
            ) from None
        if not base.family.is_inferred:
            return
        change = change_of_settings(base.layout.settings, after.settings, self.plan.sources)
        if change:
            raise RequestError(
                f"layers of {base.family.model_type!r} compute otherwise at another index or among more layers: {change}. "
                f"{self._remedy}"
            )

    @property
    def _remedy(self) -> str:
        """A sentence that says which layers or methods the base's family takes."""
        leading = self.base.layout.num_leading_layers
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
        reads_ahead = self.base.family.layout(config).memories.reads_ahead
        if self.base.parts:
            config["quantization_config"] = followed_quantization(config, self.plan, self._new_modules)
        config[CONFIG_KEY] = config_entry(self.method, self.base, self.plan, self.seed, reads_ahead)
        if self.dtype != "auto":
            config.pop("torch_dtype", None)
            config["dtype"] = self.dtype
        return config

    @cached_property
    def layout(self) -> Layout:
        """What the config says of the upscaled model."""
        return self.base.family.layout(self.config)

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
            name.removeprefix(self.base.prefix) for name, recipe in self.outer.items() if not isinstance(recipe, Copy)
        ]
        return [*new, *(f"model.{name.rpartition('.')[0]}" for name in made)]

    @cached_property
    def concerns(self) -> list[str]:
        """Facts that a person should know about the result, before the work begins and whenever the model is used."""
        concerns, pattern = self.method.concerns(self.base, self.plan), pattern_concern(self.base, self.config)
        return (
            concerns
            if pattern is None
            else [*concerns, f"{pattern} {self.method.pattern_remedy(self.base, self.plan)}"]
        )

    @cached_property
    def layers(self) -> list[dict[str, Recipe]]:
        """Recipes of each layer's tensors, by their name within the layer."""
        return self.method.recipes(self.base, self.plan, self.seed)

    @cached_property
    def outer(self) -> dict[str, Recipe]:
        """Recipes of the tensors outside the layers, by full name."""
        return self.method.outer_recipes(self.base, self.plan, self.seed)

    @cached_property
    def made(self) -> list[OutputTensor]:
        """Every tensor of the upscaled model, as the model reads it, in the order of the files."""
        base, sources = self.base, self.plan.sources
        outer = []
        for name, recipe in self.outer.items():
            if isinstance(recipe, Copy | LayerBlocks):
                dtype = self._carried(recipe.source)
            else:
                dtype = INTEGERS if isinstance(recipe, Integers) else self.cast(base.dtype)
            outer.append(OutputTensor(name, recipe, dtype))
        layers = []
        for index, recipes in enumerate(self.layers):
            is_kept, names = isinstance(self.plan.layers[index], Base), base.layer_names[sources[index]]
            for name, recipe in recipes.items():
                if isinstance(recipe, Copy) and is_kept:
                    dtype = self._carried(recipe.source)
                else:  # new layers are trained, and no weight in FP8 can be
                    source = recipe.source if isinstance(recipe, Copy) else names.get(name)
                    dtype = self.cast(base.dtype if source is None else base.tensors[source].dtype)
                layers.append(OutputTensor(base.new_name(index, name), recipe, dtype))
        return in_file_order(outer, layers)

    @property
    def written(self) -> list[OutputTensor]:
        """The tensors of `made` that are written: where layers of the base carry the parts of a packed weight, not the weight."""
        in_parts = {
            self.base.new_name(index, name)
            for index, recipes in enumerate(self.layers)
            for name, recipe in recipes.items()
            if isinstance(self.plan.layers[index], Base)
            and isinstance(recipe, Copy)
            and recipe.source in self.base.packed
        }
        return [tensor for tensor in self.made if tensor.name not in in_parts]

    def _carried(self, source: str) -> str:
        """Return the dtype of a tensor that is carried along from the base: quantised weights and their scales keep theirs."""
        stored = self.base.tensors[source].as_stored.dtype
        return stored if source in self.base.parts else self.cast(stored)

    def cast(self, dtype: str) -> str:
        """Return the dtype that a tensor of the base has in the output, as safetensors names both dtypes."""
        return dtype if self.dtype == "auto" or dtype not in TORCH_NAMES else SAFETENSORS_NAMES[self.dtype]

    def counts(self) -> ParameterCounts:
        """Return the numbers of parameters, without buffers."""
        uncounted = self.base.uncounted_names()
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        buffers = {self.base.prefix + name.removeprefix("model.") for name in self.layout.buffers}
        total = new = 0
        for tensor in self.made:
            if tensor.name in buffers:
                continue
            size = math.prod(tensor.recipe.shape)
            total += 0 if isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted else size
            new += size if self.plan.owns(tensor.name) else 0
        trainable = new if self.method.trainable == "new" else total
        if not self.new_banks:
            return ParameterCounts(base, new, total, trainable)
        fetched, bank = (
            sum(getattr(layout, name) for layout in self.new_banks.values()) for name in ("fetched", "bank")
        )
        return ParameterCounts(base, new, total, trainable + bank, fetched, bank)

    @cached_property
    def new_banks(self) -> dict[str, BankLayout]:
        """Layout of each bank that the upscaled model has and the base does not, by the name of its memory."""
        banks = self.layout.memories.banks
        return {name: layout for name, layout in banks.items() if name in self.plan.new_memories}

    def scratch_bytes(self) -> int:
        """Return the bytes of disk that solvers need while they work."""
        solvers = {part.solver for tensor in self.made for part in solved_parts(tensor.recipe)}
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
            for tensor in self.made
        }
        needed = comparison_bytes(self.base.tensors, new, self.base.config, dtype)
        if self.base.layout.is_converted:
            needed += sum(tensor.num_bytes for tensor in new.values())  # such a model is not streamed
        # The blocks of one path: drawn in float32, then cast, then kept.
        banks = self.layout.memories.banks
        needed += sum(layout.fetched for layout in banks.values()) * (ITEM_BYTES["F32"] + 2 * ITEM_BYTES[dtype])
        free = available_bytes()
        if needed > free:
            raise RequestError(
                f"comparing both models layer by layer takes {needed / 1e9:.2f} GB of memory, but {free / 1e9:.2f} GB is free. Make "
                "room, or pass --no-verify."
            )

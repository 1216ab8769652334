"""One upscaling that was decided on: its config, tensors, parameter counts, and the check of the result."""

import math

from midus_hf.files.ownership import CONFIG_KEY
from upscalers.architecture.inferred import InferredFamily, change_of_settings
from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.safetensors_format import INTEGERS, ITEM_BYTES, SAFETENSORS_NAMES, TORCH_NAMES, StoredTensor
from upscalers.checkpoint.source import Source
from upscalers.methods.contract import Method
from upscalers.plan.layer_config import pattern_concern
from upscalers.plan.plan import Plan
from upscalers.record.provenance import config_entry
from upscalers.record.report import ParameterCounts
from upscalers.request.errors import MethodError, RequestError, one_line
from upscalers.request.progress import Progress
from upscalers.tensors.layer_blocks import LayerBlocks
from upscalers.tensors.recipe_check import check_recipes
from upscalers.tensors.recipes import Copy, Integers, Recipe
from upscalers.tensors.solver import solved_parts
from upscalers.tensors.writer import OutputTensor, in_file_order


class Job:
    """Everything that is decided before the first byte is written.

    Args:
        method: The method with its options.
        base: The opened base checkpoint.
        source: Source of the base.
        plan: The layer plan.
        seed: Seed of everything random.
        dtype: Name of the output's dtype in torch; `"auto"` keeps the base's.

    Attributes:
        config: The raw config of the upscaled model, as far as the config is known before anything is written.
        layout: What the config says of the upscaled model.
        tensors: Every tensor of the upscaled model, in the order of the files.
        concerns: Facts that a person should know about the result, before the work begins and whenever the model is used.
        new_banks: Layout of each bank that the upscaled model has and the base does not, by the name of its memory.

    Raises:
        MethodError: If the method breaks its contract.
        RequestError: If new layers do not fit among the base's layers.
    """

    def __init__(
        self,
        method: Method,
        base: BaseModel,
        source: Source,
        plan: Plan,
        seed: int,
        dtype: str,
    ):
        self.method, self.base, self.source, self.plan = method, base, source, plan
        self.seed, self.dtype = seed, dtype
        self.config = method.config(base, plan)
        layers, outer = method.recipes(base, plan, seed), method.outer_recipes(base, plan, seed)
        reads_ahead = base.family.layout(self.config).memories.reads_ahead
        self.config[CONFIG_KEY] = config_entry(method, base, plan, seed, reads_ahead)
        if dtype != "auto":
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = dtype
        self.layout = base.family.layout(self.config)
        self._check(layers, outer)

        made_outer, made_layers = [], []
        for name, recipe in outer.items():
            like = recipe.source if isinstance(recipe, Copy | LayerBlocks) else None
            new_dtype = self.cast(base.dtype if like is None else base.tensors[like].dtype)
            made_outer.append(OutputTensor(name, recipe, INTEGERS if isinstance(recipe, Integers) else new_dtype))
        for index, (recipes, origin) in enumerate(zip(layers, plan.sources, strict=True)):
            for name, recipe in recipes.items():
                like = recipe.source if isinstance(recipe, Copy) else base.layer_names[origin].get(name)
                new_dtype = self.cast(base.dtype if like is None else base.tensors[like].dtype)
                made_layers.append(OutputTensor(base.new_name(index, name), recipe, new_dtype))
        self.tensors = in_file_order(made_outer, made_layers)
        self.concerns, pattern = method.concerns(base, plan), pattern_concern(base, self.config)
        if pattern is not None:
            self.concerns = [*self.concerns, pattern]
        banks = self.layout.memories.banks
        self.new_banks = {name: layout for name, layout in banks.items() if name in plan.new_memories}

    def _check(self, layers: list[dict[str, Recipe]], outer: dict[str, Recipe]) -> None:
        base, method, change = self.base, self.method, None
        try:
            check_recipes(method.name, base, self.plan, self.config, self.layout, layers, outer)
        except MethodError as error:
            if not isinstance(base.family, InferredFamily):
                raise
            difference = (
                f"the layers of {base.family.model_type!r} differ, and a new layer gets another kind than its source has "
                f"({one_line(error)})"
            )
        else:
            change = change_of_settings(base.layout.settings, self.layout.settings, self.plan.sources)
            if change is None:
                return
            difference = f"layers of {base.family.model_type!r} compute otherwise at another index or among more layers: {change}"
        leading, remedy = base.layout.num_leading_layers, "Choose a method that adds no layer."
        if leading < base.num_layers and method.adds_layers:
            remedy = (
                f"Choose a --placement of new layers in front of base layer {leading}, which gives its keys and values to later "
                "layers, or a method that adds no layer."
            )
        raise RequestError(f"{difference}. {remedy}")

    def cast(self, dtype: str) -> str:
        """Return the dtype that a tensor of the base has in the output, as safetensors names both dtypes."""
        return dtype if self.dtype == "auto" or dtype not in TORCH_NAMES else SAFETENSORS_NAMES[self.dtype]

    def counts(self) -> ParameterCounts:
        """Return the numbers of parameters, without buffers."""
        uncounted = self.base.uncounted_names
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        buffers = {self.base.prefix + name.removeprefix("model.") for name in self.layout.buffers}
        total = new = 0
        for tensor in self.tensors:
            if tensor.name in buffers:
                continue
            size = math.prod(tensor.recipe.shape)
            total += 0 if isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted else size
            new += size if self.plan.owns(tensor.name) else 0
        trainable = new if self.method.trainable == "new" else total
        banks = self.new_banks.values()
        fetched, bank = sum(layout.fetched for layout in banks), sum(layout.bank for layout in banks)
        return ParameterCounts(base, new, total, trainable + bank, *((fetched, bank) if banks else ()))

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
        new = {tensor.name: StoredTensor(tensor.dtype, tensor.recipe.shape) for tensor in self.tensors}
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

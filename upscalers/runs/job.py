"""One planned upscaling, decided before the first byte is written: config, tensors and counts."""

import math
from collections.abc import Mapping

from midus_hf.anatomy.record import RECORD_KEY
from midus_hf.config.errors import RequestError, first_few
from midus_hf.memories.bank import banks_of
from upscalers.architecture.layer_tensors import Shape
from upscalers.architecture.layout import find_changed_setting, layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.safetensors_format import INTEGERS, SAFETENSORS_NAMES, TORCH_NAMES
from upscalers.checkpoint.source import Source
from upscalers.methods.contract import Method
from upscalers.plan import Plan, pattern_concern
from upscalers.record.provenance import ParameterCounts
from upscalers.request import MethodError, one_line
from upscalers.tensors.recipes import Combine, Copy, Integers, LayerBlocks, Recipe, solved_parts
from upscalers.tensors.writer import OutputTensor, in_file_order

Recipes = Mapping[str, Recipe]


class Job:
    """A method's work on a base by a plan; a method that breaks its contract is a `MethodError`."""

    def __init__(self, method: Method, base: BaseCheckpoint, source: Source, plan: Plan, seed: int, dtype: str):
        self.method, self.base, self.source, self.plan = method, base, source, plan
        self.seed, self.dtype = seed, dtype
        missing = sorted(set(range(base.num_layers)) - plan.kept_indices.keys())
        if missing:
            raise MethodError(
                f"the plan of method {method.name} has no base layer {', '.join(map(str, missing))}; expected all layers of the "
                "base, or strip could not give it back."
            )
        self.config = method.config(base, plan)
        self.config.pop(RECORD_KEY, None)  # of an earlier upscaling
        layers, outer = method.recipes(base, plan, seed), method.outer_recipes(base, plan, seed)
        self.layout = layout_of(self.config)
        if dtype != "auto":
            self.config.pop("torch_dtype", None)
            self.config["dtype"] = dtype
        self._check(layers, outer)

        made_outer, made_layers = [], []
        for name, recipe in outer.items():
            if isinstance(recipe, Copy | LayerBlocks):
                new_dtype = self.cast(base.tensors[recipe.source].dtype)
            else:
                new_dtype = INTEGERS if isinstance(recipe, Integers) else self.cast(base.dtype)
            made_outer.append(OutputTensor(name, recipe, new_dtype))
        for index, origin in enumerate(plan.sources):
            for name, recipe in layers[index].items():
                like = recipe.source if isinstance(recipe, Copy) else base.layer_names[origin].get(name)
                new_dtype = self.cast(base.dtype if like is None else base.tensors[like].dtype)
                made_layers.append(OutputTensor(base.new_name(index, name), recipe, new_dtype))
        self.made = in_file_order(made_outer, made_layers)
        self.remarks = method.remarks(base)
        self.warnings = [*method.plan_warnings(base, plan)]
        if (pattern := pattern_concern(base, self.layout, self.config)) is not None:
            self.warnings.append(pattern)
        self.banks = banks_of(self.layout.memories)
        self.new_banks = {name: bank for name, bank in self.banks.items() if name in plan.new_memories}

    def _check(self, layers: list[dict[str, Recipe]], outer: dict[str, Recipe]) -> None:
        base, method, layout, plan = self.base, self.method, self.layout, self.plan
        for subject, number in (
            ("a config with num_hidden_layers =", self.config.get("num_hidden_layers")),
            ("recipes for this many layers:", len(layers)),
        ):
            if number != plan.num_layers:
                raise MethodError(
                    f"method {method.name} gives {subject} {number}; expected {plan.num_layers}, as many as its plan has."
                )
        shapes = {name if base.prefix else name.removeprefix("model."): shape for name, shape in layout.outer.items()}
        shapes |= {name: shape for name, shape in layout.tied.items() if name in outer}
        try:
            for index, (recipes, tensors) in enumerate(zip(layers, layout.layers, strict=True)):
                expected = {name: tensor.shape for name, tensor in tensors.items()}
                _check_recipes(f"method {method.name}, layer {index}", base, expected, recipes)
            _check_recipes(f"method {method.name}, outside the layers", base, shapes, outer)
        except MethodError as error:
            layouts = (base.layout.backbone_layers, layout.backbone_layers)
            if all(tensors == of_model[0] for of_model in layouts for tensors in of_model):
                raise  # if layers do not differ, the mistake is the method's
            difference = (
                f"the layers of {base.family.model_type!r} differ, and a new layer gets another kind than its source has "
                f"({one_line(error)})"
            )
        else:
            change = find_changed_setting(base.layout.settings, layout.settings, plan.sources, plan.new_indices)
            if change is None:
                return
            difference = f"layers of {base.family.model_type!r} compute differently at another index or among more layers: {change}"
        leading, remedy = base.layout.num_leading_layers, "Choose a method that adds no layer."
        if leading < base.num_layers and method.adds_layers:
            remedy = (
                f"Choose a --placement of new layers before base layer {leading}, which gives its keys and values to later "
                "layers, or a method that adds no layer."
            )
        raise RequestError(f"{difference}. {remedy}")

    def cast(self, dtype: str) -> str:
        return dtype if self.dtype == "auto" or dtype not in TORCH_NAMES else SAFETENSORS_NAMES[self.dtype]

    def counts(self) -> ParameterCounts:
        uncounted = self.base.uncounted_names
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        buffers = {self.base.prefix + name.removeprefix("model.") for name in self.layout.buffers}
        sizes = {
            tensor.name: math.prod(tensor.recipe.shape)
            for tensor in self.made
            if tensor.name not in buffers
            and not (isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted)
        }
        total, new = sum(sizes.values()), sum(size for name, size in sizes.items() if self.plan.owns(name))
        trainable = new if self.method.trainable == "new" else total
        if self.new_banks or self.method.trainable == "all":  # in addition to a new bank, those of the base train
            trainable += sum(each.parameters for each in self.banks.values())
        fetched, bank = (
            sum(getattr(each, key) for each in self.new_banks.values()) for key in ("fetched", "parameters")
        )
        return ParameterCounts(base, new, total, trainable, *((fetched, bank) if bank else ()))

    def scratch_bytes(self) -> int:
        solvers = {part.solver for tensor in self.made for part in solved_parts(tensor.recipe)}
        return sum(solver.scratch_bytes for solver in solvers)


def _check_recipes(where: str, base: BaseCheckpoint, shapes: Mapping[str, Shape], recipes: Recipes) -> None:
    missing = [name for name in shapes if name not in recipes]
    if missing:
        raise MethodError(
            f"{where}: there is no recipe for {first_few(missing)}; expected one for each of {len(shapes)} tensors."
        )
    for name, shape in shapes.items():
        subject, recipe = f"{where}: {name}", recipes[name]
        if tuple(recipe.shape) != shape:
            raise MethodError(f"{subject} is {list(recipe.shape)}; expected {list(shape)}.")
        # Other recipes may read tensors of any shape.
        for source in recipe.sources if isinstance(recipe, Copy | Combine | LayerBlocks) else ():
            if source not in base.tensors:
                raise MethodError(f"{subject} is made from {source}; expected a tensor of the base.")
            held = base.tensors[source].shape
            if held != shape and not isinstance(recipe, LayerBlocks):
                raise MethodError(f"{subject} is made from {source}, which is {list(held)}; expected {list(shape)}.")
    for name, recipe in recipes.items():
        carried = isinstance(recipe, Copy) and recipe.source in {*base.unexpected, *base.outer_shapes}
        if name not in shapes and not carried:
            raise MethodError(f"{where}: there is a recipe for {name}; expected none except for {', '.join(shapes)}.")

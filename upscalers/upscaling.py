"""An upscaling, decided before the first byte is written: what is asked, the plan, config and tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY
from midus_hf.config.errors import RequestError, first_few
from midus_hf.files.secrets import for_record
from midus_hf.memories.bank import MemoryFiles, banks_of
from upscalers.architecture.layer_tensors import Config, Layout, Shape
from upscalers.architecture.layout import find_changed_setting, layout_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base
from upscalers.checkpoint.safetensors_format import INTEGERS, SAFETENSORS_NAMES, TORCH_NAMES
from upscalers.checkpoint.source import Source
from upscalers.methods.contract import Method, Surgery
from upscalers.plan import Plan, pattern_concern, spell_placement
from upscalers.request import MethodError, Request, one_line
from upscalers.tensors.recipes import Copy, Elementwise, Integers, LayerBlocks, Recipe, solved_parts
from upscalers.tensors.writer import OutputTensor, in_file_order

Recipes = Mapping[str, Recipe]


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; a tied head counts once; `fetched` and `bank` are of new banks."""

    base: int
    new: int
    total: int
    trainable: int
    fetched: int | None = None
    bank: int | None = None


@dataclass(frozen=True)
class Upscaling:
    """A method's work on a base, decided and checked; nothing is written.

    Args:
        request: What was asked for.
        method: The method, with its options.
        base: The base, with or without its weights.
        source: Where the base is from.
        plan: The origin of every layer.
        surgery: What the method makes of the base.
        config: Config of the result, without a record.
        layout: Layers of the result.
        tensors: All tensors of the result, in the order of their files.
        warnings: Warnings of the method and about the result.
    """

    request: Request
    method: Method
    base: BaseCheckpoint
    source: Source
    plan: Plan
    surgery: Surgery
    config: Config
    layout: Layout
    tensors: tuple[OutputTensor, ...]
    warnings: tuple[str, ...]

    @cached_property
    def banks(self) -> dict[str, MemoryFiles]:
        """Banks of the result, by the names of their memories."""
        return banks_of(self.layout.memories)

    @property
    def new_banks(self) -> dict[str, MemoryFiles]:
        return {name: bank for name, bank in self.banks.items() if name in self.plan.new_memories}

    @property
    def dtype(self) -> str:
        """Dtype of new tensors, as safetensors names it."""
        return _cast(self.base.dtype, self.request.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, without banks."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def scratch_bytes(self) -> int:
        """Bytes that solvers write next to the result while they work."""
        solvers = {part.solver for tensor in self.tensors for part in solved_parts(tensor.recipe)}
        return sum(solver.scratch_bytes for solver in solvers)

    def recipe(self) -> dict[str, Any]:
        """Return the request that makes the same again; without a local base, whose path is private."""
        base = {} if self.source.hub_id is None else {"base": self.source.hub_id}
        return {
            **base,
            "method": self.method.name,
            **self.method.placement_request(self.plan),
            "options": for_record(self.method.options_record),
            "seed": self.request.seed,
            "dtype": self.request.dtype,
        }

    @cached_property
    def counts(self) -> ParameterCounts:
        """The numbers of parameters: in the base, new, in all, trained, and of banks."""
        uncounted = self.base.uncounted_names
        base = sum(math.prod(tensor.shape) for name, tensor in self.base.tensors.items() if name not in uncounted)
        buffers = {self.base.prefix + name.removeprefix("model.") for name in self.layout.buffers}
        sizes = {
            tensor.name: math.prod(tensor.recipe.shape)
            for tensor in self.tensors
            if tensor.name not in buffers
            and not (isinstance(tensor.recipe, Copy) and tensor.recipe.source in uncounted)
        }
        total = sum(sizes.values())
        new = sum(size for name, size in sizes.items() if self.plan.owns(name))
        trainable = new if self.method.trainable == "new" else total
        if self.new_banks or self.method.trainable == "all":  # in addition to a new bank, those of the base train
            trainable += sum(each.parameters for each in self.banks.values())
        bank = sum(each.parameters for each in self.new_banks.values())
        if not bank:
            return ParameterCounts(base, new, total, trainable)
        fetched = sum(each.fetched for each in self.new_banks.values())
        return ParameterCounts(base, new, total, trainable, fetched, bank)


def prepare_upscaling(
    request: Request, method: Method, source: Source, needs_weights: bool, plan: Plan | None = None
) -> Upscaling:
    """Return an `Upscaling` that is checked and ready to be written: its base opened, its layers and tensors planned.

    Args:
        request: What was asked for.
        method: The method, with its options.
        source: Where the base is.
        needs_weights: Whether the base must have its weights, and not only its config.
        plan: The plan, if the base's config was checked and planned before its weights were downloaded. Default: None.

    Raises:
        RequestError: If the method cannot upscale the base, or not so.
        MethodError: If the method breaks its contract.
    """
    base = open_base(source.folder, needs_weights, source.hub_id)
    if plan is None:
        method.check(base)
        plan = method.plan(base, request.num_new_layers, spell_placement(request.placement))
    missing = sorted(set(range(base.num_layers)) - plan.kept_indices.keys())
    if missing:
        raise MethodError(
            f"the plan of method {method.name} has no base layer {', '.join(map(str, missing))}; expected all layers of the "
            "base, or strip could not give it back."
        )
    surgery = method.surgery(base, plan, request.seed)
    config = {key: value for key, value in surgery.config.items() if key != RECORD_KEY}  # of an earlier upscaling
    layout = layout_of(config)
    _check_surgery(method, base, plan, surgery, layout)
    if request.dtype != "auto":
        config.pop("torch_dtype", None)
        config["dtype"] = request.dtype
    warnings = [*surgery.warnings]
    if (pattern := pattern_concern(base, layout, config)) is not None:
        warnings.append(pattern)
    tensors = tuple(_output_tensors(base, plan, surgery, request.dtype))
    return Upscaling(request, method, base, source, plan, surgery, config, layout, tensors, tuple(warnings))


def _output_tensors(base: BaseCheckpoint, plan: Plan, surgery: Surgery, dtype: str) -> list[OutputTensor]:
    """Return all tensors in the order of their files, with the dtypes that they are written in."""
    outer = []
    for name, recipe in surgery.outer.items():
        if isinstance(recipe, Integers):
            outer.append(OutputTensor(name, recipe, INTEGERS))
            continue
        like = base.tensors[recipe.source].dtype if isinstance(recipe, Copy | LayerBlocks) else base.dtype
        outer.append(OutputTensor(name, recipe, _cast(like, dtype)))
    layers = []
    for index, origin in enumerate(plan.sources):
        for name, recipe in surgery.layers[index].items():
            source = recipe.source if isinstance(recipe, Copy) else base.layer_names[origin].get(name)
            like = base.dtype if source is None else base.tensors[source].dtype
            layers.append(OutputTensor(base.new_name(index, name), recipe, _cast(like, dtype)))
    return in_file_order(outer, layers)


def _cast(stored: str, dtype: str) -> str:
    """Return the dtype of a tensor that has the dtype `stored` in the base, where the request says `dtype`."""
    return stored if dtype == "auto" or stored not in TORCH_NAMES else SAFETENSORS_NAMES[dtype]


def _check_surgery(method: Method, base: BaseCheckpoint, plan: Plan, surgery: Surgery, layout: Layout) -> None:
    """Refuse recipes that do not make the tensors of the result, and a base whose layers would compute differently."""
    for subject, number in (
        ("a config with num_hidden_layers =", surgery.config.get("num_hidden_layers")),
        ("recipes for this many layers:", len(surgery.layers)),
    ):
        if number != plan.num_layers:
            raise MethodError(
                f"method {method.name} gives {subject} {number}; expected {plan.num_layers}, as many as its plan has."
            )
    shapes = {name if base.prefix else name.removeprefix("model."): shape for name, shape in layout.outer.items()}
    shapes |= {name: shape for name, shape in layout.tied.items() if name in surgery.outer}
    try:
        for index, (recipes, tensors) in enumerate(zip(surgery.layers, layout.layers, strict=True)):
            expected = {name: tensor.shape for name, tensor in tensors.items()}
            _check_recipes(f"method {method.name}, layer {index}", base, expected, recipes)
        _check_recipes(f"method {method.name}, outside the layers", base, shapes, surgery.outer)
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
        difference = (
            f"layers of {base.family.model_type!r} compute differently at another index or among more layers: {change}"
        )
    leading = base.layout.num_leading_layers
    remedy = "Choose a method that adds no layer."
    if leading < base.num_layers and method.adds_layers:
        remedy = (
            f"Choose a --placement of new layers before base layer {leading}, which gives its keys and values to later "
            "layers, or a method that adds no layer."
        )
    raise RequestError(f"{difference}. {remedy}")


def _check_recipes(where: str, base: BaseCheckpoint, shapes: Mapping[str, Shape], recipes: Recipes) -> None:
    """Refuse a method's recipes if one is missing, superfluous, or of another shape."""
    missing = [name for name in shapes if name not in recipes]
    if missing:
        raise MethodError(
            f"{where}: there is no recipe for {first_few(missing)}; expected one for each of {len(shapes)} tensors."
        )
    for name, shape in shapes.items():
        subject = f"{where}: {name}"
        recipe = recipes[name]
        if tuple(recipe.shape) != shape:
            raise MethodError(f"{subject} is {list(recipe.shape)}; expected {list(shape)}.")
        if not isinstance(recipe, Elementwise | LayerBlocks):
            continue  # since other recipes may read tensors of any shape
        for source in recipe.sources:
            if source not in base.tensors:
                raise MethodError(f"{subject} is made from {source}; expected a tensor of the base.")
            held = base.tensors[source].shape
            if held != shape and not isinstance(recipe, LayerBlocks):
                raise MethodError(f"{subject} is made from {source}, which is {list(held)}; expected {list(shape)}.")
    for name, recipe in recipes.items():
        carried = isinstance(recipe, Copy) and recipe.source in {*base.unexpected, *base.outer_shapes}
        if name not in shapes and not carried:
            raise MethodError(f"{where}: there is a recipe for {name}; expected none except for {', '.join(shapes)}.")

"""Check of the recipes that a method returns, before anything is written: one for every tensor of the result, no others."""

from collections.abc import Mapping, Sequence

from upscalers.architecture.family import Config, Layout, Shape
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.plan.plan import Plan
from upscalers.request.errors import MethodError
from upscalers.tensors.layer_blocks import LayerBlocks
from upscalers.tensors.recipes import Combine, Copy, Recipe
from upscalers.tensors.vocabulary_rows import NewRows

Recipes = Mapping[str, Recipe]

_LISTED = 3


def check_recipes(
    method: str,
    base: BaseCheckpoint,
    plan: Plan,
    config: Config,
    layout: Layout,
    layers: Sequence[Recipes],
    outer: Recipes,
) -> None:
    """Refuse recipes (of layers, and `outer` ones) that are missing, of a wrong shape, or superfluous for the new config."""
    for subject, number in (
        ("a config with num_hidden_layers =", config.get("num_hidden_layers")),
        ("recipes for this many layers:", len(layers)),
    ):
        if number != plan.num_layers:
            raise MethodError(
                f"method {method} gives {subject} {number}; expected {plan.num_layers}, as many as its plan has."
            )
    for index, (recipes, tensors) in enumerate(zip(layers, layout.layers, strict=True)):
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        _check_part(f"method {method}, layer {index}", base, shapes, recipes)
    shapes = {name if base.prefix else name.removeprefix("model."): shape for name, shape in layout.outer.items()}
    shapes |= {name: shape for name, shape in layout.tied.items() if name in outer}
    _check_part(f"method {method}, outside the layers", base, shapes, outer)


def _check_part(where: str, base: BaseCheckpoint, shapes: Mapping[str, Shape], recipes: Recipes) -> None:
    missing = [name for name in shapes if name not in recipes]
    if missing:
        others = f" and {len(missing) - _LISTED} others" if len(missing) > _LISTED else ""
        raise MethodError(
            f"{where}: there is no recipe for {', '.join(missing[:_LISTED])}{others}; expected one for each of "
            f"{len(shapes)} tensors."
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
    for name, recipe in ((name, recipe) for name, recipe in recipes.items() if name not in shapes):
        is_carried = isinstance(recipe, Copy | NewRows) and (
            recipe.source in base.unexpected or recipe.source in base.surroundings
        )
        if not is_carried:
            raise MethodError(f"{where}: there is a recipe for {name}; expected none but for {', '.join(shapes)}.")

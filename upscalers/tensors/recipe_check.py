"""Check of the recipes that a method returns, before anything is written: one for every tensor of the result, no others."""

from collections.abc import Mapping, Sequence

from upscalers.architecture.family import Config, LayerTensor, Layout
from upscalers.checkpoint.base_model import BaseModel
from upscalers.plan.plan import Plan
from upscalers.request.errors import MethodError
from upscalers.tensors.layer_blocks import LayerBlocks
from upscalers.tensors.recipes import Combine, Copy, Recipe

Recipes = Mapping[str, Recipe]
# Name within the layer and role of each base tensor, by full name; outside the layers, its name in the result and its own.
Origin = tuple[str, str | None]

_LISTED = 3


def check_recipes(
    method: str,
    base: BaseModel,
    plan: Plan,
    config: Config,
    layout: Layout,
    layers: Sequence[Recipes],
    outer: Recipes,
) -> None:
    """Refuse recipes (of layers, and `outer` ones) that are missing, of a wrong shape or role, or superfluous for the new config."""
    for subject, number in (
        ("a config with num_hidden_layers =", config.get("num_hidden_layers")),
        ("recipes for this many layers:", len(layers)),
    ):
        if number != plan.num_layers:
            raise MethodError(
                f"method {method} gives {subject} {number}; expected {plan.num_layers}, as many as its plan has."
            )
    names = base.outer_names(plan.num_layers)
    origins: dict[str, Origin] = {name: (new, name) for name, new in names.items()}
    for tensors, full_names in zip(base.layout.layers, base.layer_names, strict=True):
        for name, full_name in full_names.items():
            origins[full_name] = (name, tensors[name].role if name in tensors else None)
    for index, (recipes, expected) in enumerate(zip(layers, layout.layers, strict=True)):
        _check_part(f"method {method}, layer {index}", base, origins, expected, recipes)
    shapes = {name if base.prefix else name.removeprefix("model."): shape for name, shape in layout.outer.items()}
    shapes |= {name: shape for name, shape in layout.tied.items() if name in outer}
    expected = {name: LayerTensor(name, shape) for name, shape in shapes.items()}
    _check_part(f"method {method}, outside the layers", base, origins, expected, outer)


def _check_part(
    where: str, base: BaseModel, origins: Mapping[str, Origin], expected: Mapping[str, LayerTensor], recipes: Recipes
) -> None:
    missing = [name for name in expected if name not in recipes]
    if missing:
        others = f" and {len(missing) - _LISTED} others" if len(missing) > _LISTED else ""
        raise MethodError(
            f"{where}: there is no recipe for {', '.join(missing[:_LISTED])}{others}; expected one for each of "
            f"{len(expected)} tensors."
        )
    for name, tensor in expected.items():
        subject, recipe = f"{where}: {name}", recipes[name]
        if tuple(recipe.shape) != tensor.shape:
            raise MethodError(f"{subject} is {list(recipe.shape)}; expected {list(tensor.shape)}.")
        # Other recipes may read tensors of any role.
        for source in recipe.sources if isinstance(recipe, Copy | Combine | LayerBlocks) else ():
            if source not in base.tensors:
                raise MethodError(f"{subject} is made from {source}; expected a tensor of the base.")
            shape, (own_name, role) = base.tensors[source].shape, origins[source]
            if shape != tensor.shape and not isinstance(recipe, LayerBlocks):
                raise MethodError(
                    f"{subject} is made from {source}, which is {list(shape)}; expected {list(tensor.shape)}."
                )
            if role != tensor.role:
                raise MethodError(
                    f"{subject} is made from {source}, whose role is {role or 'unknown'}; expected {tensor.role}."
                )
            if tensor.role == "memory" and own_name != name:  # one role for all tensors of memories
                raise MethodError(f"{subject} is made from {source}; expected the same tensor of another memory.")
    for name, recipe in recipes.items():
        if name not in expected and not (
            isinstance(recipe, Copy)
            and (recipe.source in base.unexpected or recipe.source in base.surroundings)
            and recipe.shape == base.tensors[recipe.source].shape
            and origins[recipe.source][0] == name
        ):
            raise MethodError(f"{where}: there is a recipe for {name}; expected none but for {', '.join(expected)}.")

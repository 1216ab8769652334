"""Base classes and helpers of dense methods, whose new layers are ordinary decoder layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from upscalers.architecture.layer_tensors import MATRIX_ROLES, NEEDED_MATRICES, LayerTensor, projections_of
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.methods.contract import Method, Surgery
from upscalers.plan import New, Plan
from upscalers.tensors.recipes import Combine, Copy, Fill, Recipe

COPYING = "llama-pro or solar"
_WRITING_ROLES = frozenset({"output_projection", "down", "attention_output_norm", "mlp_output_norm"})
# Written to the residual stream only in some layers, by the role that is filled in these layers too.
_ALSO_WRITING = {"down": "per_layer_projection", "mlp_output_norm": "per_layer_output_norm"}
IdentityInit = Literal["auto", "zero_out_proj", "zero_out_norm", "none"]
IDENTITY_HELP = (
    "what makes a new block the identity: zero_out_proj zeroes the two projections that write to the residual stream, "
    "zero_out_norm the gains of the norms after them; auto uses the second if the family has such norms"
)


@dataclass
class FusionOptions:
    """Options of methods that fuse the layers on both sides of a new layer."""

    identity: IdentityInit = option("none", IDENTITY_HELP)
    neighbours: Literal["adjacent", "same_type"] = option(
        "adjacent",
        "adjacent fuses the base layers on both sides; same_type looks further back if the attention of the one before "
        "(sliding or full) is not that of the one after",
    )


class DenseMethod(Method):
    """Method that inserts blocks of the family's classes; the result has the native architecture."""

    def __init__(self, options: Any):
        super().__init__(options)
        # A method without the option promises identity if its class does.
        self.identity_init: IdentityInit = getattr(options, "identity", "auto" if self.identity else "none")
        self.identity = self.identity_init != "none"

    def check(self, base: BaseCheckpoint) -> None:
        if self.identity_init == "zero_out_norm" and not base.layout.norms_behind:
            raise RequestError(
                f"identity is 'zero_out_norm', but {base.family.model_type} has no norm after its projections; expected "
                "'zero_out_proj' or 'auto'."
            )

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        plan = super().plan(base, num_new_layers, placement)
        for index, layer in enumerate(plan.layers):
            if isinstance(layer, New):
                self.check_sources(base, layer.sources, f"new layer {index}")
        return plan

    def check_sources(self, base: BaseCheckpoint, sources: Sequence[int], layer: str) -> None:
        """Refuse, with a `RequestError`, base layers unfit for a new layer, which messages name `layer`."""
        first = base.layout.backbone_layers[sources[0]]
        filled = self.filled_roles(base)
        needed = self.needed_roles(base)
        known = {tensor.role for tensor in first.values() if tensor.parts is None}
        known |= {projection.role for projection in projections_of(first)}
        missing = sorted({*needed, *filled} - known)
        if missing:
            stacked = next((name for name, tensor in first.items() if tensor.parts == ()), None)
            others_that_do = COPYING if set(missing) - _WRITING_ROLES else "solar"
            raise RequestError(
                f"{layer} would be made from base layer {sources[0]}, which has no separate {missing[0]} that is known"
                f"{f' ({stacked} stacks several projections)' if stacked else ''}; {self.name} "
                f"{'fills it with zeros' if missing[0] in filled else 'needs it'}. Choose {others_that_do}, or a method that adds "
                "memory."
            )

    def needed_roles(self, base: BaseCheckpoint) -> frozenset[str]:
        return frozenset()

    def filled_roles(self, base: BaseCheckpoint) -> frozenset[str]:
        """Return the roles whose tensors are filled to make a block the identity.

        Zero projections suffice in every family, but a norm's derivative at zero is 1 / sqrt(eps). With norms after the projections,
        their gains are zeroed instead, which keeps the first training step small.
        """
        if self.identity_init == "none":
            return frozenset()
        behind = base.layout.norms_behind
        if self.identity_init == "zero_out_norm" or (self.identity_init == "auto" and behind):
            return frozenset({"attention_output_norm", "mlp_output_norm"})
        return frozenset({"output_projection", "down"})

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        norms = self.filled_roles(base) & {"attention_output_norm", "mlp_output_norm"}
        zero_gains = {
            f"layers.{index}.{name}": base.layer_names[layer.sources[0]][name]
            for index, layer in enumerate(plan.layers)
            if isinstance(layer, New)
            for name, tensor in base.layout.backbone_layers[layer.sources[0]].items()
            if tensor.role in norms
        }
        return replace(super().surgery(base, plan, seed), zero_gains=zero_gains)

    def new_layer_recipes(self, base: BaseCheckpoint, layer: New, index: int, seed: int) -> dict[str, Recipe]:
        filled = self.filled_roles(base)
        filled |= {_ALSO_WRITING[role] for role in filled if role in _ALSO_WRITING}
        recipes: dict[str, Recipe] = {}
        for name, tensor in base.layout.backbone_layers[layer.sources[0]].items():
            if tensor.role in filled:
                recipes[name] = Fill(tensor.shape, -(tensor.offset or 0.0))
            elif filled and tensor.role == "layer_scalar":
                recipes[name] = Fill(tensor.shape, 1.0)
            else:
                recipes[name] = self.tensor_recipe(base, layer, name, tensor)
        return recipes

    def tensor_recipe(self, base: BaseCheckpoint, layer: New, name: str, tensor: LayerTensor) -> Recipe:
        """Return the recipe of a tensor that the identity does not fill: by default the first source's."""
        source = base.layer_names[layer.sources[0]][name]
        return Copy(base.tensors[source].shape, source)


def whole_layer(base: BaseCheckpoint, layer: int, index: int) -> int:
    """Return `layer`, the source of new layer `index`; refuse memory blocks, which lack a network."""
    if layer in base.layout.memories.inserted:
        raise RequestError(
            f"new layer {index} would be made from base layer {layer}, which is a memory block; expected a layer with a "
            "feed-forward network. Choose another placement."
        )
    return layer


class FusionMethod(DenseMethod):
    """Method that makes each new block from the base layers on both sides, with `FusionOptions`."""

    default_placement = "top-heavy"

    @property
    def kinds_remedy(self) -> str:
        return "Pass --set neighbours=same_type, or choose another placement."

    def check_sources(self, base: BaseCheckpoint, sources: Sequence[int], layer: str) -> None:
        """Refuse base layers that differ in tensors, have experts, or lack needed or filled projections."""
        first, *others = (base.layout.backbone_layers[source] for source in sources)
        experts = [source for source in sources if source in base.layout.expert_layers]
        if experts:
            raise RequestError(
                f"{layer} would be made from base layer {experts[0]}, whose feed-forward network is a mixture of experts; "
                f"{self.name} combines matrices of several layers, and experts of one layer have no counterparts in another; "
                f"expected dense layers. Choose {COPYING}, or a method that adds memory."
            )
        for source, tensors in zip(sources[1:], others, strict=True):
            if tensors != first:
                differing = next(name for name in (*first, *tensors) if first.get(name) != tensors.get(name))
                raise RequestError(
                    f"{layer} would be made from base layers {sources[0]} and {source}, which differ in {differing}; expected "
                    f"layers of one kind. {self.kinds_remedy} Or choose {COPYING}."
                )
        super().check_sources(base, sources, layer)

    def sources(self, base: BaseCheckpoint, layer: New, index: int) -> tuple[int, ...]:
        """Return the base layers on both sides of a new layer, next first; refuse missing or memory blocks.

        With `same_type`, look further back for a layer with the attention type of the next layer.
        """
        if layer.previous is None or layer.next is None:
            side = "before" if layer.previous is None else "after"
            raise RequestError(
                f"new layer {index} has no base layer {side} it; expected one on each side, since both are fused. Choose placement "
                "top-heavy, or indices inside the model."
            )
        following = whole_layer(base, layer.next, index)
        types = base.layout.layer_kinds
        if self.options.neighbours != "same_type" or types is None:
            return following, whole_layer(base, layer.previous, index)
        for candidate in range(layer.previous, -1, -1):
            if types[candidate] == types[following] and candidate not in base.layout.memories.inserted:
                return following, candidate
        raise RequestError(
            f"new layer {index} stands before base layer {following} ({types[following]}), and no layer before it attends like "
            "it; expected one, since neighbours is 'same_type'. Choose another placement, or neighbours=adjacent."
        )

    def tensor_recipe(self, base: BaseCheckpoint, layer: New, name: str, tensor: LayerTensor) -> Recipe:
        if tensor.role == "buffer":
            return super().tensor_recipe(base, layer, name, tensor)
        terms = tuple((base.layer_names[source][name], 1.0 / len(layer.sources)) for source in layer.sources)
        return Combine(base.tensors[terms[0][0]].shape, terms)

    def surgery(self, base: BaseCheckpoint, plan: Plan, seed: int) -> Surgery:
        return replace(super().surgery(base, plan, seed), warnings=self._mixed_kinds(base, plan))

    def _mixed_kinds(self, base: BaseCheckpoint, plan: Plan) -> tuple[str, ...]:
        """Return a warning about new layers that fuse layers of two kinds, if there are any."""
        kinds = base.layout.layer_kinds or [""] * base.num_layers
        mixed = {
            index: sorted({kinds[source] for source in layer.sources})
            for index, layer in enumerate(plan.layers)
            if isinstance(layer, New) and len({kinds[source] for source in layer.sources}) > 1
        }
        if not mixed:
            return ()
        difference = "sliding and full attention, whose rotary embeddings and windows may differ"
        if kinds != base.layout.layer_types:
            difference = f"layers that the config describes differently ({' and '.join(next(iter(mixed.values())))})"
        layers = ", ".join(map(str, mixed))
        subject = f"new layer {layers} fuses" if len(mixed) == 1 else f"new layers {layers} fuse"
        return (f"{subject} {difference}. Pass neighbours=same_type to avoid it.",)


class MatrixMethod(FusionMethod):
    """Method that predicts or matches the matrices of the layers on both sides."""

    def needed_roles(self, base: BaseCheckpoint) -> frozenset[str]:
        return NEEDED_MATRICES

    def check_sources(self, base: BaseCheckpoint, sources: Sequence[int], layer: str) -> None:
        super().check_sources(base, sources, layer)
        projections = projections_of(base.layout.backbone_layers[sources[0]])
        for role in MATRIX_ROLES:
            weights = [each.name for each in projections if each.role == role and each.name.endswith(".weight")]
            if len(weights) > 1:
                raise RequestError(
                    f"{layer} would be made from base layer {sources[0]}, which has several matrices of the role {role} "
                    f"({', '.join(weights)}); {self.name} expects one. Choose avg-deus, {COPYING}, or a method that adds memory."
                )

"""Reports of routers on a pass, and their losses, which models that compute a loss add to it."""

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from midus_hf.memory.needs import SERVICES, Service, mixin_for, register
from midus_hf.memory.registry import MemoryModule
from midus_hf.memory.routing.report import RouterReports
from midus_hf.models.parts import CACHE

# Fields of the family's output that are kept.
_FIELDS = ("logits", "start_logits", "end_logits", CACHE, "hidden_states", "attentions")


@register(SERVICES, "report")
class Reports(Service):
    """Collector of the routers' reports, if the pass was given one."""

    def of_pass(self, model: Any, arguments: dict[str, Any], own: Mapping[str, Any]) -> RouterReports | None:
        """Return the collector of the pass."""
        return own["memory_reports"]

    @staticmethod
    def given(value: Any, memory_class: type[MemoryModule], name: str, layer: int) -> dict[str, Any]:
        """Return the report to which the memory writes in the layer. Default: routers do not report."""
        return {} if value is None else {"report": value.of(name, layer)}


@mixin_for("report")
class AddsRouterLosses:
    """Mixin for a language model or a task head that adds the losses of routers to its loss.

    In training, losses are added as in transformers' mixture-of-experts models. If `output_router_logits`, an argument of `forward`
    or an attribute of the config, is true, the routers' logits are returned, and the losses are added outside training too. If it
    is false, losses are never added.
    """

    # Class of outputs: it has `loss`, `aux_loss`, `router_logits`, and those of `_FIELDS` that the family's output has.
    output_class: ClassVar[Any]
    config: Any
    training: bool

    def forward(self, **arguments: Any) -> Any:
        """Run the family's forward, and add the losses of routers.

        Args:
            arguments: Keyword arguments of the family's forward, with `return_dict` and `output_router_logits` perhaps.
        """
        if "report" not in self.stack.services:
            return super().forward(**arguments)
        wanted = arguments.pop("output_router_logits", None)
        if wanted is None:
            wanted = getattr(self.config.get_text_config(), "output_router_logits", None)
        learns = self.training and torch.is_grad_enabled()
        trains = learns and any(arguments.get(name) is not None for name in ("labels", "start_positions"))
        if learns and not trains and wanted is None:
            warnings.warn(
                "a pass that trains has no labels, so the losses of its routers are not added; where the loss is computed outside "
                "the model, call it with output_router_logits=True and add aux_loss.",
                stacklevel=5,
            )
        if wanted is False or not (wanted or trains):
            return super().forward(**arguments)
        return_dict = arguments.pop("return_dict", None)
        reports = RouterReports(needs_gradient=trains)
        family_output = super().forward(**arguments, memory_reports=reports, return_dict=True)
        added, loss = reports.loss(), family_output.loss
        if loss is not None and added is not None:
            share = self.share_of_step(arguments)
            loss = loss + (share.to(loss.device) if isinstance(share, torch.Tensor) else share) * added.to(loss.device)
        values = {name: family_output[name] for name in _FIELDS if name in family_output}
        values |= {"loss": loss, "aux_loss": added, "router_logits": reports.logits() if wanted else None}
        output = self.output_class(**values)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def share_of_step(self, arguments: Mapping[str, Any]) -> torch.Tensor | float:
        """Return the weight of the routers' losses in the loss of this pass. Default: 1, for a loss that is a mean over the pass."""
        return 1.0

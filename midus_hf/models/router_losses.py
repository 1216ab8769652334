"""Mixin for models that compute a loss: the losses of routers are added to the loss."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from midus_hf.config.installed import needed_for
from midus_hf.memory.routing.report import RouterReports
from midus_hf.models.parts import CACHE

# Fields of the family's output that are kept.
_FIELDS = ("logits", "start_logits", "end_logits", CACHE, "hidden_states", "attentions")


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

    @needed_for("reports")
    def with_router_losses(
        self,
        family_forward: Callable[..., Any],
        arguments: dict[str, Any],
        wanted: bool | None,
        has_labels: bool,
        share: torch.Tensor | float = 1.0,
    ) -> Any:
        """Run the family's forward, and add the losses of routers.

        Args:
            family_forward: The family's forward.
            arguments: Keyword arguments of the family's forward, with `return_dict` perhaps.
            wanted: `output_router_logits`, the argument; None for the config's value.
            has_labels: Whether the family's forward computes a loss.
            share: Weight of the losses of routers. Default: 1.
        """
        if wanted is None:
            wanted = getattr(self.config.get_text_config(), "output_router_logits", None)
        learns = self.training and torch.is_grad_enabled()
        if learns and not has_labels and wanted is None:
            warnings.warn(
                "a pass that trains has no labels, so the losses of its routers are not added; where the loss is computed outside "
                "the model, call it with output_router_logits=True and add aux_loss.",
                stacklevel=4,
            )
        trains = learns and has_labels
        if wanted is False or not (wanted or trains):
            return family_forward(**arguments)
        return_dict = arguments.pop("return_dict", None)
        reports = RouterReports(needs_gradient=trains)
        family_output = family_forward(**arguments, memory_reports=reports, return_dict=True)
        added, loss = reports.loss(), family_output.loss
        if loss is not None and added is not None:
            loss = loss + (share.to(loss.device) if isinstance(share, torch.Tensor) else share) * added.to(loss.device)
        values = {name: family_output[name] for name in _FIELDS if name in family_output}
        values |= {"loss": loss, "aux_loss": added, "router_logits": reports.logits() if wanted else None}
        output = self.output_class(**values)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

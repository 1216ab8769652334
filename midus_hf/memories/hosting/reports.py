"""Reports of a model's routers on one forward pass, and the service that adds their losses to the model's."""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.parts import CACHE, Keywords
from midus_hf.memories.hosting.service import HostStack, Service

# Fields of the family's output that are kept.
_FIELDS = ("logits", "start_logits", "end_logits", CACHE, "hidden_states", "attentions")


class RouterReports:
    """Reports of all routers on one forward pass; a layer repeated by activation checkpointing replaces its report by an equal one.

    Args:
        needs_gradient: Whether the routers' losses need gradients. Default: false.
    """

    def __init__(self, needs_gradient: bool = False):
        self.needs_gradient = needs_gradient
        # Logits and losses by layer and memory.
        self.routed: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def report_for(self, name: str, layer: int) -> "RouterReport":
        """Return the report to which a memory in a layer writes, by the memory's name and the layer's index."""
        return RouterReport(self, name, layer)

    def logits(self) -> tuple[torch.Tensor, ...]:
        """Return the logits of all routers, ordered by layer."""
        return tuple(self.routed[key][0] for key in sorted(self.routed))

    def loss(self) -> torch.Tensor | None:
        """Return the sum over memories of the mean loss of each memory's layers; None if no router reported."""
        losses: dict[str, list[torch.Tensor]] = {}
        for layer, name in sorted(self.routed):
            losses.setdefault(name, []).append(self.routed[layer, name][1])
        means = [
            torch.stack([loss.to(memory_losses[0].device) for loss in memory_losses]).mean()
            for memory_losses in losses.values()
        ]
        return torch.stack([mean.to(means[0].device) for mean in means]).sum() if means else None


class RouterReport:
    """Writer of one router's report.

    Args:
        reports: All reports of the pass.
        name: Name of the router's memory.
        layer: Index of the router's layer.
    """

    def __init__(self, reports: RouterReports, name: str, layer: int):
        self._reports, self._name, self._layer = reports, name, layer

    def tell(self, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Store the logits `[S, C]` and the loss, a scalar.

        Raises:
            RequestError: If losses need gradients and the router runs without, as under reentrant activation checkpointing.
        """
        if self._reports.needs_gradient and not torch.is_grad_enabled():
            raise RequestError(
                f"the router of memory {self._name!r} in layer {self._layer} runs without gradients in a pass that trains, as under "
                "reentrant activation checkpointing; expected gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        self._reports.routed[self._layer, self._name] = (logits, loss)


class Reports(Service):
    """Reports of routers, to which each memory writes as `report` if the pass collects them, and the losses of routers.

    In training, losses are added as in transformers' mixture-of-experts models. If `output_router_logits`, an argument of `forward`
    or an attribute of the config, is true, the routers' logits are returned, and the losses are added outside training too. If it
    is false, losses are never added.
    """

    key = "report"

    def of_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> RouterReports | None:
        """Return the collector of the pass."""
        return own["memory_reports"]

    @staticmethod
    def given(value: RouterReports | None, name: str, layer: int) -> Keywords:
        """Return the report to which the memory writes in the layer. Default: routers do not report."""
        return {} if value is None else {"report": value.report_for(name, layer)}

    def run(self, model: Any, forward: Callable[[Keywords], Any], arguments: Keywords) -> Any:
        """Run the forward of a model, and add the losses of routers. `return_dict` and `output_router_logits` may be given."""
        wanted = arguments.pop("output_router_logits", None)
        if wanted is None:
            wanted = getattr(model.config.get_text_config(), "output_router_logits", None)
        learns = model.training and torch.is_grad_enabled()
        trains = learns and any(arguments.get(name) is not None for name in ("labels", "start_positions"))
        if learns and not trains and wanted is None:
            warnings.warn(
                "a pass that trains has no labels, so the losses of its routers are not added; where the loss is computed outside "
                "the model, call it with output_router_logits=True and add aux_loss.",
                stacklevel=6,
            )
        if wanted is False or not (wanted or trains):
            return forward(arguments)
        return_dict = arguments.pop("return_dict", None)
        reports = RouterReports(needs_gradient=trains)
        family_output = forward({**arguments, "memory_reports": reports, "return_dict": True})
        added, loss = reports.loss(), family_output.loss
        if loss is not None and added is not None:
            share = model.share_of_step(arguments)
            loss = loss + (share.to(loss.device) if isinstance(share, torch.Tensor) else share) * added.to(loss.device)
        values = {name: family_output[name] for name in _FIELDS if name in family_output}
        values |= {"loss": loss, "aux_loss": added, "router_logits": reports.logits() if wanted else None}
        output = model.output_class(**values)
        return_dict = model.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

"""What a run prints before its first step: what trains, at which rates, and on which text."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from transformers import PreTrainedModel

from midus_hf.training.parameter_groups import parameter_groups
from midus_hf.training.rates import VALUE_DECAY_RATIO, Rates
from midus_hf.training.trains_blocks import GROUP as BLOCKS_GROUP
from midus_hf.training.trains_blocks import banks_that_train


def print_start(rates: Rates, report: RenderableType, model: PreTrainedModel, data: Sequence[str]) -> None:
    """Print it.

    Args:
        rates: Of the run.
        report: What trains.
        model: With `requires_grad` set.
        data: What was read and what it makes, a sentence each.
    """
    console = Console()
    console.print(report)
    groups = Table("group", "tensors", "parameters", "maximum rate", "course", "decay")
    courses = {
        "schedule": rates.schedule,
        "constant": "constant",
        "4x-to-1x": f"{rates.schedule}, 4x to 1x in {rates.value_decay_ratio or VALUE_DECAY_RATIO:.0%}",
    }
    for group in parameter_groups(model, rates):
        tensors, parameters = str(len(group["params"])), sum(parameter.numel() for parameter in group["params"])
        if group["name"] == BLOCKS_GROUP:
            layouts = [layout for banks in banks_that_train(model) for layout in banks.layouts.values()]
            tensors, parameters = "as fetched", sum(layout.bank for layout in layouts)
        groups.add_row(
            group["name"].replace("_", " "),
            tensors,
            f"{parameters:,}",
            f"{group['lr']:g}",
            courses[group["course"]],
            f"{group['weight_decay']:g}",
        )
    console.print(groups)
    for line in data:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

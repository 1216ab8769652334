"""What a run prints before its first step: what trains, at which rates, and on which text."""

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from midus_hf.training.freezing import TrainableReport
from midus_hf.training.options import TrainConfig
from midus_hf.training.parameter_groups import parameter_groups
from midus_hf.training.training_data import TrainingData, describe_corpus


def print_start(config: TrainConfig, report: TrainableReport, dataset: TrainingData, model: PreTrainedModel) -> None:
    """Print it.

    Args:
        config: The options of the run.
        report: What trains.
        dataset: The sequences of the run.
        model: With `requires_grad` set.
    """
    console = Console()
    console.print(report)
    groups = Table("group", "tensors", "parameters", "maximum rate", "course", "decay")
    courses = {"schedule": config.schedule, "constant": "constant", "4x-to-1x": f"{config.schedule}, 4x to 1x"}
    for group in parameter_groups(model, config):
        groups.add_row(
            group["name"].replace("_", " "),
            str(len(group["params"])),
            f"{sum(parameter.numel() for parameter in group['params']):,}",
            f"{group['lr']:g}",
            courses[group["course"]],
            f"{group['weight_decay']:g}",
        )
    console.print(groups)
    for line in describe_corpus(config, dataset):
        console.print(line, markup=False, highlight=False, soft_wrap=True)

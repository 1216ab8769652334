"""The files of configs/accelerate, and what `accelerate launch` makes of them for each process."""

import os
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"


def launched_environment(name: str) -> dict[str, str]:
    """The variables that `accelerate launch --config_file` sets, beside those that are there."""
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    environment = prepare_multi_gpu_env(arguments)
    return {
        variable: value
        for variable, value in environment.items()
        if variable.startswith(("ACCELERATE_", "FSDP_")) and os.environ.get(variable) != value
    }

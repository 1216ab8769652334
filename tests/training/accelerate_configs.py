"""The files of configs/accelerate, and what `accelerate launch` makes of them for each process."""

import os
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"


def launched_environment(name: str) -> dict[str, str]:
    """The variables that `accelerate launch --config_file` sets, beside those that are there."""
    words = ["--config_file", str(CONFIGS / f"{name}.yaml"), "script.py"]
    arguments, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepare_multi_gpu_env(arguments)
    return {
        variable: value
        for variable, value in environment.items()
        if variable.startswith(("ACCELERATE_", "FSDP_")) and os.environ.get(variable) != value
    }

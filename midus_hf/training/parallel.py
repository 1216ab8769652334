"""FSDP and DeepSpeed for any Trainer: whole models are saved, and setups that do not shard refused."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers.utils import CONFIG_NAME

from midus_hf.config.errors import RequestError, print_note
from midus_hf.training.checkpoints import has_optimizer_state


def prepare_sharing(trainer: Any) -> None:
    """Prepare FSDP or DeepSpeed for a model; refuse setups that would not shard, or round frozen weights.

    FSDP2 gets the layer classes of the model unless the user named them; it computes in lower precision, but reduces gradients and
    returns losses in float32.
    """
    for name, enabled in (("FSDP", trainer.is_fsdp_enabled), ("DeepSpeed", trainer.is_deepspeed_enabled)):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true" and not enabled:
            raise RequestError(
                f"accelerate was started with {name}, which does not shard on {trainer.args.device.type}: all processes would "
                "hold whole models. Start it with configs/accelerate/ddp.yaml, or on accelerators."
            )
    if getattr(trainer.args, "protect", None) and (trainer.is_fsdp_enabled or _is_zero_3(trainer)):
        raise RequestError(
            "protect compares whole models, and the processes share parameters; expected processes that hold whole models. "
            "Start the run with configs/accelerate/ddp.yaml."
        )
    if trainer.is_fsdp_enabled and trainer.args.save_only_model:
        raise RequestError(
            "save_only_model is true, and processes that share parameters by FSDP save them with the optimizer's; expected whole "
            "checkpoints. Leave save_only_model out, or save_steps."
        )
    if trainer.is_deepspeed_enabled:
        settings = _deepspeed_settings(trainer)
        for section in ("optimizer", "scheduler"):
            if section in settings:
                raise RequestError(
                    f"the file of DeepSpeed has a section {section!r}, which would replace the run's groups and rates; "
                    "expected none. Remove it from the file."
                )
        dtype = dtype_of_deepspeed(trainer)
        for name, parameter in trainer.model.named_parameters():
            if dtype is not None and not parameter.requires_grad and parameter.dtype is torch.float32:
                reason = "bf16 is set" if trainer.args.bf16 else f"the file of DeepSpeed sets {dtype}"
                raise RequestError(
                    f"{reason}, and DeepSpeed casts a whole model to {dtype}: {name}, which is frozen in float32, would be "
                    f"rounded; expected fp32, or a model in {dtype}. Start it with configs/accelerate/fsdp2.yaml."
                )
        if _is_zero_3(trainer):
            # Despite the option's name, DeepSpeed gathers weights in the dtype that they have.
            settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        _prepare_fsdp(plugin, trainer.model)


def _prepare_fsdp(plugin: Any, model: Any) -> None:
    if plugin.fsdp_version != 2:
        raise RequestError(
            f"fsdp_version is {plugin.fsdp_version}, which flattens parameters, so that matrices and norms cannot be distinguished; "
            "expected 2, as in configs/accelerate/fsdp2.yaml."
        )
    if plugin.transformer_cls_names_to_wrap is None:
        # The model's class also names the family's layers, which a model lacks if all its layers host memories.
        names = {type(module).__name__ for module in model.modules()}
        plugin.transformer_cls_names_to_wrap = sorted(names & set(model._no_split_modules or ()))
    policy, full = plugin.mixed_precision_policy, torch.float32
    if policy is not None and policy.param_dtype is not None:
        plugin.mixed_precision_policy = dataclasses.replace(policy, reduce_dtype=full, output_dtype=full)


def _deepspeed_settings(trainer: Any) -> dict[str, Any]:
    plugin = getattr(trainer.accelerator.state, "deepspeed_plugin", None)
    return {} if plugin is None else plugin.deepspeed_config


def _is_zero_3(trainer: Any) -> bool:
    return trainer.is_deepspeed_enabled and _deepspeed_settings(trainer).get("zero_optimization", {}).get("stage") == 3


def shares_parameters(trainer: Any) -> bool:
    """Return whether each process holds only shards, by FSDP, or by ZeRO-3 once it has the model."""
    if trainer.is_deepspeed_enabled:
        return _is_zero_3(trainer) and getattr(trainer, "deepspeed", None) is not None
    return trainer.is_fsdp_enabled


def dtype_of_deepspeed(trainer: Any) -> str | None:
    """Return the dtype that DeepSpeed casts the model to, by the run's bf16 or DeepSpeed's file, or None."""
    if trainer.args.bf16:
        return "bfloat16"
    dtypes = {"bf16": "bfloat16", "fp16": "float16"}
    settings = _deepspeed_settings(trainer)
    return next((dtype for key, dtype in dtypes.items() if settings.get(key, {}).get("enabled") is True), None)


def check_checkpoint(trainer: Any, checkpoint: Path) -> None:
    """Refuse a checkpoint without optimizer or of other sharding, which a Trainer would accept silently."""
    if not has_optimizer_state(checkpoint):
        raise RequestError(
            f"{checkpoint} has no optimizer and no schedule, as save_only_model saves it; expected a complete checkpoint. Start the "
            "run again without save_only_model, or load trained parameters by midus_hf.training.load_checkpoint."
        )
    ways = (
        ("share parameters by FSDP", "pytorch_model_fsdp*", trainer.is_fsdp_enabled),
        ("share parameters by DeepSpeed", "global_step*/zero_pp_rank_*_model_states.pt", _is_zero_3(trainer)),
        ("share moments by DeepSpeed", "global_step*", trainer.is_deepspeed_enabled),
        ("hold whole models", "", True),
    )
    saved_sharing = next(way for way, files, _ in ways if not files or any(checkpoint.glob(files)))
    sharing = next(way for way, _, is_current in ways if is_current)
    if saved_sharing != sharing:
        raise RequestError(
            f"{checkpoint} was saved by processes that {saved_sharing}, and these {sharing}; resume it as the run "
            "began, or start a new run."
        )
    processes = trainer.args.world_size
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{index}.pth" for index in range(processes)]
    if trainer.args.process_index == 0 and not all((checkpoint / name).is_file() for name in names):
        print_note(f"{checkpoint} has the random numbers of another number of processes: those of dropout start over")


def save_gathered(trainer: Any, output_dir: str | None) -> None:
    """Save a sharded model in `trainer.saved_dtypes`, and upload it if asked; all processes call this."""
    # DeepSpeed returns the model in the first process, and nothing in the others.
    state: dict[str, torch.Tensor] | None = trainer.accelerator.get_state_dict(
        trainer.model if trainer.is_fsdp_enabled else trainer.deepspeed
    )
    model: Any = trainer.model
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    tied = every - {name for name, _ in model.named_parameters()}  # a cast would turn these into separate tensors
    saved = {
        name: tensor.to(trainer.saved_dtypes.get(name, tensor.dtype))
        for name, tensor in (state or {}).items()
        if name not in tied
    }
    trainer._save(output_dir, saved)
    first = next((name for name, tensor in model.named_parameters() if tensor.is_floating_point()), None)
    if trainer.args.should_save and first in saved:
        config = Path(output_dir or str(trainer.args.output_dir)) / CONFIG_NAME
        settings = json.loads(config.read_text(encoding="utf-8"))
        settings["dtype"] = str(saved[first].dtype).removeprefix("torch.")  # Transformers wrote that of training
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

"""Parameters that accelerate shards: the model is saved whole, and a run that silently fails to shard is refused."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers.utils import CONFIG_NAME

_WHOLE, _FSDP = "hold whole models", "share parameters by FSDP"
_ZERO, _ZERO_3 = "share moments by DeepSpeed", "share parameters by DeepSpeed"


class Shards:
    """Support of a Trainer of any kind for parameters that FSDP or DeepSpeed may shard.

    FSDP2 is given the layer classes of the model, unless the user named them, and computes in lower precision but
    reduces gradients and returns losses in float32. With `SHARDED_STATE_DICT`, and with DeepSpeed's ZeRO-3 unless its
    file says otherwise, a Trainer's `save_model` writes no model, but this class writes one. The Trainer writes
    checkpoints without this class.

    Raises:
        ValueError: If accelerate is told to shard but does not, as on CPUs; if it uses FSDP version 1; if DeepSpeed
            would round frozen parameters, or its file has an optimizer or a scheduler.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        # Dtypes in which tensors of a model with shared parameters are saved, by name; other tensors keep their dtype.
        self.saved_dtypes: dict[str, torch.dtype] = {}
        for name, enabled in (("FSDP", trainer.is_fsdp_enabled), ("DeepSpeed", trainer.is_deepspeed_enabled)):
            if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true" and not enabled:
                raise ValueError(
                    f"accelerate was started with {name}, which does not shard on {trainer.args.device.type}: all processes would "
                    "hold whole models. Start it with configs/accelerate/ddp.yaml, or on accelerators."
                )
        if trainer.is_deepspeed_enabled and (dtype := self.dtype_of_deepspeed()) is not None:
            self._check_frozen(dtype)
        for section in ("optimizer", "scheduler"):
            if section in self._deepspeed_settings():
                raise ValueError(
                    f"the file of DeepSpeed has a section {section!r}, which would stand in place of the run's own groups and rates; "
                    "expected none. Take it out of the file."
                )
        if self._is_zero_3():
            # Despite the option's name, DeepSpeed gathers weights in the dtype that they have.
            self._zero_options()["stage3_gather_16bit_weights_on_model_save"] = True
        plugin = getattr(self._trainer.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            self._prepare_fsdp(plugin)

    @property
    def shares_parameters(self) -> bool:
        """True if each process holds only a share of every parameter, by FSDP, or by ZeRO-3 once it has the model."""
        has_engine = getattr(self._trainer, "deepspeed", None) is not None
        return self._trainer.is_fsdp_enabled or (self._is_zero_3() and has_engine)

    def _is_zero_3(self) -> bool:
        return self._trainer.is_deepspeed_enabled and self._zero_options().get("stage") == 3

    def _zero_options(self) -> dict[str, Any]:
        return self._deepspeed_settings().get("zero_optimization", {})

    def _deepspeed_settings(self) -> dict[str, Any]:
        plugin = getattr(self._trainer.accelerator.state, "deepspeed_plugin", None)
        return {} if plugin is None else plugin.deepspeed_config

    def dtype_of_deepspeed(self) -> str | None:
        """Return the dtype to which DeepSpeed casts the whole model, by the run's bf16 or DeepSpeed's file, or None."""
        if self._trainer.args.bf16:
            return "bfloat16"
        settings = self._deepspeed_settings()
        dtypes = {"bf16": "bfloat16", "fp16": "float16"}
        return next((dtype for key, dtype in dtypes.items() if settings.get(key, {}).get("enabled") is True), None)

    def _check_frozen(self, dtype: str) -> None:
        """Refuse parameters frozen in float32, which DeepSpeed would cast to `dtype` and save in it."""
        model: Any = self._trainer.model
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and parameter.dtype is torch.float32:
                reason = "bf16 is asked for" if self._trainer.args.bf16 else f"the file of DeepSpeed asks for {dtype}"
                raise ValueError(
                    f"{reason}, and DeepSpeed casts a whole model to {dtype}: {name}, which is frozen in float32, would be "
                    f"rounded; expected fp32, or a model in {dtype}. Start it with configs/accelerate/fsdp2.yaml."
                )

    def _prepare_fsdp(self, plugin: Any) -> None:
        if plugin.fsdp_version != 2:
            raise ValueError(
                f"fsdp_version is {plugin.fsdp_version}, which flattens parameters, so that matrices and norms cannot be told apart; "
                "expected 2, as in configs/accelerate/fsdp2.yaml."
            )
        model: Any = self._trainer.model
        if plugin.transformer_cls_names_to_wrap is None:
            # The model's class also names the family's own layers, of which a model has none if all its layers host memories.
            names = {type(module).__name__ for module in model.modules()}
            plugin.transformer_cls_names_to_wrap = sorted(names & set(model._no_split_modules or ()))
        policy = plugin.mixed_precision_policy
        if policy is not None and policy.param_dtype is not None:
            plugin.mixed_precision_policy = dataclasses.replace(
                policy, reduce_dtype=torch.float32, output_dtype=torch.float32
            )

    def check_checkpoint(self, checkpoint: Path) -> None:
        """Check that the processes share parameters as a checkpoint's processes did, or raise `ValueError`."""
        saved_sharing, own_sharing = _how_saved(checkpoint), self._how()
        if saved_sharing != own_sharing:
            raise ValueError(
                f"{checkpoint} was saved by processes that {saved_sharing}, and these {own_sharing}; resume it as the run "
                "began, or start a new run."
            )

    def _how(self) -> str:
        if self._trainer.is_deepspeed_enabled:
            return _ZERO_3 if self._is_zero_3() else _ZERO
        return _FSDP if self._trainer.is_fsdp_enabled else _WHOLE

    def save_model(self, output_dir: str | None, is_checkpoint: bool) -> bool:
        """Save the model if processes share it, gathered in the first process; return whether this was done.

        All processes call this. A model that is part of a checkpoint is left to the Trainer.
        """
        if is_checkpoint or not self.shares_parameters:
            return False
        self._save_whole(output_dir)
        if self._trainer.args.push_to_hub:
            self._trainer.push_to_hub(commit_message="Model save", revision=self._trainer.args.hub_revision)
        return True

    def _save_whole(self, output_dir: str | None) -> None:
        """Save parameters that processes share. The other processes do not wait for the first, whose disk may be full."""
        # All processes call this; DeepSpeed returns the model in the first process, and nothing in the others.
        state: dict[str, torch.Tensor] | None = self._trainer.accelerator.get_state_dict(
            self._trainer.model if self._trainer.is_fsdp_enabled else self._trainer.deepspeed
        )
        model: Any = self._trainer.model
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in model.named_parameters()}  # a cast would turn these into separate tensors
        saved = {
            name: tensor.to(self.saved_dtypes.get(name, tensor.dtype))
            for name, tensor in (state or {}).items()
            if name not in tied
        }
        self._trainer._save(output_dir, saved)
        first = next((name for name, tensor in model.named_parameters() if tensor.is_floating_point()), None)
        if self._trainer.args.should_save and first in saved:
            config = Path(output_dir or str(self._trainer.args.output_dir)) / CONFIG_NAME
            settings = json.loads(config.read_text(encoding="utf-8"))
            settings["dtype"] = str(saved[first].dtype).removeprefix("torch.")  # Transformers wrote that of training
            config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _how_saved(checkpoint: Path) -> str:
    """Return how the processes that saved a checkpoint shared parameters or moments, as a clause for messages."""
    if any(checkpoint.glob("pytorch_model_fsdp*")):
        return _FSDP
    if any(checkpoint.glob("global_step*/zero_pp_rank_*_model_states.pt")):
        return _ZERO_3
    return _ZERO if any(checkpoint.glob("global_step*")) else _WHOLE

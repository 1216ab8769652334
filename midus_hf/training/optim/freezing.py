"""Choice of the trained parameters (those added to the base, all, layers or roles), and their dtypes during training."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.config.errors import RequestError
from midus_hf.memories.tables import DeclaredModule
from midus_hf.models.view import ModelView
from midus_hf.training.arguments import Trainable

_ROLES = get_args(TrainedRole)
Resolved = Literal["new", "all"] | list[int] | list[TrainedRole]


@dataclasses.dataclass(frozen=True)
class TrainableReport:
    """Summary of the trained parameters, which `print` writes as a sentence.

    Args:
        trainable: `"new"`, `"all"`, or the list of layers or roles; the config's choice in place of `"auto"`.
        layers: Indices of the decoder layers that train, ascending.
        num_layers: L, number of all decoder layers.
        parameters: Number of parameters that train.
        total_parameters: Number of all parameters; tied ones count once.
        frozen: Roles of memory tensors that were excluded from training. Default: none.
        blocks: Number of parameters in the checkpoint's banks, whose blocks are trained when texts fetch them.
            Default: 0.
        fetched: Number of parameters of the blocks that a text fetches. Default: 0.
    """

    trainable: Resolved
    layers: list[int]
    num_layers: int
    parameters: int
    total_parameters: int
    frozen: list[TrainedRole] = dataclasses.field(default_factory=list)
    blocks: int = 0
    fetched: int = 0

    def __str__(self) -> str:
        choice = self.trainable if isinstance(self.trainable, str) else ", ".join(map(str, self.trainable))
        without = f" without the {' and '.join(self.frozen)} tensors of memories" if self.frozen else ""
        blocks = (
            f"the bank's blocks as texts fetch them, {self.fetched:,} of its {self.blocks:,} parameters by each text"
        )
        start, total = f"Training {choice}{without}: ", f"{self.total_parameters:,} parameters"
        if self.blocks and not self.parameters:
            return f"{start}{blocks}; the {total} outside the bank stay"
        layers = f"layers {', '.join(map(str, self.layers))} of {self.num_layers}" if self.layers else "no layer"
        share = f"{self.parameters:,} of {total} ({self.parameters / self.total_parameters:.2%})"
        return f"{start}{share}, in {layers}{f'; {blocks}' if self.blocks else ''}"


def resolve_trainable(config: PreTrainedConfig, trainable: Trainable) -> Resolved:
    """Replace `"auto"` by the config's choice, and refuse invalid choices, or those that are not in the model."""
    record, kind = record_of(config) or UpscaleRecord(), config.model_type
    resolved: Any = record.trainable if trainable == "auto" else trainable
    if trainable == "auto" and resolved not in ("new", "all"):
        raise RequestError(
            f"trainable is 'auto', and this {kind} model is a base, not an upscaled model: it has no new parameters. Upscale it "
            "first, set trainable: all to train the base itself, or set adapters, such as adapters: {r: 16}."
        )
    if isinstance(resolved, list) and all(type(layer) is int for layer in resolved):
        if not resolved or _outside(config, resolved) or len({*resolved}) < len(resolved):
            layers = f"0 <= layer < {config.get_text_config().num_hidden_layers}"
            raise RequestError(
                f"trainable is {resolved}; expected layers of this {kind} model ({layers}), at least one, and each once."
            )
    elif resolved == "new" or (isinstance(resolved, list) and set(resolved) <= set(_ROLES)):
        if not record.new_layers and not record.new_memories:
            raise RequestError(
                f"trainable is {trainable!r}, but the config of this {kind} model records no new layers in upscale.new_layers and no "
                "memories in upscale.new_memories; upscale the model first, or set trainable: all."
            )
        entries = config.memories().entries if hasattr(config, "memories") else ()
        types = {entry.name: entry.options.type for entry in entries}
        if not record.new_layers and {types.get(name) for name in record.new_memories} == {"packs"}:
            raise RequestError(
                f"trainable is {trainable!r} (what upscale added), and packs add texts, no parameters; expected some to train. "
                "Set trainable: all, or adapters, such as adapters: {r: 16}."
            )
    elif resolved != "all":
        raise RequestError(
            f"trainable is {trainable!r}; expected 'auto', 'new', 'all', a list of layer indices, or one of roles of memory tensors: "
            f"{', '.join(_ROLES)}."
        )
    return cast(Resolved, resolved)


def _outside(config: PreTrainedConfig, layers: Sequence[int]) -> list[int]:
    return [layer for layer in layers if not 0 <= layer < config.get_text_config().num_hidden_layers]


def set_trainable(
    model: PreTrainedModel | ModelView, trainable: Trainable = "auto", frozen: Sequence[TrainedRole] = ()
) -> TrainableReport:
    """Set `requires_grad` of every parameter. By default, train the parameters that the method's paper trains.

    With `"new"`, the added layers train whole (norms, projections, memory), memories attached to layers of the base
    train, and nothing else does: not the base layers, the embeddings, the final norm or the language model's head. An added
    memory that fetches blocks trains the blocks of all banks, since a text reads one path in all of them. With
    a list of indices, these layers train whole; with a list of roles, only the tensors of these roles in the added
    memories do. A head that is no language model's, such as a classifier's, is new to the base, and always trains.
    `"auto"` is the choice that the config of an upscaled model records for its method: `"new"` or `"all"`.

    Args:
        model: A causal language model, or a model with another head, whose decoder has `layers`; or its view.
        trainable: `"auto"`, `"new"`, `"all"`, a list of layer indices, or a list of roles of memory tensors. Default:
            `"auto"`.
        frozen: Roles of memory tensors that stay frozen whatever `trainable` says, in all memories of the model.
            Default: none.

    Raises:
        RequestError: If `resolve_trainable` raises it; if the model is wrapped by PEFT, whose config decides this; if
            a role in `frozen` has no tensor that would be trained, or nothing is left to train.
    """
    view = model if isinstance(model, ModelView) else ModelView(model)
    kind = view.model.config.model_type
    if view.has_adapters:
        raise RequestError(
            f"this {kind} model is wrapped by PEFT, which decides what is trained; expected the model itself. Set it in the config "
            "instead: get_peft_model(model, lora_config(model))."
        )
    resolved = resolve_trainable(view.model.config, trainable)
    trained: list[nn.Module | nn.Parameter] = list(view.task_head)
    if resolved == "all":
        trained.append(view.model)
    elif resolved == "new":
        trained += view.new_modules.values()
    elif isinstance(resolved[0], int):
        trained += [view.layers[index] for index in cast(list[int], resolved)]
    else:
        tensors = _tensors_of(view.new_modules.values(), resolved)
        if not tensors:
            raise RequestError(
                f"trainable is {resolved}, but the new memories of this {kind} model have no tensors of these roles; expected roles "
                "that they have, or trainable: new."
            )
        trained += tensors
    view.model.requires_grad_(False)
    for module in trained:
        module.requires_grad_(True)
    for role in frozen:
        tensors = [tensor for tensor in _tensors_of([view.model], [role]) if tensor.requires_grad]
        if not tensors:
            raise RequestError(
                f"frozen is {list(frozen)}, but this {kind} model has no memory tensors of the role {role!r} that would train; leave "
                "the role out."
            )
        for tensor in tensors:
            tensor.requires_grad_(False)
    if frozen and not num_trained(view.model):
        raise RequestError(
            f"frozen is {list(frozen)}, which leaves nothing to train; freeze less, or set trainable: all."
        )
    banks = view.banks
    if banks is not None:
        banks.trainable = resolved == "all" or (resolved == "new" and view.adds_bank)
    layouts = list(banks.layouts.values()) if banks is not None and banks.trainable else []
    return TrainableReport(
        trainable=resolved,
        layers=[index for index, layer in enumerate(view.layers) if num_trained(layer)],
        num_layers=len(view.layers),
        parameters=num_trained(view.model),
        total_parameters=sum(map(whole_numel, view.model.parameters())),
        frozen=list(frozen),
        blocks=sum(layout.bank for layout in layouts),
        fetched=sum(layout.fetched for layout in layouts),
    )


def _tensors_of(modules: Iterable[nn.Module], roles: Sequence[Any]) -> list[nn.Parameter]:
    """Return the parameters that have one of the roles in a memory within the modules."""
    memories = [each for module in modules for each in module.modules() if isinstance(each, DeclaredModule)]
    parameters = [(memory.names_of(*roles), dict(memory.named_parameters())) for memory in memories]
    return [by_name[name] for names, by_name in parameters for name in names if name in by_name]


def num_trained(module: nn.Module) -> int:
    """Return the number of parameters that train."""
    return sum(whole_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)


def cast_for_training(model: PreTrainedModel, bf16: bool) -> dict[str, torch.dtype]:
    """Cast every parameter to its dtype during training; return the previous dtypes for `restore_dtypes`.

    Without `bf16`, everything is in float32. With `bf16`, where autocast computes in bfloat16, trained parameters
    are kept in float32, since bfloat16 would lose most updates of a small rate to rounding; frozen parameters
    keep their dtype. Running statistics of memories are kept in float32 for the same reason.
    """
    dtypes = {}
    for name, tensor in _held(model):
        dtypes[name] = tensor.dtype
        is_cast = not bf16 or tensor.requires_grad if isinstance(tensor, nn.Parameter) else tensor.is_floating_point()
        if is_cast:
            tensor.data = tensor.data.float()
    return dtypes


def restore_dtypes(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Cast everything back to the dtype that it had before `cast_for_training`. For frozen tensors this is exact."""
    for name, tensor in _held(model):
        tensor.data = tensor.data.to(dtypes[name])


def _held(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of a model, and the buffers of its memories, with their full names."""
    held: list[tuple[str, torch.Tensor]] = list(model.named_parameters())
    for prefix, module in model.named_modules():
        if isinstance(module, DeclaredModule):
            held += [(f"{prefix}.{name}", buffer) for name, buffer in module.named_buffers()]
    return held


def whole_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the parameter in all processes together."""
    return getattr(parameter, "ds_numel", parameter.numel())

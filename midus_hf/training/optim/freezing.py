"""Choice of the parameters that train: the layers added to the base, everything, layers by index, or tensors by role."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from midus_hf.config.declared_tensors import TrainedRole
from midus_hf.config.memory_entries import ATTACHED, TABLES
from midus_hf.memory.declared_module import DeclaredModule
from midus_hf.memory.quantised.quantise import refuse_quantised
from midus_hf.models.fetching import Banks
from midus_hf.models.parts import decoder_of
from midus_hf.training.arguments import Trainable
from midus_hf.training.optim.tensors import whole_numel

_ROLES = get_args(TrainedRole)


@dataclasses.dataclass(frozen=True)
class TrainableReport:
    """Summary of what trains, which rich prints as a sentence and a table.

    Args:
        trainable: `"new"`, `"all"`, or the list of layers or roles; the config's choice in place of `"auto"`.
        layers: Indices of the decoder layers that train, ascending.
        num_layers: L, number of all decoder layers.
        parameters: Number of parameters that train.
        total_parameters: Number of all parameters; tied ones count once.
        parameters_of_part: Number of parameters that train, by part: a part of the layers, such as their attention, or
            a parameter outside the layers.
        frozen: Roles of memory tensors that were excluded from training. Default: none.
        blocks: Number of parameters in the banks beside the checkpoint, whose blocks train when texts fetch them.
            Default: 0.
    """

    trainable: Literal["new", "all"] | list[int] | list[TrainedRole]
    layers: list[int]
    num_layers: int
    parameters: int
    total_parameters: int
    parameters_of_part: dict[str, int]
    frozen: list[TrainedRole] = dataclasses.field(default_factory=list)
    blocks: int = 0

    def __rich__(self) -> RenderableType:
        caption: str | None = f"layers {', '.join(map(str, self.layers))}"
        if not isinstance(self.trainable, list):
            trained_parts = {"new": "the new layers alone", "all": "everything"}[self.trainable]
        elif isinstance(self.trainable[0], str):
            trained_parts = f"the {' and '.join(map(str, self.trainable))} tensors of new memories alone"
        else:
            trained_parts, caption = f"{caption} alone", None
        if self.frozen:
            trained_parts += f", without the {' and '.join(self.frozen)} tensors of memories"
        if self.blocks and not self.parameters:
            return f"Training the blocks of the bank alone, {self.blocks:,} parameters, as texts fetch them; the model is frozen"
        summary = (
            f"Training {trained_parts}: {self.parameters:,} of {self.total_parameters:,} parameters "
            f"({self.parameters / self.total_parameters:.2%}), {len(self.layers)} of {self.num_layers} layers"
        )
        if self.blocks:
            summary += f"; and the blocks of the bank, {self.blocks:,} parameters, as texts fetch them"
        table = Table("part", "parameters", caption=caption)
        table.columns[1].justify = "right"
        for part, count in self.parameters_of_part.items():
            table.add_row(part, f"{count:,}")
        return Group(summary, table)


def resolve_trainable(
    config: PreTrainedConfig, trainable: Trainable
) -> Literal["new", "all"] | list[int] | list[TrainedRole]:
    """Replace `"auto"` by what the config says, and check that the layers that are to train exist.

    Args:
        trainable: `"auto"`, `"new"`, `"all"`, a list of layer indices, or a list of roles of memory tensors.

    Returns:
        `"new"`, `"all"` or the list.

    Raises:
        ValueError: If `trainable` is none of these; if it is `"auto"` and the config does not record what trains; if it
            is `"new"` or a list of roles and the config records nothing new; if a list of layers is empty, names a layer
            twice, or names a layer that the model does not have.
    """
    resolved = _recorded_trainable(config) if trainable == "auto" else trainable
    if isinstance(resolved, list) and all(type(layer) is int for layer in resolved):
        _check_listed(config, cast(list[int], resolved))
    elif resolved == "new" or (isinstance(resolved, list) and set(resolved) <= set(_ROLES)):
        if recorded_new_layers(config) or not recorded_new_memories(config):
            new_layers(config)
    elif resolved != "all":
        raise ValueError(
            f"trainable is {trainable!r}; expected 'auto', 'new', 'all', a list of layer indices, or one of roles of memory tensors: "
            f"{', '.join(_ROLES)}."
        )
    return cast(Literal["new", "all"] | list[int] | list[TrainedRole], resolved)


def new_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices, ascending, of the layers added to the base, as `upscale` recorded them in the config.

    Raises:
        ValueError: If the config records none, or layers that the model does not have.
    """
    layers = recorded_new_layers(config)
    if not layers:
        raise ValueError(
            f"what trains is 'new', but the config of this {config.model_type} model records no new layers in "
            "upscale.new_layers; upscale the model first, or set trainable: all."
        )
    num_layers = config.get_text_config().num_hidden_layers
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(
            f"upscale.new_layers of the config names {outside}; expected 0 <= layer < {num_layers}. Upscale the base again."
        )
    return sorted(layers)


def recorded_new_memories(config: PreTrainedConfig) -> list[str]:
    """Return the names of the memories attached to layers of the base; empty if the config records none."""
    return _record(config).get("new_memories") or []


def attached_modules(model: PreTrainedModel, names: list[str]) -> dict[str, nn.Module]:
    """Return the modules of attached memories, and the tables that their layers share, by their names in the model.

    Raises:
        ValueError: If the model lacks a memory that `names` has.
    """
    modules_by_path: dict[str, nn.Module] = {}
    for name in names:
        modules = {
            path: module
            for path, module in model.named_modules()
            if path.endswith(f".{ATTACHED}.{name}") or path.rpartition(".")[0].endswith(f".{TABLES}.{name}")
        }
        if not modules:
            raise ValueError(
                f"upscale.new_memories of the config names {name!r}, which the model does not have. Upscale the base again."
            )
        modules_by_path |= modules
    return modules_by_path


def recorded_new_layers(config: PreTrainedConfig) -> list[int]:
    """Return the new layers as the config records them, unchecked; empty if the config records none."""
    return _record(config).get("new_layers") or []


def set_trainable(
    model: PreTrainedModel, trainable: Trainable = "auto", frozen: Sequence[TrainedRole] = ()
) -> TrainableReport:
    """Set `requires_grad` of every parameter. By default, train the parameters that the method's paper trains.

    With `"new"`, the added layers train whole (norms, projections, memory), memories attached to layers of the base
    train, and nothing else does: not the base layers, the embeddings, the final norm or the language model's head. With
    a list of indices, these layers train whole; with a list of roles, only the tensors of these roles in the added
    memories do. A head that is no language model's, such as a classifier's, is new to the base, and always trains.
    `"auto"` is the choice that the config of an upscaled model records for its method: `"new"` or `"all"`.

    Args:
        model: A causal language model, or a model with another head, whose decoder has `layers`.
        trainable: `"auto"`, `"new"`, `"all"`, a list of layer indices, or a list of roles of memory tensors. Default:
            `"auto"`.
        frozen: Roles of memory tensors that stay frozen whatever `trainable` says, in all memories of the model.
            Default: none.

    Raises:
        ValueError: If `resolve_trainable` raises it; if the model is wrapped by PEFT, whose config says what trains; if
            a role in `frozen` has no tensor that would train, nothing is left that trains, or a memory has `value_bits`.
    """
    if has_adapters(model):
        raise ValueError(
            f"this {model.config.model_type} model is wrapped by PEFT, which has set what trains; expected the model "
            "itself. Say it in the config instead: get_peft_model(model, lora_config(model))."
        )
    refuse_quantised(model)
    resolved = resolve_trainable(model.config, trainable)
    layers: nn.ModuleList = decoder_of(model).layers
    model.requires_grad_(resolved == "all")
    for module in _new_modules(model) if resolved == "new" else []:
        module.requires_grad_(True)
    if isinstance(resolved, list):
        for index_or_role in resolved:
            if isinstance(index_or_role, int):
                layers[index_or_role].requires_grad_(True)
        _train_roles(model, [role for role in resolved if not isinstance(role, int)])
    for module in task_head(model):
        module.requires_grad_(True)
    banks: Banks | None = getattr(model, "banks", None)
    if banks is not None:
        banks.trainable = resolved in ("new", "all")
    _freeze_roles(model, frozen)

    parameters_of_part: Counter[str] = Counter()
    inside = {id(parameter) for parameter in layers.parameters()}
    training = [index for index, layer in enumerate(layers) if _num_training(layer)]
    for index in training:
        for part, module in layers[index].named_children():
            parameters_of_part[f"layers.{part}"] += _num_training(module)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            parameters_of_part[name] = whole_numel(parameter)
    return TrainableReport(
        trainable=resolved,
        layers=training,
        num_layers=len(layers),
        parameters=_num_training(model),
        total_parameters=sum(whole_numel(parameter) for parameter in model.parameters()),
        parameters_of_part=dict(+parameters_of_part),
        frozen=list(frozen),
        blocks=sum(layout.bank for layout in banks.layouts.values()) if banks is not None and banks.trainable else 0,
    )


def _new_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers and memories that were added to the base."""
    layers = decoder_of(model).layers
    attached = attached_modules(model, recorded_new_memories(model.config))
    new = new_layers(model.config) if recorded_new_layers(model.config) or not attached else []
    return [*(layers[index] for index in new), *attached.values()]


def task_head(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of a head that the base lacks; none for a language model, whose head is the base's, or a bare stack."""
    stack = decoder_of(model)
    if stack is model or model.get_output_embeddings() is not None:
        return []
    return [module for module in model.children() if module is not stack]


def _train_roles(model: PreTrainedModel, roles: list[TrainedRole]) -> None:
    """Let the tensors of some roles train, in the memories that were added to the base."""
    parameters = _parameters_of(_new_modules(model), roles) if roles else []
    if roles and not parameters:
        raise ValueError(
            f"trainable is {roles}, but the new memories of this {model.config.model_type} model have no tensors of these roles; "
            "expected roles that they have, or trainable: new."
        )
    for parameter in parameters:
        parameter.requires_grad_(True)


def _freeze_roles(model: PreTrainedModel, roles: Sequence[TrainedRole]) -> None:
    """Freeze the tensors of some roles, in all memories."""
    for role in roles:
        parameters = [parameter for parameter in _parameters_of([model], [role]) if parameter.requires_grad]
        if not parameters:
            raise ValueError(
                f"frozen is {list(roles)}, but this {model.config.model_type} model has no memory tensors of the role {role!r} that "
                "would train; leave the role out."
            )
        for parameter in parameters:
            parameter.requires_grad_(False)
    if roles and not _num_training(model):
        raise ValueError(
            f"frozen is {list(roles)}, which leaves nothing to train; freeze less, or set trainable: all."
        )


def _parameters_of(modules: Iterable[nn.Module], roles: Sequence[TrainedRole]) -> list[nn.Parameter]:
    """Return the parameters that have one of the roles in a memory within the modules."""
    return [
        memory.get_parameter(name)
        for module in modules
        for memory in module.modules()
        if isinstance(memory, DeclaredModule)
        for name in memory.names_of(*roles)
        if name in dict(memory.named_parameters())
    ]


def _num_training(module: nn.Module) -> int:
    """Return the number of a module's parameters that train."""
    return sum(whole_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)


def _record(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the record of `upscale` in the config; empty if `upscale` did not make the model."""
    record = getattr(config.get_text_config(), "upscale", None)
    return record if isinstance(record, dict) else {}


def _recorded_trainable(config: PreTrainedConfig) -> Literal["new", "all"]:
    recorded = _record(config).get("trainable")
    if recorded not in ("new", "all"):
        raise ValueError(
            f"trainable is 'auto', but upscale.trainable in the config of this {config.model_type} model is "
            f"{recorded!r}; expected 'new' or 'all' there. Upscale the model first, or set trainable: all, or list "
            "layers, as in trainable: [3, 7]."
        )
    return recorded


def _check_listed(config: PreTrainedConfig, layers: list[int]) -> None:
    if not layers:
        raise ValueError("trainable is [], no layer; list at least one, or set trainable: all.")
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if repeated:
        raise ValueError(f"trainable is {layers}, which repeats {repeated}; name each layer once.")
    num_layers = config.get_text_config().num_hidden_layers
    outside = [layer for layer in layers if not 0 <= layer < num_layers]
    if outside:
        raise ValueError(
            f"trainable is {layers}, but this {config.model_type} model has no layers {outside}; "
            f"expected 0 <= layer < {num_layers}."
        )


def has_adapters(model: Any) -> bool:
    """Return whether PEFT has wrapped a model; PEFT need not be installed."""
    return hasattr(model, "peft_config")

"""What trains: the parameters, their dtypes, and the optimizer's groups with their schedules."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, PreTrainedModel, SchedulerType, get_scheduler

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.config.declared_tensors import Role, TrainedRole
from midus_hf.config.errors import RequestError
from midus_hf.memories.hierarchical.training import BLOCKS_GROUP
from midus_hf.memories.module import DeclaredModule, tensor_names
from midus_hf.models.view import ModelView, has_adapters
from midus_hf.training.arguments import Trainable
from midus_hf.training.keys import Rates

_ROLES = get_args(TrainedRole)
Resolved = Literal["new", "all"] | list[int] | list[TrainedRole]

# Share of the steps in which the schedule `4x-to-1x` decreases (UltraMemV2, appendix E.6).
_FALLING_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class TrainableReport:
    """Summary of the trained parameters, which `print` writes as a sentence."""

    trainable: Resolved  #: the config's choice in place of `"auto"`
    layers: list[int]  #: indices of the decoder layers that train, ascending
    num_layers: int  #: L, number of all decoder layers
    parameters: int  #: number of those that train
    total_parameters: int  #: tied ones count once
    frozen: list[TrainedRole] = dataclasses.field(default_factory=list)  #: roles of memory tensors that were excluded
    blocks: int = 0  #: number of parameters in the checkpoint's banks, trained when texts fetch them
    fetched: int = 0  #: number of parameters of the blocks that a text fetches

    def __str__(self) -> str:
        choice = self.trainable if isinstance(self.trainable, str) else ", ".join(map(str, self.trainable))
        without = f" without the {' and '.join(self.frozen)} tensors of memories" if self.frozen else ""
        blocks = (
            f"the bank's blocks as texts fetch them, {self.fetched:,} of its {self.blocks:,} parameters by each text"
        )
        start = f"Training {choice}{without}: "
        total = f"{self.total_parameters:,} parameters"
        if self.blocks and not self.parameters:
            return f"{start}{blocks}; the {total} outside the bank stay"
        layers = f"layers {', '.join(map(str, self.layers))} of {self.num_layers}" if self.layers else "no layer"
        share = f"{self.parameters:,} of {total} ({self.parameters / self.total_parameters:.2%})"
        return f"{start}{share}, in {layers}{f'; {blocks}' if self.blocks else ''}"


def resolve_trainable(config: PreTrainedConfig, trainable: Trainable) -> Resolved:
    """Replace `"auto"` by the config's choice; refuse choices that are invalid or not in the model."""
    record = record_of(config) or UpscaleRecord()
    kind = config.model_type
    resolved: Any = record.trainable if trainable == "auto" else trainable
    if trainable == "auto" and resolved not in ("new", "all"):
        raise RequestError(
            f"trainable is 'auto', and this {kind} model is a base, not an upscaled model: it has no new parameters. Upscale it "
            "first, set trainable: all to train the base itself, or set adapters, such as adapters: {r: 16}."
        )
    if isinstance(resolved, list) and all(type(layer) is int for layer in resolved):
        count = config.get_text_config().num_hidden_layers
        if not resolved or not {*resolved} <= {*range(count)} or len({*resolved}) < len(resolved):
            raise RequestError(
                f"trainable is {resolved}; expected layers of this {kind} model (0 <= layer < {count}), at least one, and each once."
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


def set_trainable(
    model: PreTrainedModel | ModelView, trainable: Trainable = "auto", frozen: Sequence[TrainedRole] = ()
) -> TrainableReport:
    """Set `requires_grad` of every parameter; by default train what the method's paper trains.

    With `"new"`, added layers train whole, and memories attached to layers of the base. An added memory that fetches blocks trains
    the blocks of all banks, since a text reads one path in all of them. With a list of indices, these layers train whole; with a list
    of roles, only these tensors of the added memories. A head of another task than language modelling always trains. `"auto"` is the
    choice that an upscaled model's config records: `"new"` or `"all"`.

    Args:
        model: A causal language model, or a model with another head, whose decoder has `layers`; or its view.
        trainable: `"auto"`, `"new"`, `"all"`, a list of layer indices, or a list of roles of memory tensors. Default: `"auto"`.
        frozen: Roles of memory tensors that stay frozen whatever `trainable` says, in all memories. Default: none.

    Raises:
        RequestError: If `resolve_trainable` raises it; if the model is wrapped by PEFT, whose config decides this; if a role in
            `frozen` has no tensor that would be trained, or nothing is left to train.
    """
    view = model if isinstance(model, ModelView) else ModelView(model)
    kind = view.model.config.model_type
    if has_adapters(view.model):
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
        raise RequestError(f"frozen is {list(frozen)}, which leaves nothing to train; freeze less.")
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
    memories = [each for module in modules for each in module.modules() if isinstance(each, DeclaredModule)]
    parameters = [(tensor_names(memory, *roles), dict(memory.named_parameters())) for memory in memories]
    return [by_name[name] for names, by_name in parameters for name in names if name in by_name]


def num_trained(module: nn.Module) -> int:
    """Return the number of parameters that train."""
    return sum(whole_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)


def cast_for_training(model: PreTrainedModel, bf16: bool) -> dict[str, torch.dtype]:
    """Cast every parameter to its dtype during training; return the previous dtypes for `restore_dtypes`.

    Without `bf16`, everything is in float32. With `bf16`, where autocast computes in bfloat16, trained parameters and running
    statistics are kept in float32, since bfloat16 would lose small updates to rounding; frozen parameters keep their dtype.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for prefix, module in model.named_modules():
        if isinstance(module, DeclaredModule):
            tensors |= {f"{prefix}.{name}": buffer for name, buffer in module.named_buffers()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    for tensor in tensors.values():
        if isinstance(tensor, nn.Parameter):
            is_cast = tensor.requires_grad or not bf16
        else:
            is_cast = tensor.is_floating_point()
        if is_cast:
            tensor.data = tensor.data.float()
    return dtypes


def restore_dtypes(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Undo `cast_for_training`; exact for frozen tensors."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))


def whole_numel(parameter: torch.Tensor) -> int:
    """Return the number of elements of the parameter in all processes together."""
    return getattr(parameter, "ds_numel", parameter.numel())


def parameter_groups(model: nn.Module, rates: Rates) -> list[dict[str, Any]]:
    """Split the trained parameters into groups for an optimizer.

    Keys and values of memories do not decay and keep one rate, unless values have a decay or a schedule, or keys count as weights.
    Everything else follows the schedule; matrices decay, norms and biases do not. Memory modules say which parameters are keys and
    values, so renaming by a wrapper changes no group.

    Args:
        model: A model with `requires_grad` set.
        rates: Rate and decay of each kind of tensor.

    Returns:
        Groups with `params`, `name`, `lr`, `weight_decay` and `schedule`, in this order, without empty ones: `decay`, `no_decay`;
        `gains`, one for each gain that starts at zero, if they have a separate rate;
        `memory`, `memory_no_decay` if other memory tensors have a separate rate; `keys`; `values` (late, because a Trainer logs the
        rate of the first group); `blocks` if blocks of a bank are trained, with the rate and decay of values and, unless
        `rates.value_schedule` differs, the schedule. `schedule` is `"fixed"` (the run's), `"constant"` or `"4x-to-1x"`.

    Raises:
        RequestError: If nothing is trained, or no rate is set.
    """
    hosts = [module for module in model.modules() if isinstance(module, DeclaredModule)]
    declared = [(host.declared_tensor(name), tensor.role) for host in hosts for name, tensor in host.declared.items()]
    role_of: dict[int, Role] = {id(tensor): role for tensor, role in declared}
    rate = rates.learning_rate
    if rate is None:
        raise RequestError(
            "learning_rate is None, which only a run of midus train or midus sft measures; expected a number."
        )
    memory_rate = rate if rates.memory_learning_rate is None else rates.memory_learning_rate
    key_rate = rate if rates.key_value_learning_rate is None else rates.key_value_learning_rate
    value_rate = key_rate if rates.value_learning_rate is None else rates.value_learning_rate
    settings = {
        "decay": (rate, rates.weight_decay, "fixed"),
        "no_decay": (rate, 0.0, "fixed"),
        "memory": (memory_rate, rates.weight_decay, "fixed"),
        "memory_no_decay": (memory_rate, 0.0, "fixed"),
        "keys": (key_rate, 0.0, "constant"),
        "values": (value_rate, rates.value_weight_decay, rates.value_schedule or "constant"),
        BLOCKS_GROUP: (value_rate, rates.value_weight_decay, rates.value_schedule or "fixed"),
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in settings}
    scales = {} if rates.gain_learning_rate is None else zero_gains(model)
    gains: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        role = role_of.get(id(parameter))
        if not parameter.requires_grad:
            continue
        if (scale := scales.get(name)) is not None:
            assert rates.gain_learning_rate is not None
            rate_of_gain = scale * rates.gain_learning_rate
            gains.append(
                {"params": [parameter], "name": "gains", "lr": rate_of_gain, "weight_decay": 0.0, "schedule": "fixed"}
            )
        elif role == "value":
            members["values"].append(parameter)
        elif role == "key" and rates.memory_keys == "constant":
            members["keys"].append(parameter)
        else:
            # Norms with a row per head have two dimensions, but do not decay either; ZeRO-3 cuts matrices to vectors.
            is_matrix = len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and role != "norm"
            kind = "decay" if is_matrix else "no_decay"
            if role is not None and rates.memory_learning_rate is not None:
                kind = "memory" if kind == "decay" else "memory_no_decay"
            members[kind].append(parameter)
    groups = [
        {"params": members[name], "name": name, "lr": lr, "weight_decay": weight_decay, "schedule": schedule}
        for name, (lr, weight_decay, schedule) in settings.items()
        if members[name] or (name == BLOCKS_GROUP and getattr(getattr(model, "banks", None), "trainable", False))
    ]
    place = next(
        (place for place, group in enumerate(groups) if group["name"] not in ("decay", "no_decay")), len(groups)
    )
    groups[place:place] = gains
    if not groups:
        raise RequestError("no parameter requires a gradient; call set_trainable on the model first.")
    return groups


def zero_gains(model: nn.Module) -> dict[str, float]:
    """Return the gains that started at zero, by the name in `model`, with the scale that `upscale` recorded."""
    config = getattr(model, "config", None)
    record = None if config is None else record_of(config)
    if record is None or not record.zero_gains:
        return {}
    found = {}
    for name, _ in model.named_parameters():
        plain = name.replace(".modules_to_save.default", "")  # PEFT trains copies of new layers
        scale = next((scale for end, scale in record.zero_gains.items() if f".{plain}".endswith(f".{end}")), None)
        if scale is not None:
            found[name] = scale
    return found


def group_schedules(
    optimizer: torch.optim.Optimizer,
    total_steps: int,
    *,
    lr_scheduler_type: str = "cosine",
    warmup_steps: float = 0.1,
    lr_scheduler_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return a scheduler with one schedule per group: the run's, a constant rate, or `"4x-to-1x"`.

    `"4x-to-1x"` is the schedule times a factor that falls linearly from 4 to 1 in the first quarter of the steps.
    `"reduce_lr_on_plateau"` does not change groups with a constant rate.

    Args:
        optimizer: An optimizer built on `parameter_groups`.
        total_steps: Steps of the run.
        lr_scheduler_type: Name of a schedule of transformers that scales the maximum rate. Default: `"cosine"`.
        warmup_steps: Steps in which the rate rises from zero, or if below 1 a share of all steps, rounded up. Default: 0.1.
        lr_scheduler_kwargs: Other arguments of the schedule, as in `TrainingArguments`. Default: None.

    Raises:
        RequestError: If the schedule does not scale the maximum rate.
    """
    kind = SchedulerType(lr_scheduler_type)
    schedules = [group["schedule"] for group in optimizer.param_groups]
    if kind is SchedulerType.REDUCE_ON_PLATEAU and "4x-to-1x" not in schedules:
        floors = [group["lr"] if group["schedule"] == "constant" else 0.0 for group in optimizer.param_groups]
        options = {"min_lr": floors, **(lr_scheduler_kwargs or {})}
        return get_scheduler(kind, optimizer, scheduler_specific_kwargs=options)
    warmup = math.ceil(warmup_steps * total_steps) if warmup_steps < 1 else int(warmup_steps)
    probe = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = get_scheduler(kind, probe, warmup, total_steps, scheduler_specific_kwargs=lr_scheduler_kwargs)
    if not isinstance(scheduler, LambdaLR):
        raise RequestError(
            f"lr_scheduler_type is {kind.value!r}, whose rate is no multiple of each group's maximum rate; expected one that scales "
            f"it, such as cosine{', or another value_schedule' if kind is SchedulerType.REDUCE_ON_PLATEAU else ''}."
        )
    factor = scheduler.lr_lambdas[0]
    falling_steps = _FALLING_SHARE * total_steps
    factors: dict[str, Callable[[int], float]] = {
        "fixed": factor,
        "constant": lambda step: 1.0,
        "4x-to-1x": lambda step: factor(step) * (4 - 3 * min(step / falling_steps, 1)),
    }
    return LambdaLR(optimizer, [factors[schedule] for schedule in schedules])

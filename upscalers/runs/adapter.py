"""Adapters of a base are written for the model that was upscaled from the base: their layers get the numbers of the plan."""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS, TRAVELLING, globs
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_model import open_base, read_config_file
from upscalers.checkpoint.safetensors_format import (
    StoredTensor,
    copy_bytes,
    layout,
    read_header,
    read_metadata,
    write_all,
)
from upscalers.checkpoint.source import adapter_folder, copy_travelling_files, resolve_source
from upscalers.plan.plan import Plan
from upscalers.record.provenance import read_config_entry, read_plan
from upscalers.request.errors import RequestError, one_line
from upscalers.runs.output_folder import OutputFolder

#: Kinds of adapters whose tensors belong to modules, by whose names PEFT finds them. Adapters of other kinds belong to the model as a
#: whole (prompts, prefixes), or count layers in other ways.
KINDS = (
    *("LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "HRA", "VERA", "FOURIERFT", "LN_TUNING", "MISS", "C3A", "ROAD", "RANDLORA"),
    *("WAVEFT", "HIRA", "DELORA", "GRALORA", "OSF", "SHIRA", "TRAINABLE_TOKENS"),
)  # fmt: skip

_PREFIX = "base_model.model."
_LAYER = re.compile(r"(?P<before>(?:^|.*?\.)layers\.)(?P<layer>\d+)(?=\.|$)")

_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}

# What some families call the stack of a question-answering head.
_QUESTION_STACK = "transformer."


@dataclass(frozen=True)
class _Adapter:
    """An adapter in a folder."""

    folder: Path
    config: Config
    tensors: dict[str, StoredTensor]


def _open_adapter(name: str) -> _Adapter:
    """Open an adapter of PEFT; nothing that is pickled is read."""
    folder = adapter_folder(name, (*ADAPTERS, *globs(TRAVELLING)))
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise RequestError(
            f"{name} has no {ADAPTER_CONFIG}; expected the folder of a PEFT adapter. Give the one that save_pretrained wrote."
        )
    config = read_config_file(path)
    kind = config.get("peft_type")
    if kind not in KINDS:
        raise RequestError(
            f"{path} has peft_type = {kind!r}, whose tensors belong to no layer by name, or are not tried; expected one of "
            f"{', '.join(KINDS)}. Train such an adapter on the upscaled model itself."
        )
    if config.get("layer_replication"):
        raise RequestError(
            f"{path} has layer_replication = {config['layer_replication']}, which repeats layers of the base; expected null. Merge "
            "the adapter into the base (merge_and_unload), and upscale what comes out."
        )
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise RequestError(
            f"{name} has no {ADAPTER_WEIGHTS}; expected one. Pickled weights (adapter_model.bin) are never loaded: load the adapter "
            "with PEFT, whose save_pretrained writes safetensors."
        )
    tensors = read_header(weights)
    if not tensors:
        raise RequestError(f"{weights} holds no tensors; expected those of an adapter. Save or download it again.")
    return _Adapter(folder, config, tensors)


def _module_path(tensor: str) -> str:
    """Return the name of a tensor of an adapter without PEFT's prefix: the name of a module of the model, and what follows it."""
    return tensor.removeprefix(_PREFIX)


def _layer_of(name: str) -> int | None:
    """Return the number of the layer in the name of a module or tensor; None if it is in no layer."""
    match = _LAYER.match(name)
    return int(match["layer"]) if match else None


def _renumbered(name: str, numbers: dict[int, int]) -> str:
    """Return the name of a module or tensor with the number of its layer replaced; unchanged outside of layers."""
    return _LAYER.sub(
        lambda match: f"{match['before']}{numbers.get(int(match['layer']), match['layer'])}", name, count=1
    )


def write_adapter(adapter: str | Path, onto: str | Path, output: str | Path) -> dict[str, Any]:
    """Write an adapter of a base for the model that was upscaled from the base.

    Layers get the numbers that the plan of the upscaled model gives them. The config names each module with its layer, so that PEFT
    puts no adapter on a new layer or memory. Tensors keep their bytes.

    Args:
        adapter: Folder or hub id of an adapter that was made for the base.
        onto: Folder or hub id of the upscaled model.
        output: The folder to make.

    Returns:
        `{"adapter", "onto", "output", "peft_type", "layers", "modules", "bytes_written", "seconds"}`: `layers` are the layers of the
        upscaled model that have the adapter, `modules` is the number of modules and of single parameters that have.

    Raises:
        RequestError: If the adapter cannot be read or does not fit the base, the model was not made by `upscale`, or the output
            cannot be made.
    """
    started = time.perf_counter()
    if output != "" and os.path.lexists(Path(output).expanduser()):
        raise RequestError(f"output {output} exists; expected a folder to make. Choose another folder.")
    opened = _open_adapter(str(adapter))
    with resolve_source(str(onto), config_only=True) as source:
        model = open_base(source.folder, needs_weights=False)
        plan = read_plan(read_config_entry(model.config, source.folder), model)
        folder = OutputFolder(output, opened.folder)
        renaming = _renaming(opened, plan, _empty_model(opened, source.folder))
        config = {**renaming.config(), "base_model_name_or_path": str(onto), "revision": None}
        folder.check_space(sum(tensor.num_bytes for tensor in opened.tensors.values()))
        with folder as partial:
            partial.mkdir(parents=True, exist_ok=True)
            num_bytes = _write_tensors(opened, renaming, partial / ADAPTER_WEIGHTS)
            (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            copy_travelling_files(opened.folder, partial)
            folder.commit()
    modules = [renaming.names[name] for name in (*renaming.modules, *renaming.parameters)]
    return {
        "adapter": str(adapter),
        "onto": str(onto),
        "output": str(output),
        "peft_type": opened.config["peft_type"],
        "layers": sorted({layer for layer in map(_layer_of, modules) if layer is not None}),
        "modules": len(modules),
        "bytes_written": num_bytes,
        "seconds": time.perf_counter() - started,
    }


@dataclass
class _Renaming:
    """Names that the parts of an adapter have in the upscaled model, by their names in the base."""

    adapter: _Adapter
    modules: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)  # that have an adapter themselves, such as stacked experts
    whole: list[str] = field(default_factory=list)  # tensors in modules that were trained whole
    names: dict[str, str] = field(default_factory=dict)

    def config(self) -> Config:
        """Return the config of the adapter for the upscaled model."""
        config = dict(self.adapter.config)
        if config.get("target_modules") is not None:
            config["target_modules"] = self._renamed(self.modules)
        if config.get("target_parameters"):
            config["target_parameters"] = self._renamed(self.parameters)
        if config.get("feedforward_modules") is not None:
            feed_forward = [module for module in self.modules if _is_target(module, config["feedforward_modules"])]
            config["feedforward_modules"] = self._renamed(feed_forward)
        if config.get("modules_to_save"):
            config["modules_to_save"] = self._renamed(_saved_modules(config["modules_to_save"], self.whole))
        for key, value in config.items():
            if key.endswith("_pattern") and isinstance(value, dict):
                config[key] = self._by_module(value)
        for key in ("layers_to_transform", "layers_pattern", "exclude_modules"):
            if key in config:
                config[key] = None  # target_modules names every module
        return config

    def _renamed(self, names: Iterable[str]) -> list[str]:
        return [self.names[name] for name in names]

    def _by_module(self, patterns: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of patterns by the module of the upscaled model that each pattern matches in the base."""
        values = {}
        for module in (*self.modules, *self.parameters):
            pattern = next((each for each in patterns if re.match(rf"(.*\.)?({each})$", module)), None)
            if pattern is not None:
                values[self.names[module]] = patterns[pattern]
        return values


def _renaming(adapter: _Adapter, plan: Plan, model: Any) -> _Renaming:
    """Find the parts of an adapter in the upscaled model."""
    renaming = _Renaming(adapter)
    modules, held = dict(model.named_modules()), dict(model.named_parameters())
    targets = adapter.config.get("target_modules") or []
    parameters = adapter.config.get("target_parameters") or []
    for tensor, stored in adapter.tensors.items():
        path = _module_path(tensor)
        layer = _layer_of(path)
        if layer is not None and layer >= plan.num_base_layers:
            reason = f"{tensor} is of layer {layer}, and the base has {plan.num_base_layers} layers"
            raise _another_base(adapter, reason)
        if layer in plan.dropped_layers:
            raise _dropped(adapter, layer)
        name = _renumbered(path, plan.kept_indices)
        if name.startswith(_QUESTION_STACK) and _QUESTION_STACK[:-1] not in modules:
            name = "model." + name.removeprefix(_QUESTION_STACK)
        renaming.names[path] = name
        module = _module_of(name, modules)
        rest = name.removeprefix(f"{module}.")
        if f"{module}.{rest.replace('base_layer.', '')}" in held:
            renaming.whole.append(path)
            continue
        if tensor == path or rest.startswith("token_adapter."):
            continue  # a tensor that modules share, or rows of an embedding beside an adapter
        in_base = path.removesuffix(f".{rest}")
        own = modules[module]._parameters
        adapted = [f"{in_base}.{name}" for name in own if _is_target(f"{in_base}.{name}", parameters)]
        if not module or not (adapted or _is_target(in_base, targets)):
            raise _another_base(adapter, f"{tensor} belongs to no module of the upscaled model")
        _check_shape(adapter, tensor, stored.shape, rest, modules[module])
        names = adapted or [in_base]
        (renaming.parameters if adapted else renaming.modules).extend(
            each for each in names if each not in renaming.names
        )
        renaming.names |= {each: module + each.removeprefix(in_base) for each in names}
    for end in _saved_modules(adapter.config.get("modules_to_save") or [], renaming.whole):
        inside = next((path for path in renaming.whole if path.startswith(f"{end}.")), end)
        new = renaming.names.get(inside) or _renumbered(inside, plan.kept_indices)
        renaming.names[end] = new.removesuffix(inside.removeprefix(end))
    return renaming


def _module_of(name: str, modules: Mapping[str, Any]) -> str:
    """Return the longest beginning of a name that is a module; empty if there is none."""
    parts = name.split(".")
    beginnings = (".".join(parts[:number]) for number in range(len(parts) - 1, 0, -1))
    return next((each for each in beginnings if each in modules), "")


def _is_target(module: str, targets: str | Iterable[str]) -> bool:
    """Return whether targets, as a config of PEFT has them, match a module: a regular expression, or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _saved_modules(ends: Iterable[str], whole: Iterable[str]) -> list[str]:
    """Return whole names of modules in place of ends of names; an end that no module has stays."""
    parts = [name.split(".") for name in whole]
    modules = dict.fromkeys(".".join(each[:number]) for each in parts for number in range(1, len(each)))
    saved: dict[str, None] = {}
    for end in ends:
        saved |= dict.fromkeys([module for module in modules if _is_target(module, [end])] or [end])
    return list(saved)


def _check_shape(adapter: _Adapter, tensor: str, shape: tuple[int, ...], rest: str, module: Any) -> None:
    """Refuse a matrix of LoRA that does not fit the linear layer that it is for."""
    sizes = {"lora_A.weight": (1, "in_features"), "lora_B.weight": (0, "out_features")}
    if rest in sizes and hasattr(module, "in_features") and len(shape) == 2:
        axis, size = sizes[rest]
        if shape[axis] != getattr(module, size):
            raise _another_base(
                adapter, f"{tensor} has shape {list(shape)}, and the module has {size} = {getattr(module, size)}"
            )


def _another_base(adapter: _Adapter, reason: str) -> RequestError:
    return RequestError(
        f"the adapter in {adapter.folder} was made for another base, perhaps {adapter.config.get('base_model_name_or_path')!r}: "
        f"{reason}. Expected an adapter of the model that was upscaled. Give one, or the model that was upscaled from its base."
    )


def _dropped(adapter: _Adapter, layer: int | None) -> RequestError:
    return RequestError(
        f"the adapter in {adapter.folder} changes layer {layer} of the base, which the upscaled model does not hold as it was; "
        "expected an adapter of layers that it holds. Merge the adapter into the base (merge_and_unload), and upscale what comes out."
    )


def _empty_model(adapter: _Adapter, folder: Path) -> Any:
    """Return the upscaled model that the adapter's task asks for, without memory for its tensors."""
    import torch
    import transformers

    import midus_hf  # noqa: F401 - registers the classes

    task = adapter.config.get("task_type")
    if task not in (*_AUTO_CLASSES, None):
        raise RequestError(
            f"{adapter.folder / ADAPTER_CONFIG} has task_type = {task!r}; expected one of {', '.join(_AUTO_CLASSES)}, or null. Give "
            "an adapter of a decoder."
        )
    if task is None:
        task = (
            "FEATURE_EXTRACTION"
            if any(_module_path(name).startswith("layers.") for name in adapter.tensors)
            else "CAUSAL_LM"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return getattr(transformers, _AUTO_CLASSES[task]).from_config(config)
    except Exception as error:  # configs and models raise whatever their checks raise
        raise RequestError(
            f"{folder} cannot be built as {_AUTO_CLASSES[task]}, which the adapter's task_type {task!r} needs "
            f"({type(error).__name__}: {one_line(error)}). Give an adapter of a task that the model has."
        ) from None


def _write_tensors(adapter: _Adapter, renaming: _Renaming, path: Path) -> int:
    """Write the tensors of an adapter under their names in the upscaled model; return the size of the file in bytes."""
    new = {name: name.replace(_module_path(name), renaming.names[_module_path(name)]) for name in adapter.tensors}
    source = adapter.folder / ADAPTER_WEIGHTS
    described = [(new[name], tensor.dtype, tensor.shape) for name, tensor in adapter.tensors.items()]
    header, starts = layout(described, read_metadata(source))
    with source.open("rb") as read, path.open("wb") as write:
        write_all(write.fileno(), header, 0)
        for name, tensor in adapter.tensors.items():
            copy_bytes(read.fileno(), tensor.start, write.fileno(), starts[new[name]], tensor.num_bytes)
    return path.stat().st_size

"""Rewriting of a base's LoRA for the model that was upscaled from it: its layers are renumbered by the plan."""

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTERS, TRAVELLING
from upscalers.architecture.family import Config
from upscalers.checkpoint.base_checkpoint import open_base, read_config
from upscalers.checkpoint.safetensors_format import read_header
from upscalers.checkpoint.source import adapter_folder, copy_travelling_files, resolve_source
from upscalers.plan.plan import Plan
from upscalers.record.provenance import read_plan, read_upscaled
from upscalers.request.progress import Progress
from upscalers.runs.output_folder import CheckpointFolder

_PREFIX = "base_model.model."
_LAYER = re.compile(r"(?P<before>(?:^|.*?\.)layers\.)(?P<layer>\d+)(?=\.|$)")


def write_adapter(adapter: str | Path, onto: str | Path, output: str | Path) -> dict[str, Any]:
    """Write an adapter of a base (LoRA, rsLoRA or DoRA) for the model that was upscaled from the base.

    Layers are renumbered by the plan of the upscaled model. The config names each module with its layer, so that PEFT
    puts no adapter on a new layer or memory. Tensors keep their bytes.

    Args:
        adapter: Folder or hub id of an adapter that was made for the base.
        onto: Folder or hub id of the upscaled model.
        output: The folder to make.

    Returns:
        `{"adapter", "onto", "output", "peft_type", "layers", "modules", "bytes_written", "seconds"}`: `layers` are the layers of the
        upscaled model that have the adapter, `modules` is the number of modules and single parameters with the adapter.

    Raises:
        ValueError: If the adapter cannot be read or has layers that the base lacks, the model was not made by `upscale`, or the
            output cannot be made.
    """
    started = time.perf_counter()
    if output != "" and os.path.lexists(Path(output).expanduser()):
        raise ValueError(f"output {output} exists; expected a folder to make. Choose another folder.")
    source = adapter_folder(str(adapter), (*ADAPTERS, *TRAVELLING))
    config = _read_adapter_config(source)
    with resolve_source(str(onto), config_only=True) as upscaled:
        model = open_base(upscaled.folder, needs_weights=False)
        plan = read_plan(read_upscaled(model.config, upscaled.folder), model)
    names = _read_names(source)
    renamed = {name: _renumbered(name, plan, source, config) for name in names}
    if str(model.config["model_type"]).startswith(MEMORY_PREFIX):
        # Some families have a different name for the stack of a question-answering head than models with memory.
        renamed = {name: new.replace(f"{_PREFIX}transformer.", f"{_PREFIX}model.") for name, new in renamed.items()}
    moved, modules = _moved_config(config, renamed)
    folder = CheckpointFolder(output, source)
    folder.check_space((source / ADAPTER_WEIGHTS).stat().st_size)
    with folder.writing() as partial:
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(source / ADAPTER_WEIGHTS, "pt") as weights:
            tensors = {renamed[name]: weights.get_tensor(name) for name in names}
            save_file(tensors, partial / ADAPTER_WEIGHTS, weights.metadata())
        moved |= {"base_model_name_or_path": str(onto), "revision": None}
        (partial / ADAPTER_CONFIG).write_text(json.dumps(moved, indent=2) + "\n", encoding="utf-8")
        copy_travelling_files(source, partial, Progress())
        num_bytes = (partial / ADAPTER_WEIGHTS).stat().st_size
    return {
        "adapter": str(adapter),
        "onto": str(onto),
        "output": str(output),
        "peft_type": config["peft_type"],
        "layers": sorted({int(match["layer"]) for match in map(_LAYER.match, modules) if match}),
        "modules": len(modules),
        "bytes_written": num_bytes,
        "seconds": time.perf_counter() - started,
    }


def _read_adapter_config(folder: Path) -> Config:
    """Return the config of an adapter whose layers can be renumbered."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {ADAPTER_CONFIG}; expected the folder of a PEFT adapter. Give the one that save_pretrained wrote."
        )
    config = read_config(path)
    for key, expected in (("peft_type", "LORA"), ("layer_replication", None)):
        if (config.get(key) or None) != expected:
            raise ValueError(
                f"{path} has {key} = {config.get(key)!r}; expected {expected!r}, as LoRA, rsLoRA and DoRA have. Merge the adapter "
                "into the base with PEFT (merge_and_unload), and upscale the result."
            )
    return config


def _read_names(folder: Path) -> list[str]:
    """Return the names of an adapter's tensors; pickled files are not read."""
    weights = folder / ADAPTER_WEIGHTS
    names = list(read_header(weights)) if weights.is_file() else []
    if not names:
        raise ValueError(
            f"{folder} has no tensors in {ADAPTER_WEIGHTS}; expected some. Pickled weights (adapter_model.bin) are never loaded: "
            "load the adapter with PEFT, whose save_pretrained writes safetensors."
        )
    return names


def _renumbered(name: str, plan: Plan, folder: Path, config: Config) -> str:
    """Return the name of a tensor with the number that its layer has in the upscaled model; unchanged outside of layers."""
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = int(match["layer"])
    if layer >= plan.num_base_layers:
        raise ValueError(
            f"the adapter in {folder} was made for another base, perhaps {config.get('base_model_name_or_path')!r}: {name} is of "
            f"layer {layer}, and the base has {plan.num_base_layers}. Give an adapter of the base, or a model made from its base."
        )
    return f"{match['before']}{plan.kept_indices[layer]}{name[match.end() :]}"


def _moved_config(config: Config, renamed: dict[str, str]) -> tuple[Config, list[str]]:
    """Return the config for the upscaled model, and the modules and parameters with the adapter, from tensors' old and new names."""
    modules: dict[str, str] = {}  # in the base, by name in the upscaled model
    parameters: dict[str, str] = {}
    whole: list[tuple[str, str]] = []  # tensors of modules that were trained whole
    for name, new in renamed.items():
        name, new = name.removeprefix(_PREFIX), new.removeprefix(_PREFIX)
        module, is_lora, _ = name.partition(".lora_")
        if not is_lora:
            whole.append((name, new))
            continue
        new = new.removesuffix(name.removeprefix(module)).replace(".base_layer", "")
        module = module.replace(".base_layer", "")
        if _matches(module, config.get("target_modules") or ()) or not config.get("target_parameters"):
            modules[new] = module
            continue
        for target in config["target_parameters"]:
            leaf = target.rpartition(".")[2]
            if _matches(f"{module}.{leaf}", [target]):
                parameters[f"{new}.{leaf}"] = f"{module}.{leaf}"
    moved = dict(config)
    for key in {"layers_to_transform", "layers_pattern", "exclude_modules"} & config.keys():
        moved[key] = None  # target_modules names every module
    if config.get("target_modules") is not None:
        moved["target_modules"] = list(modules)
    if config.get("target_parameters"):
        moved["target_parameters"] = list(parameters)
    if config.get("modules_to_save"):
        moved["modules_to_save"] = _saved_modules(config["modules_to_save"], whole)
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        matches = {
            new: [value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", old)]
            for new, old in (modules | parameters).items()
        }
        moved[key] = {new: values[0] for new, values in matches.items() if values}
    return moved, [*modules, *parameters]


def _matches(module: str, targets: str | Iterable[str]) -> bool:
    """Return whether targets, as a config of PEFT has them, match a module: a regular expression, or ends of names."""
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _saved_modules(ends: Iterable[str], whole: Iterable[tuple[str, str]]) -> list[str]:
    """Return whole names in the upscaled model in place of ends of names; an end that no tensor has stays."""
    saved: dict[str, None] = {}
    for end in ends:
        names = [
            new.removesuffix(old[match.end(1) :])
            for old, new in whole
            if (match := re.match(rf"((?:.*\.)?{re.escape(end)})\.", old))
        ]
        saved |= dict.fromkeys(names or [end])
    return list(saved)

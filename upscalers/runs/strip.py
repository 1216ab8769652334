"""Checkpoints within others: the base in an upscaled one, and the language model in a composite one."""

import copy
import dataclasses
import importlib.metadata
import time
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import LANGUAGE_KEY, RECORD_KEY, UpscaleRecord, language_entry, record_of
from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.files.outputs import STRIPPED_KEY
from midus_hf.memories.bank import banks_of
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, open_base, read_config
from upscalers.checkpoint.safetensors_format import (
    TORCH_NAMES,
    TensorDigests,
    content_sha256,
    most_common_dtype,
    stored_tensors,
)
from upscalers.checkpoint.source import resolve_source
from upscalers.checkpoint.tokenizer import CHANGED_FILES, CHANGED_KEY, REWRITTEN_KEY, keep_tokenizer
from upscalers.plan import Plan
from upscalers.record.provenance import read_plan, read_record, read_upscaled, write_record
from upscalers.request import Progress
from upscalers.runs.writing import CheckpointFolder, write_part, written_from
from upscalers.tensors.recipes import Copy, LayerBlocks, block_recipes
from upscalers.tensors.writer import OutputTensor, in_file_order, split_shards


def strip(
    model: str | Path, output: str | Path, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the base that a checkpoint was upscaled from: its config, and the bytes of its tensors.

    Changes that training made to base layers, a cast by `--dtype`, and a resized vocabulary stay, and are reported by the config's
    digest of the base. A small `upscale.json` records what was stripped.

    Args:
        model: An upscaled checkpoint, trained or not.
        output: The folder to make.
        overwrite: Whether to replace an existing checkpoint, under the conditions of `upscale`. Default: False.
        progress: Display that shows every step. Default: none.

    Returns:
        `{"model", "output", "model_type", "num_layers", "removed_layer_indices", "removed_memories", "base_confirmed",
        "differing_tensors", "bytes_written", "seconds"}`. `base_confirmed` is whether the weights are the base's, byte for byte, and
        `differing_tensors` the number that differ; None without a digest of the base.

    Raises:
        RequestError: If the model was not made by `upscale`, or the output cannot be made.
    """
    started = time.perf_counter()
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        config = read_config(source.folder)
        upscaled = read_upscaled(config, source.folder)
        resized = _resized_vocabulary(config, upscaled)
        opened = open_base(source.folder)
        plan = read_plan(upscaled, opened)
        tensors = _base_tensors(opened, plan, upscaled)
        record = read_record(source.folder) or {}
        shards = _base_shards(tensors, record)
        folder = CheckpointFolder(output, source.folder, overwrite)
        kept = {name: bank for name, bank in banks_of(opened.layout.memories).items() if name not in plan.new_memories}
        digested = TensorDigests(
            opened.tensors, _digested_names(opened, tensors) if upscaled.base_sha256 is not None else {}
        )
        with (
            digested as digests,
            written_from(opened, folder, shards, kept, progress, digests.add, opened.stored_name) as written,
        ):
            progress.stage("checking what was written", 1)
            write_part(source.folder, folder.partial, _base_config(upscaled, tensors, resized, progress), progress)
            changed: Any = record.get(CHANGED_KEY)
            if isinstance(changed, dict):
                for name in CHANGED_FILES:
                    if isinstance(changed.get(name), str):
                        (folder.partial / name).write_text(changed[name], encoding="utf-8")
                    elif name in changed:
                        (folder.partial / name).unlink(missing_ok=True)
            if record.get(REWRITTEN_KEY):
                progress.note(
                    "the tokenizer's files are not the base's: they stay as transformers had loaded them, and tokenize text alike."
                )
            hashes = digests.finish()
            if made := {each.name for each in tensors if isinstance(each.recipe, LayerBlocks) and hashes}:
                stored = opened.by_name(stored_tensors(folder.partial, needs_weights=True) or {})
                with TensorDigests(stored, {name: name.removeprefix(opened.prefix) for name in made}) as of_blocks:
                    hashes |= of_blocks.finish()
            comparison = _compare_with_base(hashes, upscaled, record)
            if comparison["base_confirmed"] is False:
                differing = comparison["differing_tensors"]
                difference = "the weights are" if differing is None else f"{differing} of {len(hashes)} tensors are"
                size = "of another size, " if resized else ""
                progress.warn(
                    f"{difference} not the base's, byte for byte: {size}trained since it was upscaled, or cast. If you need the base "
                    "itself, use the base's checkpoint."
                )
            if kept:
                progress.note(
                    f"the files of {', '.join(kept)} next to the weights stay as they are now, and are not compared."
                )
            removal: dict[str, Any] = {
                "model": source.label,
                "method": upscaled.method,
                "removed_layers": plan.new_indices,
            }
            removal |= {"removed_memories": list(plan.new_memories)} if plan.new_memories else {}
            version = importlib.metadata.version("midus-hf")
            write_record(folder.partial, {"midus_hf": version, STRIPPED_KEY: {**removal, **comparison}})
            progress.advance()
    return {
        "model": str(model),
        "output": str(output),
        "model_type": upscaled.whole_base_config.get("model_type"),
        "num_layers": plan.num_base_layers,
        "removed_layer_indices": plan.new_indices,
        "removed_memories": list(plan.new_memories),
        **comparison,
        "bytes_written": written.bytes_written,
        "seconds": time.perf_counter() - started,
    }


def _base_config(
    upscaled: UpscaleRecord, tensors: list[OutputTensor], resized: tuple[int, int] | None, progress: Progress
) -> Config:
    """Return the base's config, with the vocabulary and dtype that its tensors have now."""
    config = upscaled.whole_base_config
    dtype = TORCH_NAMES[most_common_dtype(tensors)]
    if resized:
        before, size = resized
        config = copy.deepcopy(config)
        (config[LANGUAGE_KEY] if upscaled.larger_base_config else config)["vocab_size"] = size
        progress.warn(
            f"the vocabulary was resized from {before:,} to {size:,} tokens since it was upscaled; it stays so."
        )
    base_dtype = upscaled.base_dtype or dtype
    if dtype == base_dtype:
        return config
    progress.warn(f"the base was {base_dtype}, and its tensors are {dtype} since it was upscaled; they stay so.")
    return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": dtype}


def _resized_vocabulary(config: Config, upscaled: UpscaleRecord) -> tuple[int, int] | None:
    before = upscaled.base_config.get("vocab_size")
    size = language_entry(config).get("vocab_size")
    return None if before is None or size is None or before == size else (before, size)


def _base_shards(tensors: list[OutputTensor], record: dict[str, Any]) -> dict[str, list[OutputTensor]]:
    by_name = {tensor.name: tensor for tensor in tensors}
    try:
        files = record["base"]["files"]
        recorded = sorted(name for names in files.values() for name in names)
        is_sound = all(Path(file).name == file and file.endswith(".safetensors") for file in files)
    except (KeyError, TypeError, AttributeError):
        return split_shards(tensors)
    if not is_sound or recorded != sorted(by_name):
        return split_shards(tensors)
    return {file: [by_name[name] for name in names] for file, names in files.items()}


def _compare_with_base(digests: dict[str, str], upscaled: UpscaleRecord, record: dict[str, Any]) -> dict[str, Any]:
    if not digests:
        return {"base_confirmed": None, "differing_tensors": None}
    if content_sha256(digests) == upscaled.base_sha256:
        return {"base_confirmed": True, "differing_tensors": 0}
    base = record.get("base")
    recorded = base.get("tensor_sha256") if isinstance(base, dict) else None
    differing = None
    if isinstance(recorded, dict) and content_sha256(recorded) == upscaled.base_sha256:
        differing = sum(recorded.get(name) != digest for name, digest in digests.items())
    return {"base_confirmed": False, "differing_tensors": differing}


def _digested_names(model: BaseCheckpoint, tensors: list[OutputTensor]) -> dict[str, str]:
    weights = model.weight_names
    return {
        tensor.recipe.source: tensor.name.removeprefix(model.prefix)
        for tensor in tensors
        if isinstance(tensor.recipe, Copy) and tensor.recipe.source in weights
    }


def _base_tensors(model: BaseCheckpoint, plan: Plan, upscaled: UpscaleRecord) -> list[OutputTensor]:
    """Return the base's tensors under its names, each a copy from the upscaled model."""
    kept = [plan.kept_indices[layer] for layer in range(plan.num_base_layers)]
    blocks = block_recipes(model, kept, dict(upscaled.base_config))

    def carried(name: str, source: str) -> OutputTensor:
        stored = model.tensors[source]
        return OutputTensor(name, blocks.get(source) or Copy(stored.shape, source), stored.dtype)

    names_in_base = model.outer_names(plan.num_base_layers)
    outer = [carried(in_base, name) for name, in_base in names_in_base.items() if not plan.owns(name)]
    layers = [
        carried(model.new_name(layer, key), source)
        for layer, index in enumerate(kept)
        for key, source in model.layer_names[index].items()
        if not plan.owns(source)
    ]
    return in_file_order(outer, layers)


def extract(
    model: str | Path, output: str | Path, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the language model of a composite model as a separate checkpoint; return what was done."""
    started = time.perf_counter()
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        if opened.composite is None:
            raise RequestError(
                f"{source.folder} is a separate language model, of type {opened.config['model_type']!r}; expected one within a "
                "composite model. Use it as it is."
            )
        outside = {*opened.outer_shapes, *opened.unexpected}
        tensors = [
            OutputTensor(name, Copy(stored.shape, name), stored.dtype)
            for name, stored in opened.tensors.items()
            if name not in outside
        ]
        folder = CheckpointFolder(output, source.folder, overwrite)
        config = _alone(opened.config, opened.family.class_name)
        banks = banks_of(opened.layout.memories)
        with written_from(opened, folder, split_shards(tensors), banks, progress) as written:
            write_part(source.folder, folder.partial, config, progress)
            keep_tokenizer(source, folder.partial, progress)
    return {
        "model": str(model),
        "output": str(output),
        "model_type": config["model_type"],
        "num_layers": opened.num_layers,
        "left_out": len(opened.tensors) - len(tensors),
        "bytes_written": written.bytes_written,
        "seconds": time.perf_counter() - started,
    }


def _alone(config: Config, class_name: str) -> Config:
    host = "Midus" if config["model_type"].startswith(MEMORY_PREFIX) else ""
    alone = {**config, "architectures": [f"{host}{class_name}ForCausalLM"]}
    if (record := record_of(config)) is not None:
        base_config = _alone(dict(record.base_config), class_name)
        of_alone = dataclasses.replace(record, base_config=base_config, base_sha256=None, larger_base_config=None)
        alone[RECORD_KEY] = of_alone.to_dict()
    return alone

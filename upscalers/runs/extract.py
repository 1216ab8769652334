"""Extraction of the language model of a composite model, as a separate checkpoint."""

import dataclasses
import time
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY, record_of
from midus_hf.anatomy.types import MEMORY_PREFIX
from midus_hf.config.errors import RequestError
from midus_hf.memories.bank import banks_of
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import open_base
from upscalers.checkpoint.source import resolve_source
from upscalers.checkpoint.tokenizer import keep_tokenizer
from upscalers.request.progress import Progress
from upscalers.runs.output_folder import CheckpointFolder, write_part, written_from
from upscalers.tensors.recipes import Copy
from upscalers.tensors.writer import OutputTensor, split_shards


def extract(
    model: str | Path, output: str | Path, overwrite: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Write the language model of a composite model as a separate checkpoint, byte for byte; return what was done, as a dict."""
    started = time.perf_counter()
    progress = progress or Progress()
    with resolve_source(str(model)) as source:
        opened = open_base(source.folder)
        if opened.composite is None:
            raise RequestError(
                f"{source.folder} is a separate language model, of type {opened.config['model_type']!r}; expected one within a "
                "composite model. Use it as it is."
            )
        outside = {*opened.surroundings, *opened.unexpected}
        tensors = [
            OutputTensor(name, Copy(stored.shape, name), stored.dtype)
            for name, stored in opened.tensors.items()
            if name not in outside
        ]
        folder = CheckpointFolder(output, source.folder, overwrite)
        config, banks, shards = (
            _alone(opened.config, opened.family.class_name),
            banks_of(opened.layout.memories),
            split_shards(tensors),
        )
        with written_from(opened, folder, shards, banks, progress) as written:
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
    """Return the config of a language model, and those of its bases in its record, as those of separate checkpoints."""
    host = "Midus" if config["model_type"].startswith(MEMORY_PREFIX) else ""
    alone = {**config, "architectures": [f"{host}{class_name}ForCausalLM"]}
    if (record := record_of(config)) is not None:
        base_config = _alone(dict(record.base_config), class_name)
        of_alone = dataclasses.replace(record, base_config=base_config, base_sha256=None, larger_base_config=None)
        alone[RECORD_KEY] = of_alone.to_dict()
    return alone

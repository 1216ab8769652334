"""What a run reads, by digests in its checkpoints: a run is resumed over the same model and the same sequences."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from midus_hf.config.errors import RequestError
from midus_hf.data.stream import StreamedSequences
from midus_hf.files.checkpoint_files import INPUTS_FILE, STREAM_FILE
from midus_hf.memories.engram.certificate import OF_SAVING
from midus_hf.memories.hosting.service import BankService

_ROWS_AT_ONCE = 1000
# Digests by the key of the run that names an input, and by the part of it, in words for messages.
Digests = dict[str, dict[str, str]]


def model_digests(model: PreTrainedModel, arguments: Any) -> Digests:
    """Return the SHA-256 of a model's settings, of its weights as they were loaded, and of what lies beside them.

    Weights of a new model are left out: they follow from settings and seed, up to the rounding of a processor.
    """
    is_new = arguments.model_name_or_path is None
    digests = {} if is_new else {"weights": _tensors_digest(model.state_dict())}
    settings = json.loads(model.config.to_json_string())
    kept = json.dumps({key: value for key, value in settings.items() if key not in OF_SAVING}, sort_keys=True)
    digests["settings"] = hashlib.sha256(kept.encode()).hexdigest()
    services: Any = getattr(getattr(model, "stack", None), "services", {})
    for name, service in services.items():
        if isinstance(service, BankService) and (digest := service.digest()) is not None:
            digests[f"files beside the weights ({name})"] = hashlib.sha256(digest.encode()).hexdigest()
    return {"config_name" if is_new else "model_name_or_path": digests}


def _tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of tensors and their names. Hashing releases the interpreter's lock, so that threads share the work."""

    def digest_of(name: str) -> str:
        tensor = tensors[name].detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name}:{tensor.dtype}:{list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256("\n".join(pool.map(digest_of, sorted(tensors))).encode()).hexdigest()


def check_inputs(trainer: Any, of_model: Digests, arguments: Any, checkpoint: Path | None) -> Digests:
    """Return the digests of what a run reads, of a model and of a Trainer's sequences, and compare them with a checkpoint's.

    Held-out texts may change, unless they choose the model that is saved.

    Raises:
        RequestError: If the run that saved the checkpoint read something else under the same keys.
    """
    held_out = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    if checkpoint is not None and isinstance(trainer.train_dataset, StreamedSequences):
        count = len(list(checkpoint.glob(STREAM_FILE.format("*"))))
        if count != arguments.world_size:
            raise RequestError(
                f"{checkpoint} has the streams of {count} processes, and this run has {arguments.world_size}; expected the same "
                "number of processes, since each goes on with its own."
            )
    digests = {
        **of_model,
        arguments.data_key: _sequences_digests({"": trainer.train_dataset}),
        "eval_text": _sequences_digests(held_out),
    }
    if (tree := getattr(arguments, "tree", None)) is not None:
        from midus_hf.topics.tree import ClusterTree

        digests["tree"] = {"nodes": ClusterTree.load(tree).fingerprint}
    path = None if checkpoint is None else checkpoint / INPUTS_FILE
    if path is None or not path.is_file():  # a script may have saved it
        return digests
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key, parts in digests.items():
        if key == "eval_text" and not arguments.load_best_model_at_end:
            continue
        for part, digest in parts.items():
            before = earlier.get(key, {}).get(part, digest)
            if before != digest:
                raise RequestError(
                    f"{key} is {getattr(arguments, key)!r}, whose {part} are not those that the run to resume read (SHA-256 "
                    f"{digest[:16]}, expected {before[:16]}); put them back, or start a new run in another folder."
                )
    return digests


def save_inputs(folder: Path, digests: Digests) -> None:
    """Write digests into the folder of a checkpoint that is being saved."""
    (folder / INPUTS_FILE).write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def _sequences_digests(datasets_by_name: Mapping[str, Any]) -> dict[str, str]:
    """Return the SHA-256 of the rows of each `datasets.Dataset`, and of streams; a script may have others, which are left out."""
    from datasets import Dataset

    return {
        f"sequences of tokens of {name}" if name else "sequences of tokens": (
            rows_digest(rows) if isinstance(rows, Dataset) else rows.digest
        )
        for name, rows in datasets_by_name.items()
        if isinstance(rows, Dataset | StreamedSequences)
    }


def rows_digest(rows: Any) -> str:
    """Return the SHA-256 of the rows of a `datasets.Dataset`, wherever their files lie and however they are cut."""
    import pyarrow
    from pyarrow import compute

    digest = hashlib.sha256()
    for batch in rows.with_format("arrow").iter(_ROWS_AT_ONCE):
        for name in sorted(batch.column_names):
            column = batch[name].combine_chunks()
            digest.update(f"{name}:{column.type}\n".encode())
            if not pyarrow.types.is_primitive(getattr(column.type, "value_type", column.type)):
                digest.update(json.dumps(column.to_pylist(), default=str).encode())
                continue
            is_listed = hasattr(column.type, "value_type")
            parts = [compute.list_value_length(column), compute.list_flatten(column)] if is_listed else [column]
            for numbers in parts:
                digest.update(numbers.to_numpy(zero_copy_only=False).data)
    return digest.hexdigest()

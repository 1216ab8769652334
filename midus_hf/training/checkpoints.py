"""Checkpoints of a run: trained parameters, the optimizer, digests of what it read, and a manifest that is written last."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from midus_hf.config.errors import RequestError, print_note
from midus_hf.data.stream import StreamedSequences
from midus_hf.files.checkpoint_files import (
    CHECKPOINT_NAME,
    INPUTS_FILE,
    MANIFEST_FILE,
    STREAM_FILE,
    TRAINED_FILE,
    TRAINER_STATE,
)
from midus_hf.files.outputs import write_text
from midus_hf.memories.engram.known_ngrams import SAVING_KEYS
from midus_hf.memories.hosting.service import BankService

SCHEDULER_FILE = "scheduler.pt"
_ROWS_AT_ONCE = 1000
#: SHA-256 of each part of an input, by the key that names the input.
Digests = dict[str, dict[str, str]]


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that a run may change: trained parameters, and saved buffers."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def save_trained(model: nn.Module, folder: Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
    """Write what a run may change to a file in a checkpoint's folder, gathering sharded tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = state_dict or {}
    tensors = {name: whole.get(name, tensor).contiguous() for name, tensor in saved_tensors(model)}
    save_file(tensors, folder / TRAINED_FILE, metadata={"format": "pt"})


def load_checkpoint(model: nn.Module, folder: str | os.PathLike) -> None:
    """Load trained parameters from a checkpoint of a run into the model that the run started from.

    The same tensors must require gradients as in the run, else, or without a checkpoint, it raises `RequestError`.
    """
    path = Path(folder, TRAINED_FILE)
    if not path.is_file():
        raise RequestError(f"{str(folder)!r} has no {TRAINED_FILE}; expected a checkpoint of a run.")
    tensors = dict(saved_tensors(model))
    with safe_open(path, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        for name in sorted(tensors.keys() | shapes.keys()):
            if name not in shapes:
                relation = "lacks"
            elif name not in tensors:
                relation = "also has"
            elif shapes[name] != tuple(tensors[name].shape):
                relation = "has another shape of"
            else:
                continue
            raise RequestError(
                f"{path} {relation} {name}, so its run trained other tensors; resume with the same model and keys."
            )
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(file.get_tensor(name))


def checkpoints_in(output: str | os.PathLike) -> dict[int, Path]:
    """Return the checkpoints in a folder, complete or not, the latest first."""
    folder = Path(output)
    steps: dict[int, Path] = {}
    if folder.is_dir():
        for path in folder.iterdir():
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match and path.is_dir():
                steps[int(match[1])] = path
    return dict(sorted(steps.items(), reverse=True))


def find_damage(checkpoint: Path, contents: bool = True) -> str | None:
    """Return what is wrong with a checkpoint in one line; None if all files have the manifest's sizes.

    `contents`: whether the files are read, too, which takes seconds per gigabyte, and compared with the manifest's digests.
    """
    name = MANIFEST_FILE
    try:
        manifest = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest.items()}
        if TRAINER_STATE not in entries:
            return f"its {MANIFEST_FILE} is damaged"
        for name, (size, _) in entries.items():
            num_bytes = (checkpoint / name).stat().st_size
            if num_bytes != size:
                return f"{name} has {num_bytes:,} bytes instead of {size:,}"
        if contents:
            for name, (_, digest) in entries.items():
                if _sha256(checkpoint / name) != digest:
                    return f"{name} does not have the contents that were written"
    except FileNotFoundError:
        return "it was not completely written" if name == MANIFEST_FILE else f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return f"its {MANIFEST_FILE} is damaged"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_latest_complete(output: str | os.PathLike) -> Path | None:
    """Return the latest complete checkpoint in a folder, or None; list skipped ones on standard error."""
    skipped: list[str] = []
    complete = None
    for checkpoint in checkpoints_in(output).values():
        damage = find_damage(checkpoint)
        if damage is None:
            complete = checkpoint
            break
        skipped.append(f"{checkpoint.name} is skipped: {damage}")
    if skipped:
        print_note("; ".join(skipped))
    return complete


def resumed_checkpoint(output: str | os.PathLike, resume: bool | str) -> Path | None:
    """Return the checkpoint of a `resume_from_checkpoint`; None if `"auto"` finds none."""
    if isinstance(resume, str) and resume != "auto":
        checkpoint = Path(resume)
        damage = find_damage(checkpoint) if checkpoint.is_dir() else "it does not exist"
        if damage is not None:
            raise RequestError(
                f"resume_from_checkpoint is {resume!r}, which is not a whole checkpoint ({damage}); expected a folder checkpoint-N "
                "with all files that a run wrote. Choose another one, or set resume_from_checkpoint: true for the latest whole one."
            )
        return checkpoint
    whole = find_latest_complete(output)
    if whole is None and resume is True:
        raise RequestError(
            f"resume_from_checkpoint is true, but {str(output)!r} has no whole checkpoint; start the run again in another folder, "
            "with save_steps to have checkpoints."
        )
    return whole


def has_optimizer_state(checkpoint: Path) -> bool:
    """Return whether a checkpoint has optimizer and schedule, which one of `save_only_model` lacks."""
    has_optimizer = any(next(checkpoint.glob(pattern), None) for pattern in ("optimizer*", "global_step*"))
    return has_optimizer and (checkpoint / SCHEDULER_FILE).is_file()


def resume_hint(output: str | os.PathLike) -> str:
    """Return how to recover a failed run, in words that end a sentence."""
    # Sizes suffice for a hint: whoever resumes has the contents compared.
    whole = next((each for each in checkpoints_in(output).values() if find_damage(each, contents=False) is None), None)
    if whole is None or not has_optimizer_state(whole):
        return "start the run again"
    return f"--resume_from_checkpoint true continues from {whole}"


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, the manifest first, so that remains never count as complete."""
    if checkpoint.is_dir():
        (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
        shutil.rmtree(checkpoint)


def finish_checkpoint(checkpoint: Path) -> None:
    """Write the manifest, with sizes and digests of all other files, that makes a checkpoint complete."""
    files = {path.relative_to(checkpoint).as_posix(): path for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    manifest = {name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for name, path in files.items()}
    write_text(checkpoint / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def digest_model(model: PreTrainedModel, arguments: Any) -> Digests:
    """Return the SHA-256 of a model's settings, of loaded (not new) weights, and of files next to them."""
    is_new = arguments.model_name_or_path is None
    digests = dict[str, str]()
    tensors = {} if is_new else model.state_dict()

    def hash_tensor(name: str) -> str:
        tensor = tensors[name].detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name}:{tensor.dtype}:{list(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    if not is_new:
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
            digests["weights"] = hashlib.sha256("\n".join(pool.map(hash_tensor, sorted(tensors))).encode()).hexdigest()
    settings = json.loads(model.config.to_json_string())
    kept = json.dumps({key: value for key, value in settings.items() if key not in SAVING_KEYS}, sort_keys=True)
    digests["settings"] = hashlib.sha256(kept.encode()).hexdigest()
    services: Any = getattr(getattr(model, "stack", None), "services", {})
    for name, service in services.items():
        if isinstance(service, BankService) and (digest := service.digest()) is not None:
            digests[f"files beside the weights ({service.digest_name or name})"] = hashlib.sha256(
                digest.encode()
            ).hexdigest()
    return {"config_name" if is_new else "model_name_or_path": digests}


def digest_sequences(trainer: Any) -> Digests:
    """Return the SHA-256 of the sequences that a Trainer trains on and measures, by the keys that name their texts."""
    from datasets import Dataset

    held_out = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    by_key = {trainer.args.data_key: {"": trainer.train_dataset}, "eval_text": held_out}
    digests: Digests = {}
    for key, datasets in by_key.items():
        digests[key] = {}
        for name, rows in datasets.items():
            part = f"sequences of tokens of {name}".removesuffix(" of ")
            if isinstance(rows, Dataset):
                digests[key][part] = digest_rows(rows)
            elif isinstance(rows, StreamedSequences):
                digests[key][part] = rows.digest
    return digests


def check_inputs(trainer: Any, checkpoint: Path) -> None:
    """Refuse to resume from a checkpoint of a run that read others than `trainer.digests`.

    Held-out texts may change, unless they choose the saved model.
    """
    arguments = trainer.args
    if isinstance(trainer.train_dataset, StreamedSequences):
        count = len(list(checkpoint.glob(STREAM_FILE.format("*"))))
        if count != arguments.world_size:
            raise RequestError(
                f"{checkpoint} has the streams of {count} processes, and this run has {arguments.world_size}; expected the same "
                "number of processes: each resumes its own stream."
            )
    path = checkpoint / INPUTS_FILE
    if not path.is_file():  # a script may have saved it
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    for key, parts in trainer.digests.items():
        if key == "eval_text" and not arguments.load_best_model_at_end:
            continue
        for part, digest in parts.items():
            before = earlier.get(key, {}).get(part, digest)
            if before != digest:
                raise RequestError(
                    f"{key} is {getattr(arguments, key)!r}, whose {part} are not those that the run to resume read (SHA-256 "
                    f"{digest[:16]}, expected {before[:16]}); put them back, or start a new run in another folder."
                )


def digest_rows(rows: Any) -> str:
    """Return the SHA-256 of the rows of a `datasets.Dataset`, independent of its files."""
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

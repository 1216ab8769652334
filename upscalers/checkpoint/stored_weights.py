"""The weights of a checkpoint's folder: which files transformers would load, and the position of each of their tensors."""

from collections.abc import Iterable
from pathlib import Path

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import INDEX_FILE, SINGLE_FILE
from midus_hf.files.json_text import parse_json
from upscalers.checkpoint.safetensors_format import StoredTensor, read_header

_OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NOT_WEIGHTS = "training_args.bin"


def stored_tensors(folder: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    """Return the position of each tensor of a checkpoint, by its stored name; None if there are no weights and none are needed."""
    if (folder / SINGLE_FILE).is_file():  # transformers prefers the single file where both exist
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _indexed_tensors(folder, needs_weights)
    if not needs_weights:
        return None
    raise RequestError(missing_weights(str(folder), (path.name for path in folder.iterdir())))


def missing_weights(base: str, files: Iterable[str]) -> str:
    """Return the message about a base (a folder or hub id) whose files include no weights that can be read."""
    weights = [file for file in sorted(files) if file.endswith((".safetensors", *(name[1:] for name in _OTHERS)))]
    held = next((file for file in weights if file != _NOT_WEIGHTS), "no weights")
    remedy = "Give a checkpoint that transformers loads."
    if held.endswith(".bin"):
        remedy = (
            f"Write safetensors first, in Python: AutoModelForCausalLM.from_pretrained({base!r}).save_pretrained('base'), and its "
            "AutoTokenizer likewise."
        )
    return f"{base!r} holds {held}; expected {SINGLE_FILE} or an index of shards, {INDEX_FILE}. {remedy}"


def _indexed_tensors(folder: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    index_path = folder / INDEX_FILE
    try:
        weight_map = parse_json(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{index_path.name} is not a shard index ({type(error).__name__}: {error}). Download or save it again."
        ) from None
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in files:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise RequestError(
                f"{index_path.name} names the shard {name!r}; expected a .safetensors file in the same folder."
            )
        if not (folder / name).is_file() and not needs_weights:
            return None
        headers[name] = read_header(folder / name) if (folder / name).is_file() else {}
    for name, file in weight_map.items():
        if name not in headers[str(file)]:
            raise RequestError(
                f"{index_path.name} places {name} in {file}, which is missing or does not hold it. Download or save the base again."
            )
    # transformers also loads tensors that the files hold but the index omits.
    forgotten = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return {**forgotten, **{name: headers[str(file)][name] for name, file in weight_map.items()}}

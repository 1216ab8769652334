"""The weights of a checkpoint's folder: which files transformers would load, and the position of each of their tensors."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from midus_hf.files.checkpoint_files import INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE, SINGLE_FILE, indexed_weights
from midus_hf.files.json_text import parse_json
from upscalers.checkpoint.pickled_weights import names_beside_tensors, read_pickled
from upscalers.checkpoint.safetensors_format import StoredTensor, read_header
from upscalers.request.errors import RequestError

_OTHERS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_NOT_WEIGHTS = "training_args.bin"


@dataclass(frozen=True)
class WeightFormat:
    """A format of weights: the names that transformers loads, and the function that reads positions.

    Args:
        single: Name of the file that holds all weights.
        index: Name of the file that says which shard holds which tensor.
        suffix: End of the names of shards.
        read: Function that returns the tensors of a file, by name.
    """

    single: str
    index: str
    suffix: str
    read: Callable[[Path], dict[str, StoredTensor]]


# In the order in which transformers looks for them.
FORMATS = (
    WeightFormat(SINGLE_FILE, INDEX_FILE, ".safetensors", read_header),
    WeightFormat(PICKLED_FILE, PICKLED_INDEX_FILE, ".bin", read_pickled),
)


def stored_tensors(folder: Path, needs_weights: bool) -> dict[str, StoredTensor] | None:
    """Return the position of each tensor of a checkpoint, by its stored name; None for a checkpoint without weights.

    Args:
        folder: Folder of the checkpoint.
        needs_weights: Whether to refuse a folder without weights.

    Raises:
        RequestError: If weights are missing or not sound, or would have to be unpickled.
    """
    for weights in FORMATS:
        if (folder / weights.single).is_file():  # transformers prefers the single file where both exist
            return weights.read(folder / weights.single)
        if (folder / weights.index).is_file():
            return _indexed_tensors(folder, weights, needs_weights)
    if not needs_weights:
        return None
    raise RequestError(missing_weights(str(folder), (path.name for path in folder.iterdir())))


def left_out(folder: Path) -> list[str]:
    """Return the names of what a folder's weight files hold beside tensors, which is not read; safetensors hold tensors alone."""
    if any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return []
    single = folder / PICKLED_FILE
    files = (
        [single]
        if single.is_file()
        else [folder / name for name in indexed_weights(folder, PICKLED_INDEX_FILE, ".bin")]
    )
    return [name for file in files for name in names_beside_tensors(file)]


def missing_weights(base: str, files: Iterable[str]) -> str:
    """Return the message about a base whose files do not include weights that can be read.

    Args:
        base: A folder or a hub id.
        files: Names of the base's files.
    """
    weights = [file for file in sorted(files) if file.endswith((".safetensors", *(name[1:] for name in _OTHERS)))]
    held = next((file for file in weights if file != _NOT_WEIGHTS), "no weights")
    return (
        f"{base} holds {held}; expected {SINGLE_FILE}, {PICKLED_FILE} or an index of shards, {INDEX_FILE}. Give a checkpoint that "
        "transformers loads."
    )


def _indexed_tensors(folder: Path, weights: WeightFormat, needs_weights: bool) -> dict[str, StoredTensor] | None:
    index_path = folder / weights.index
    try:
        weight_map = parse_json(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"{index_path.name} is not a shard index ({type(error).__name__}: {error}). Download or save it again."
        ) from None
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in files:
        if Path(name).name != name or not name.endswith(weights.suffix):
            raise RequestError(
                f"{index_path.name} names the shard {name!r}; expected a {weights.suffix} file beside it."
            )
        if not (folder / name).is_file():
            if not needs_weights:
                return None
            raise RequestError(f"{index_path.name} names {name}, which is missing. Download or save the base again.")
        headers[name] = weights.read(folder / name)
    absent = [name for name, file in weight_map.items() if name not in headers[str(file)]]
    if absent:
        raise RequestError(
            f"{index_path.name} places {absent[0]} in {weight_map[absent[0]]}, which does not hold it "
            f"({len(absent)} such tensors). Download or save the base again."
        )
    # transformers also loads tensors that the files hold but the index omits.
    forgotten = {name: tensor for header in headers.values() for name, tensor in header.items()}
    return {**forgotten, **{name: headers[str(file)][name] for name, file in weight_map.items()}}

"""Files of weights on the hub that are fetched when they are first read, and dropped when nothing reads them any more."""

import io
import os
import shutil
import struct
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from upscalers.checkpoint.safetensors_format import (
    LONGEST_HEADER,
    StoredTensor,
    header_from,
    read_header,
)
from upscalers.request.errors import RequestError, one_line

# Headers of most files are shorter, so that one request suffices.
_FIRST_BYTES = 100_000
_LENGTH = struct.Struct("<Q")


class HubShards:
    """The weights of a hub repository, of which a folder holds only the files that are being read.

    A file that already lies in the person's cache of the hub is read there, and stays there. Any other file is fetched
    whole when it is first opened. Before the next file is fetched, every file is removed that is not open, and that no
    output tensor is still expected to read.

    Args:
        repository: Id of the repository.
        commit: The commit to read.
        folder: An existing folder for the files that are being read.

    Attributes:
        peak_bytes: The most bytes of fetched files that lay in the folder at once.
        fetched_bytes: Bytes of all files that were fetched, each as often as it was fetched.
        num_fetches: How many files were fetched, each as often as it was fetched.
    """

    def __init__(self, repository: str, commit: str, folder: Path):
        self.repository, self._commit, self._folder = repository, commit, folder
        self._lock = threading.RLock()
        self._present: dict[HubShard, Path] = {}
        self._files: frozenset[str] | None = None
        self.shards: dict[str, HubShard] = {}
        self.peak_bytes = self.fetched_bytes = self.num_fetches = 0

    def has(self, file: str) -> bool:
        """Return whether the repository has a file at its root.

        Raises:
            RequestError: If the hub does not say.
        """
        if self._files is None:
            from huggingface_hub import HfApi

            try:
                self._files = frozenset(HfApi().list_repo_files(self.repository, revision=self._commit))
            except Exception as error:
                raise RequestError(
                    f"the hub does not list the files of {self.repository!r} ({type(error).__name__}: {one_line(error)}). Try again "
                    "later, or leave --stream out."
                ) from None
        return file in self._files

    def read(self, file: str) -> dict[str, StoredTensor]:
        """Return the dtype, shape and position of each tensor of a safetensors file, from its header alone.

        Raises:
            RequestError: If the file is not in the repository, or its header is not sound.
        """
        cached = self._cached(file)
        if cached is not None:
            return read_header(cached)
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import EntryNotFoundError

        url = hf_hub_url(self.repository, file, revision=self._commit)
        try:
            num_bytes = get_hf_file_metadata(url).size or 0
            content = _range(url, 0, min(num_bytes, _FIRST_BYTES))
            length = _LENGTH.size + sum(_LENGTH.unpack(content[: _LENGTH.size].ljust(_LENGTH.size, b"\0")))
            if len(content) < length <= min(num_bytes, LONGEST_HEADER):
                content += _range(url, len(content), length)
        except EntryNotFoundError:
            raise RequestError(
                f"{self.repository!r} lacks {file}, which its index names; expected every shard. Choose another revision."
            ) from None
        except Exception as error:
            raise RequestError(
                f"the header of {file} of {self.repository!r} cannot be read ({type(error).__name__}: {one_line(error)}). Try again "
                "later, or leave --stream out."
            ) from None
        shard = self.shards[file] = HubShard(self, file, num_bytes)
        return header_from(shard, num_bytes, io.BytesIO(content))

    def _cached(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repository, file, revision=self._commit)
        return Path(path) if isinstance(path, str) else None

    def check_room(self) -> None:
        """Refuse a folder that has no room for the largest file.

        Raises:
            RequestError: If there is no room.
        """
        free = shutil.disk_usage(self._folder).free
        if self.largest_bytes > free:
            raise RequestError(
                f"the largest shard of {self.repository!r} takes {self.largest_bytes / 1e9:.2f} GB, but {self._folder.parent} has "
                f"{free / 1e9:.2f} GB free; expected room for the shard. Set TMPDIR to a folder with more."
            )

    @property
    def largest_bytes(self) -> int:
        """Size of the largest file that is not in the cache of the hub."""
        return max((shard.num_bytes for shard in self.shards.values()), default=0)

    def is_on_disk_of(self, folder: Path) -> bool:
        """Return whether fetched files take room on the same disk as a folder."""
        return self._folder.stat().st_dev == folder.stat().st_dev

    def open(self, shard: "HubShard") -> "_Reading":
        """Open a file for reading, and fetch it first unless it is there."""
        with self._lock:
            if shard not in self._present:
                self._drop_unread()
                self._present[shard] = self._fetch(shard)
                self.fetched_bytes += shard.num_bytes
                self.num_fetches += 1
                self.peak_bytes = max(self.peak_bytes, sum(each.num_bytes for each in self._present))
            shard.open_files += 1
            return _Reading(self._present[shard], shard)

    def close(self, shard: "HubShard") -> None:
        """Note that a reader has closed a file."""
        with self._lock:
            shard.open_files -= 1

    def _drop_unread(self) -> None:
        for shard, path in list(self._present.items()):
            if not shard.open_files and not shard.expected:
                del self._present[shard]
                shutil.rmtree(path.parent)

    def _fetch(self, shard: "HubShard") -> Path:
        from huggingface_hub import hf_hub_download

        folder = self._folder / shard.name.removesuffix(".safetensors")
        try:
            return Path(hf_hub_download(self.repository, shard.name, revision=self._commit, local_dir=folder))
        except Exception as error:
            raise OSError(
                f"{shard.name} of {self.repository!r} cannot be fetched ({type(error).__name__}: {one_line(error)})"
            ) from error


class HubShard:
    """A file of weights on the hub.

    Args:
        shards: The files that the file belongs to.
        name: Name of the file.
        num_bytes: Size of the file.

    Attributes:
        expected: How many output tensors are still to be made from the file. While any is, the file is not removed.
        open_files: How many readers have the file open.
    """

    def __init__(self, shards: HubShards, name: str, num_bytes: int):
        self._shards = shards
        self.name = name
        self.num_bytes = num_bytes
        self.expected = 0
        self.open_files = 0

    def open(self, mode: Literal["rb"], buffering: Literal[0]) -> io.FileIO:
        """Open the file, as `Path.open` does, fetching the file first unless it is there.

        Raises:
            OSError: If the file cannot be fetched.
        """
        return self._shards.open(self)

    def closed(self) -> None:
        """Note that a reader has closed the file."""
        self._shards.close(self)


class _Reading(io.FileIO):
    """An open file, which stays on the disk until it is closed."""

    def __init__(self, path: Path, shard: HubShard):
        super().__init__(os.fspath(path), "rb")
        self._shard: HubShard | None = shard

    def close(self) -> None:
        super().close()
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.closed()


def hub_shards(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> set[HubShard]:
    """Return the files on the hub that hold any of the named tensors."""
    files = (tensors[name].in_file.file for name in names)
    return {file for file in files if isinstance(file, HubShard)}


def _range(url: str, start: int, end: int) -> bytes:
    """Return the bytes of a file on the hub from `start` up to, but not including, `end`."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    headers: dict[str, Any] = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
    response = http_backoff("GET", url, headers=headers)
    hf_raise_for_status(response)
    if len(response.content) != end - start:
        raise OSError(f"{len(response.content)} bytes came where {end - start} were expected")
    return response.content

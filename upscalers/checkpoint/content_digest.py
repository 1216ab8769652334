"""A digest of a checkpoint's weights that says nothing of its files: what `strip` gives back is confirmed by it."""

import hashlib
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from upscalers.checkpoint.base_model import BaseModel
from upscalers.checkpoint.safetensors_format import StoredTensor
from upscalers.machine.processors import num_processors

_CHUNK_BYTES = 1 << 20
_MOST_WAITING_BYTES = 4 << 30


def weight_names(model: BaseModel) -> dict[str, str]:
    """Names of a checkpoint's tensors, as stored, each with its name for a digest, which has no `model.` in front.

    Left out is what transformers does not save again: a tied head, and what the architecture does not have.
    """
    left_out = {*model.repeated_names, *model.unexpected}
    return {name: name.removeprefix(model.prefix) for name in model.tensors if name not in left_out}


def content_sha256(digests: Mapping[str, str]) -> str:
    """The SHA-256 of a whole checkpoint, from the digests of its tensors by name, whatever their order."""
    lines = (f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class TensorDigests:
    """Computes the SHA-256 of tensors in threads of its own, for hashing gives the interpreter free.

    Each covers dtype, shape and bytes. Until `begin`, tensors wait, as many as the machine may still hold in memory after
    they were copied: where there are few processors, imports and copying come first. Enter it before the first tensor;
    leaving it stops what is still being read.

    Args:
        tensors: The tensors of a checkpoint, by full name.
        names: Those to read, by full name, and what each is called in the result.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], names: Mapping[str, str]):
        self._tensors = tensors
        self._names = names
        self._taken: set[str] = set()
        self._waiting: deque[str] = deque()
        self._waiting_bytes = 0
        self._begun = False
        self._futures: dict[str, Future[str]] = {}
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(num_processors(), thread_name_prefix="digest")

    def __enter__(self) -> "TensorDigests":
        return self

    def add(self, name: str) -> None:
        """Take a tensor on, by its full name, best when something else has just read its bytes from the disk.

        What is not wanted, or was taken on already, is passed over.
        """
        if name in self._names and name not in self._taken:
            self._taken.add(name)
            self._waiting.append(name)
            self._waiting_bytes += self._tensors[name].num_bytes
            while self._waiting and (self._begun or self._waiting_bytes > _MOST_WAITING_BYTES):
                self._submit_next()

    def begin(self) -> None:
        """Let nothing wait any longer."""
        self._begun = True
        while self._waiting:
            self._submit_next()

    def _submit_next(self) -> None:
        name = self._waiting.popleft()
        self._waiting_bytes -= self._tensors[name].num_bytes
        self._futures[name] = self._pool.submit(self._digest, self._tensors[name])

    def finish(self) -> dict[str, str]:
        """The digests of all tensors, by the names of the result, sorted.

        Raises:
            OSError: If a file cannot be read, or ends early.
        """
        self.begin()
        for name in self._names:
            self.add(name)
        return dict(sorted((self._names[name], future.result()) for name, future in self._futures.items()))

    def _digest(self, tensor: StoredTensor) -> str:
        assert tensor.file is not None
        digest = hashlib.sha256(f"{tensor.dtype}:{list(tensor.shape)}\n".encode())
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, tensor.num_bytes)))
        left = tensor.num_bytes
        with tensor.file.open("rb", buffering=0) as file:
            file.seek(tensor.start)
            while left and not self._stopped.is_set():
                read = file.readinto(buffer[: min(len(buffer), left)])
                if not read:
                    raise OSError(f"{tensor.file.name} ended {left} bytes early")
                digest.update(buffer[:read])
                left -= read
        return digest.hexdigest()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

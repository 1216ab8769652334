"""Digests of a checkpoint's weights that do not depend on its files; `strip` verifies the base's weights with them."""

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.safetensors_format import StoredTensor

_CHUNK_BYTES = 1 << 20


def weight_names(model: BaseCheckpoint) -> dict[str, str]:
    """Return the name in digests (without `model.`) of each weight that transformers saves again, by its stored name."""
    left_out = {*model.repeated_names, *model.unexpected}
    return {name: name.removeprefix(model.prefix) for name in model.tensors if name not in left_out}


def content_sha256(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of a whole checkpoint from the digests of its tensors by name, in any order."""
    lines = (f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class TensorDigests:
    """Threads that compute the SHA-256 of dtype, shape and bytes of tensors; hashing releases the interpreter's lock."""

    def __init__(self, tensors: Mapping[str, StoredTensor], names: Mapping[str, str]):
        self._tensors, self._names = tensors, names
        self._futures: dict[str, Future[str]] = {}
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(thread_name_prefix="digest")

    def __enter__(self) -> "TensorDigests":
        return self

    def add(self, name: str) -> None:
        """Start hashing a tensor, ideally right after other code has read it; a tensor not in `names` or already added is skipped."""
        if name in self._names and name not in self._futures:
            self._futures[name] = self._pool.submit(self._digest, self._tensors[name])

    def finish(self) -> dict[str, str]:
        """Return the digests of all tensors, by their name in the result, sorted."""
        for name in self._names:
            self.add(name)
        return dict(sorted((self._names[name], future.result()) for name, future in self._futures.items()))

    def _digest(self, tensor: StoredTensor) -> str:
        digest = hashlib.sha256(f"{tensor.dtype}:{list(tensor.shape)}\n".encode())
        assert tensor.file is not None
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

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)

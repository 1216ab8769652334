"""Triton's interpreter, where its version has a fault that keeps kernels from running in it."""

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from midus_hf.ops.triton_import import HAS_TRITON, triton


@contextlib.contextmanager
def mended_interpreter() -> Iterator[None]:
    """Give 3.6's interpreter the indices of 3.7's: it takes `int` of an array `[1]`, which numpy 2.4 and newer refuse."""
    if not (HAS_TRITON and triton.__version__.startswith("3.6.")):
        yield
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: object) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    with patch.object(interpreter, "_patch_lang_tensor", patched):
        yield

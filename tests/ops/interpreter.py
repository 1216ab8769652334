"""Mend Triton's interpreter: a fault that keeps kernels from running, and work that is repeated at every call."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from midus_hf.ops.dispatch.triton import HAS_TRITON, triton


@contextlib.contextmanager
def mended_interpreter() -> Iterator[None]:
    """Patch Triton's interpreter while the context lasts; without Triton, do nothing.

    Version 3.6 converts an array `[1]` by `int`, which numpy 2.4 and newer refuse, so the conversion of version 3.7 is
    used. All versions search the whole of `triton.language` for operations and replace them whenever a kernel calls a
    function, also when the operations are replaced already. Here the search runs once, and replacement once per kernel
    launch.
    """
    if not HAS_TRITON:
        yield
        return
    from triton.runtime import interpreter

    patch_tensor, is_operation = interpreter._patch_lang_tensor, triton.language.core.is_builtin
    patch_language, languages = interpreter._patch_lang, (triton.language, triton.language.core)
    operations: dict[object, list[str]] = {}
    replaced: list[object] = []  # modules whose operations are replaced for the running kernel

    def patched_tensor(tensor: object, scope: object) -> None:
        patch_tensor(tensor, scope)
        if triton.__version__.startswith("3.6."):
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    def patched_operations(owner: object, builder: object, scope: object) -> None:
        if owner not in operations:
            operations[owner] = [name for name, member in inspect.getmembers(owner) if is_operation(member)]
        for name in operations[owner]:
            member = getattr(owner, name)
            if is_operation(member):  # false if the calling function has replaced it already
                interpreter._patch_attr(owner, name, member, builder, scope)

    def patched_language(function: Any) -> Any:
        seen = [module for module in languages if any(value is module for value in function.__globals__.values())]
        if all(module in replaced for module in seen):
            return interpreter._LangPatchScope()  # restores nothing: the scope of the running kernel does
        scope = patch_language(function)
        if not replaced:
            restore = scope.restore

            def restored() -> None:
                replaced.clear()
                restore()

            scope.restore = restored
        replaced.extend(seen)
        return scope

    with (
        patch.object(interpreter, "_patch_lang", patched_language),
        patch.object(interpreter, "_patch_lang_tensor", patched_tensor),
        patch.object(interpreter, "_patch_builtin", patched_operations),
    ):
        yield

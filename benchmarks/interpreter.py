"""Triton's interpreter without a fault that keeps kernels from running in it, and without work that it repeats at every call."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from midus_hf.ops.dispatch.triton import HAS_TRITON, triton


@contextlib.contextmanager
def mended_interpreter() -> Iterator[None]:
    """Give 3.6's interpreter the indices of 3.7's, and any version's a memory of where triton's operations are.

    3.6 takes `int` of an array `[1]`, which numpy 2.4 and newer refuse. All search the whole of `triton.language` for operations
    and put others in their place, at every call that a kernel makes of a function, where they have long been.
    """
    if not HAS_TRITON:
        yield
        return
    from triton.runtime import interpreter

    patch_tensor, is_operation = interpreter._patch_lang_tensor, triton.language.core.is_builtin
    patch_language, languages = interpreter._patch_lang, (triton.language, triton.language.core)
    operations: dict[object, list[str]] = {}
    replaced: list[object] = []  # modules whose operations have been replaced for the kernel that runs

    def patched_tensor(tensor: object, scope: object) -> None:
        patch_tensor(tensor, scope)
        if triton.__version__.startswith("3.6."):
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())  # type: ignore[attr-defined]

    def patched_operations(owner: object, builder: object, scope: object) -> None:
        if owner not in operations:
            operations[owner] = [name for name, member in inspect.getmembers(owner) if is_operation(member)]
        for name in operations[owner]:
            member = getattr(owner, name)
            if is_operation(member):  # not so where the caller has replaced it already
                interpreter._patch_attr(owner, name, member, builder, scope)

    def patched_language(function: Any) -> Any:
        seen = [module for module in languages if any(value is module for value in function.__globals__.values())]
        if all(module in replaced for module in seen):
            return interpreter._LangPatchScope()  # with nothing to restore: the kernel that runs does that
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

"""Triton where it is installed; elsewhere names that let kernels be defined, though not run."""

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        """Stands for a module whose decorators leave functions alone."""

        constexpr: Any = None

        @staticmethod
        def jit(function: Any) -> Any:
            return function

    triton = tl = _Absent

__all__ = ["HAS_TRITON", "tl", "triton"]

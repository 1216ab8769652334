"""The choice between the bodies of an op."""

BACKENDS = ("auto", "torch")


def resolve_backend(backend: str) -> str:
    """Name the body that an op runs.

    Args:
        backend: `"auto"` for the fastest body that can run here, or the name of one body.

    Returns:
        The name of a body. Today that is always `"torch"`, the reference.

    Raises:
        ValueError: If there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; expected one of {', '.join(map(repr, BACKENDS))}.")
    return "torch"

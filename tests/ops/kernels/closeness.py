"""How close a fast body must come to the float64 reference: one table for all ops, forward and backward."""

import torch

# Largest ratio of the error's root mean square to the reference's, by dtype of the inputs.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def assert_close(
    name: str, results: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, slack: float = 1
) -> None:
    """Compare with a float64 reference by RMS ratio, absolutely where the reference is zero; `slack` widens what may pass."""
    assert results.shape == expected.shape, f"{name}: {tuple(results.shape)}, expected {tuple(expected.shape)}"
    assert not results.isnan().any(), f"{name} holds NaN"
    error, size = (
        (x.double().square().mean().sqrt().item() if x.numel() else 0.0) for x in (results - expected, expected)
    )
    assert error <= slack * TOLERANCE[dtype] * max(size, 1e-6), f"{name}: error {error:.2e} against {size:.2e}"

"""The GPUs that kernels are compiled for."""

# Bytes that one program may use, by target.
MOST_SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}

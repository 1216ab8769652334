"""Names of the providers that goals and profiles refer to. Reports need these names without torch installed."""

# The provider that ops choose by themselves.
OURS = "sorted"

# Plain PyTorch under `torch.compile`, which ops should beat.
COMPILED = ("compiled", "expand-compiled", "expand-max-autotune")

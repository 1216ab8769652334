"""Search for the fastest tiles of kernels on a device."""

"""Which tiles of kernels are the fastest on a device."""

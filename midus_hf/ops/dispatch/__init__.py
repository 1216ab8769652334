"""What ops share: the choice between their bodies, how these are called, tiles of kernels and the library of compiled C."""

"""Kernels compiled for GPUs that are not here: what is compiled is what would have been launched."""

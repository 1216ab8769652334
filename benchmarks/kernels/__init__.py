"""Kernels compiled for GPUs that this machine lacks, with the arguments of the launches that ops would make."""

"""The library of ops in C, for float32 and bfloat16 on a CPU: building it from the C files of all ops, loading and calling it."""

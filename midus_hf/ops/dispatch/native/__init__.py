"""The library of ops in C, for float32 and bfloat16 on a CPU: how it is built from the C files of all ops, loaded, and called."""

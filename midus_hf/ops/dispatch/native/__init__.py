"""Bodies of ops in C, for float32 and bfloat16 on a CPU: their sources, the library that is built of these, and its callers."""

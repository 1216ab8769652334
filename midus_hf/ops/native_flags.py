"""How compiled ops are made, for the first use of them and for wheels, whose build imports no more than this file."""

PARTS = {
    "native_base_c": "BASE",
    "native_products_c": "PRODUCTS",
    "native_lookup_c": "LOOKUP",
    "native_gradients_c": "GRADIENTS",
    "native_sums_c": "SUMS",
    "native_depth_c": "DEPTH",
}
"""Modules that hold the source, and its name in each; in this order they are one file of C."""

FLAGS = (
    "-std=gnu11",
    "-O3",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
)

VARIANTS = {
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
    "avx2": ("-mavx2", "-mfma"),
    "baseline": (),
}
"""Further flags by set of instructions; processors other than x86-64 have the baseline alone."""

X86 = ("x86_64", "amd64")
"""What x86-64 is called, in small letters."""

COMPILERS = ("cc", "gcc", "clang")
"""Looked for in this order where `CC` names none."""

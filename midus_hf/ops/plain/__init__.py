"""The ops as a checkpoint's own code has them, in PyTorch alone: the contract of all other bodies.

`midus_hf.carried` writes the functions of these modules in the place of the ops that have the same names.
"""

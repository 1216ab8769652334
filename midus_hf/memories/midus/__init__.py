"""Memories of MIDUS: head-wise memory, and linear and product-key memory, which it is compared to."""

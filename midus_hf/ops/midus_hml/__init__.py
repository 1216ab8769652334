"""Head-wise memory: product keys, values and transforms per head (MIDUS, equations 11 to 17)."""

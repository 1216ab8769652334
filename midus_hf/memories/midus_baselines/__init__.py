"""Linear and product-key memory, the baselines of MIDUS."""

"""Head-wise memory (HML) of MIDUS."""

"""Head-wise memory (HML), MIDUS's own."""

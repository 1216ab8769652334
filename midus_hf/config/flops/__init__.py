"""How many floating-point operations a model needs, by the counting rules of Mixture of Chapters (appendix A.2)."""

"""Count the floating-point operations of a model by the rules of Mixture of Chapters (appendix A.2)."""

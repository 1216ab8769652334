"""Measures of a model: perplexity on a text, and accuracy on the tasks of lm-evaluation-harness."""

from midus_hf.evaluation.perplexity import PerplexityResult, perplexity

__all__ = ["PerplexityResult", "perplexity"]

"""Measures of a model: perplexity on a text, and accuracy on the tasks of lm-evaluation-harness."""

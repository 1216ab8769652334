"""Numerical work of methods that compute new layers: optimal transport, shared bases, and a predictor of layers."""

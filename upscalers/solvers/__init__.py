"""Numerical work of methods that compute new layers: optimal transport and a predictor of layers."""

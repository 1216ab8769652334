"""Numerical work behind methods that compute new layers: optimal transport, and a predictor of layers."""

"""Runs of upscale, strip and inspect, and the verification of their results."""

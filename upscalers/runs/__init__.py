"""The verbs: upscale, strip, inspect, and how their results are verified."""

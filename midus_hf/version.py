"""The version of both packages, and of what they were tried with."""

__version__ = "0.1.0"

#: The newest minor version of Transformers that the tests have run with.
NEWEST_TRIED_TRANSFORMERS = "5.24"

"""Names that rows of models go by, for reports that do without PyTorch as well."""

SUBJECT = (
    "base",
    "method",
    "placement",
    "dtype",
    "phase",
    "decoding",
    "batch",
    "accumulation",
    "length",
    "new_tokens",
)
"""What is measured once a round, by its columns."""

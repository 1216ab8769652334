"""Sizes and dtypes that ops on gathered rows are tested with."""

import torch

SIZES = {
    "one": (1, 1, 1, 1),
    "small": (30, 12, 9, 20),
    "wider-than-a-stretch": (13, 37, 50, 300),
    "few-rows": (200, 4, 3, 16),
}
"""Tokens, slots of each, rows of the bank and their width."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

"""Supervised fine-tuning: rows of instruction data become chats, and TRL trains on them. Requires TRL."""

from midus_hf.training.sft.arguments import SftArguments
from midus_hf.training.sft.run import finetune

__all__ = ["SftArguments", "finetune"]

"""Supervised fine-tuning: rows of instruction data become chats, chats become tokens with labels, and TRL trains on them."""

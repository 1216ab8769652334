"""Supervised fine-tuning on chats."""

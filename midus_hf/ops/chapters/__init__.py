"""Attention to the chapters that were chosen for tokens (Mixture of Chapters)."""

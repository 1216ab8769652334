"""Attention from tokens to the chapters that are chosen for them (Mixture of Chapters)."""

"""Attention of tokens to extra keys and to keys in the blocks of a cache, in one softmax."""

"""Usage of slots by memories and of blocks by texts, and the tokens that slots stand for."""

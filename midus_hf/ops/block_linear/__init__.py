"""Products of each row of a batch with the row's block of weights."""

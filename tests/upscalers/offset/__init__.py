"""A made-up memory with a bank: a vector in a file next to the weights, which is added after a layer."""

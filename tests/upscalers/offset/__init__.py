"""A made-up memory with a bank: a vector in a file beside the weights, which is added behind a layer."""

"""Floating-point operations (FLOPs) of operations, by the rules of Mixture of Chapters (appendix A.2).

A multiplication and an addition count one each, so a matrix product counts two per weight. An elementwise operation has
a fixed number of FLOPs per element. Where the paper gives none, the number in the paper's code counts. Memory traffic,
dropout and the optimizer are not counted.
"""

import math

# FLOPs of a softmax per number, and of cross entropy.
SOFTMAX = 5

# FLOPs of masking and scaling attention scores, per score.
MASK_AND_SCALE = 2

# FLOPs of a sigmoid or a tanh, per number.
SIGMOID = TANH = 4

# FLOPs of activations per number, by their name in configs.
ACTIVATIONS = {"silu": 4, "swish": 4, "gelu": 8, "gelu_new": 8, "gelu_pytorch_tanh": 8, "relu": 1}


def linear(rows: int, inputs: int, outputs: int, bias: bool = False) -> int:
    """Return the FLOPs of a linear map of `rows` vectors: a product of `[rows, inputs]` with `[inputs, outputs]`."""
    return 2 * rows * inputs * outputs + (rows * outputs if bias else 0)


def attention_products(batch: int, queries: int, keys: int, width: int) -> int:
    """Return the FLOPs of the attention scores and the weighted sums of values, for all heads together.

    Args:
        batch: B, sequences in the batch.
        queries: Number of queries per sequence.
        keys: Number of keys that each query is compared with, masked keys included.
        width: Width of all heads together.
    """
    return 4 * batch * queries * keys * width


def attention_weights(batch: int, heads: int, queries: int, keys: int) -> int:
    """Return the FLOPs of the softmax, mask and scale of all attention scores.

    Args:
        batch: B, sequences in the batch.
        heads: Number of query heads.
        queries: Number of queries per sequence.
        keys: Number of keys that each query is compared with, masked keys included.
    """
    return batch * heads * queries * keys * (SOFTMAX + MASK_AND_SCALE)


def rms_norm(rows: int, width: int) -> int:
    """Return the FLOPs of an RMSNorm of `rows` vectors."""
    return rows * (4 * width + 4)


def layer_norm(rows: int, width: int) -> int:
    """Return the FLOPs of a norm that also subtracts the mean, over features or over a batch."""
    return rows * (8 * width + 8)


def rotary_embedding(rows: int, query_width: int, key_width: int) -> int:
    """Return the FLOPs of the rotation of queries and keys."""
    return 3 * rows * (query_width + key_width)


def top_k(rows: int, candidates: int, k: int) -> int:
    """Return the FLOPs of the choice of the k largest candidates of each row."""
    return rows * candidates * max(1, math.ceil(math.log2(k)))


def cross_entropy(batch: int, tokens: int, vocabulary: int) -> int:
    """Return the FLOPs of the loss of predicting every token of a sequence but the first."""
    return batch * (tokens - 1) * vocabulary * SOFTMAX


def router_losses(choices: int, candidates: int, k: int) -> int:
    """Return the FLOPs of a router's losses as the paper's code counts them; the paper states no formula.

    For s choices among c candidates, the load-balance loss takes s c (k - 1) + c (s - 1) + c operations for the
    frequencies of candidates, c (s - 1) + c for mean probabilities and 2 c for their product. The mean of squared
    probabilities takes s c + c (s - 1) + c, its distance from an even distribution 3 c, the z-loss 5 s c + 2 s, the
    entropy 4 s c. Squares and entropy count, although neither adds to the loss.
    """
    sums = candidates * choices
    load_balance = sums * (k - 1) + sums + sums + 2 * candidates
    squares = 2 * sums + 3 * candidates
    z_loss, entropy = 5 * sums + 2 * choices, 4 * sums
    return load_balance + squares + z_loss + entropy

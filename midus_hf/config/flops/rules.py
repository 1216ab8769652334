"""What single operations cost, in floating-point operations (FLOPs): the rules of Mixture of Chapters, appendix A.2.

A multiplication and an addition count one each, so a matrix product counts two per weight. What is elementwise has a fixed price per
number; what the paper has no price for has that of its release. Memory traffic, dropout and the optimizer are not counted.
"""

import math

SOFTMAX = 5
"""Of a softmax, per number; cross entropy has the same price."""

MASK_AND_SCALE = 2
"""Of masking and scaling attention scores, per score."""

SIGMOID = TANH = 4
"""Per number."""

ACTIVATIONS = {"silu": 4, "swish": 4, "gelu": 8, "gelu_new": 8, "gelu_pytorch_tanh": 8, "relu": 1}
"""Of activations, per number, by the name that configs have for them."""


def linear(rows: int, inputs: int, outputs: int, bias: bool = False) -> int:
    """A linear map of vectors, or any product of `[rows, inputs]` with `[inputs, outputs]`."""
    return 2 * rows * inputs * outputs + (rows * outputs if bias else 0)


def attention_products(batch: int, queries: int, keys: int, width: int) -> int:
    """Scores, and the sum of values weighed by them, of all heads together.

    Args:
        batch: B.
        queries: Per sequence.
        keys: That each query is compared with. Those that a mask hides count too.
        width: Of all heads together.
    """
    return 4 * batch * queries * keys * width


def attention_weights(batch: int, heads: int, queries: int, keys: int) -> int:
    """Softmax, mask and scale of attention scores; arguments as in `attention_products`."""
    return batch * heads * queries * keys * (SOFTMAX + MASK_AND_SCALE)


def rms_norm(rows: int, width: int) -> int:
    """An RMSNorm of vectors."""
    return rows * (4 * width + 4)


def layer_norm(rows: int, width: int) -> int:
    """A norm that takes the mean away as well, over features or over a batch."""
    return rows * (8 * width + 8)


def rotary_embedding(rows: int, query_width: int, key_width: int) -> int:
    """The rotation of queries and keys."""
    return 3 * rows * (query_width + key_width)


def top_k(rows: int, candidates: int, k: int) -> int:
    """The choice of the k largest of each row."""
    return rows * candidates * max(1, math.ceil(math.log2(k)))


def cross_entropy(batch: int, tokens: int, vocabulary: int) -> int:
    """The loss of predicting every token of a sequence but the first."""
    return batch * (tokens - 1) * vocabulary * SOFTMAX


def router_losses(choices: int, candidates: int, k: int) -> int:
    """The losses of a router, as the paper's code counts them, which states no formula for it.

    With s choices among c candidates: the load-balance loss takes s c (k - 1) + c (s - 1) + c operations for how often each is
    chosen, c (s - 1) + c for mean probabilities and 2 c for their product; the mean of squared probabilities and its distance from
    an even one s c + c (s - 1) + c and 3 c; the z-loss 5 s c + 2 s; the entropy 4 s c. Squares and
    entropy are counted though neither adds to the loss.
    """
    sums = candidates * choices
    load_balance = sums * (k - 1) + sums + sums + 2 * candidates
    squares = 2 * sums + 3 * candidates
    z_loss, entropy = 5 * sums + 2 * choices, 4 * sums
    return load_balance + squares + z_loss + entropy

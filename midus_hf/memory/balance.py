"""Loss that is small when a memory's queries spread over all of the memory's keys."""

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from midus_hf.memory.protocols import ScoresSubKeys

# Number of scores held at a time: 64 MB in float32.
_MOST_SCORES = 1 << 24


def balance_loss(
    memory: ScoresSubKeys,
    attention_output: torch.Tensor,
    mean_over_processes: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the balance loss of the sub-keys that tokens select, Switch Transformer's (Fedus et al. 2021, equation 4).

    For every head and side, the loss is `n * sum_i f_i P_i`. Every token selects its k best sub-keys, and `f_i` is the share of
    all selections that fall on sub-key `i`, a constant. `P_i` is the mean over tokens of the softmax of the side's scores over
    the temperature. The result is the mean over heads and sides: 1 if selections or probabilities are uniform, up to `n / k`
    if all tokens select the same sub-keys. A memory with one key per slot has one side with N sub-keys, its slots.

    Scores of all sub-keys are computed for a limited number of tokens at a time, and once more in the backward pass.

    Args:
        memory: Memory whose keys are selected. The statistics of its batch norm are not updated.
        attention_output: `[B, T, W]`, the input of the memory; every token counts, so leave padding out.
        mean_over_processes: Function that returns the mean of a tensor over the processes that share the batch; every process calls
            it. Default: none, one process has the whole batch.

    Returns:
        A scalar, float32 (float64 for a float64 memory), differentiable in the keys and in `attention_output`. With several
        processes, the mean of their losses is the loss of the whole batch, and the mean of their gradients is the gradient of this
        loss: f_i counts all tokens; P_i is a process's sum over its tokens, divided by the mean number of tokens per process.
    """
    query = memory.queries(attention_output, track_statistics=False).flatten(0, -3)  # [S, H, query_width]
    tokens, heads, _ = query.shape
    sub_keys = sum(scores.shape[-1] for scores in memory.sub_key_scores(query[:0]))
    stretch = max(1, _MOST_SCORES // (heads * sub_keys))
    totals: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    for part in query.split(stretch):
        sums = checkpoint(_side_sums, memory, part, use_reentrant=False, preserve_rng_state=False)
        totals = sums if totals is None else [(p + q, f + g) for (p, f), (q, g) in zip(totals, sums, strict=True)]
    assert totals is not None
    selections = [of_side for _, of_side in totals]
    mean_tokens: torch.Tensor | int = tokens
    if mean_over_processes is not None:
        *selections, mean_tokens = _means([*selections, selections[0].new_tensor(tokens)], mean_over_processes)
    losses = [
        probabilities.shape[-1] * ((chosen / (mean_tokens * memory.k)) * (probabilities / mean_tokens)).sum(-1).mean()
        for (probabilities, _), chosen in zip(totals, selections, strict=True)
    ]
    return torch.stack(losses).mean()


def _means(
    tensors: list[torch.Tensor], mean_over_processes: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Return the mean of each tensor over the processes, communicated in one message."""
    means = mean_over_processes(torch.cat([tensor.flatten() for tensor in tensors]))
    parts = means.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _side_sums(memory: ScoresSubKeys, query: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each side, over the tokens of `query` `[S, H, query_width]`, the summed probabilities `[H, n]` and
    how often each sub-key is among a token's k best `[H, n]`."""
    sums = []
    for scores in memory.sub_key_scores(query):  # [S, H, n]
        probabilities = memory.weigh(scores).sum(0)
        with torch.no_grad():
            chosen = scores.topk(memory.k, dim=-1).indices.transpose(0, 1).flatten(1)  # [H, S * k]
            ones = scores.new_ones(()).expand_as(chosen)
            sums.append((probabilities, torch.zeros_like(probabilities).scatter_add_(1, chosen, ones)))
    return sums

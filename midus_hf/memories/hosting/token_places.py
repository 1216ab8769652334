"""Padding among the tokens of a forward pass, and the beginnings of documents."""

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class TokenPlaces:
    """Padding and documents among the tokens of a forward pass.

    Args:
        real: `[B, T]`, bool, false for padding. Default: no token is padding.
        starts: `[B, T]`, bool, true if a document begins here behind another document of the row. Default: every row is one document.
    """

    real: torch.Tensor | None = None
    starts: torch.Tensor | None = None

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> "TokenPlaces":
        """Return the padding and documents on another device."""
        both = (self.real, self.starts)
        return TokenPlaces(*(None if each is None else each.to(device, non_blocking=non_blocking) for each in both))


def token_places(
    token_mask: torch.Tensor | dict[str, torch.Tensor] | None,
    position_ids: torch.Tensor | None,
    num_tokens: int,
    *,
    may_hold_documents: bool,
) -> TokenPlaces:
    """Find padding and documents among the tokens of a pass.

    Args:
        token_mask: `[B, S]`, S >= T, zero for padding; the last T columns are this pass's. Or a mask between pairs of tokens,
            `[B, 1, T, T]`, in which padding is hidden from itself; of several masks by name, the first is used. None: no padding.
        position_ids: `[B, T]`, positions that the model was called with, or None.
        num_tokens: T, number of tokens of the pass.
        may_hold_documents: Whether a position of zero begins a document, as it does without a mask and without a cache.
    """
    real = starts = None
    mask = next(iter(token_mask.values())) if isinstance(token_mask, dict) else token_mask
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        may_hold_documents = False
        real = mask[:, mask.shape[1] - num_tokens :] != 0
    elif isinstance(mask, torch.Tensor) and mask.shape[-2:] == (num_tokens, num_tokens):
        seen = mask[:, 0].diagonal(dim1=-2, dim2=-1)  # [B, T]
        real = seen > torch.finfo(seen.dtype).min / 2 if seen.is_floating_point() else seen != 0
    if may_hold_documents and num_tokens > 1 and position_ids is not None and position_ids.dim() == 2:
        starts = position_ids == 0
        starts = torch.cat(
            [torch.zeros_like(starts[:, :1]), starts[:, 1:]], dim=1
        )  # the first token begins the row anyway
    if real is None and starts is None:
        return TokenPlaces()
    if real is not None and starts is not None:
        starts = starts & real & real.roll(1, dims=1)  # the first token behind padding begins the row
    if torch.compiler.is_compiling() or num_tokens == 1:
        return TokenPlaces(real, starts)  # a graph cannot branch on what tensors hold; a decoding step need not wait
    holds_documents, is_padded = starts is not None and bool(starts.any()), real is not None and not bool(real.all())
    return TokenPlaces(real if is_padded else None, starts if holds_documents else None)

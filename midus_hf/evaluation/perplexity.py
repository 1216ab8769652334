"""Perplexity of a language model on a text."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.evaluation.fetching import PathFinder
from midus_hf.saved_models import check_ids

DEFAULT_SEQUENCE_LENGTH = 1024
DOCUMENT_SEPARATOR = "\n\n"


@dataclasses.dataclass(frozen=True)
class PerplexityResult:
    """Measures of how well a model predicts a text.

    Args:
        perplexity: `exp` of the mean negative log-likelihood per token. Comparable between models of one tokenizer.
        bits_per_byte: Negative log2-likelihood per byte of UTF-8. Comparable between tokenizers.
        bits_per_character: Negative log2-likelihood per character.
        tokens: Number of predicted tokens.
        sequence_length: Greatest number of tokens per window.
        stride: Number of tokens predicted per window.
        seconds: Wall time of the forward passes.
        tokens_per_second: Number of tokens fed to the model per second.
    """

    perplexity: float
    bits_per_byte: float
    bits_per_character: float
    tokens: int
    sequence_length: int
    stride: int
    seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class _Window:
    """A window of targets `[start, end)`, of which targets from `first` on are counted.

    `document` is the number of the window's document if documents are kept apart.
    """

    start: int
    first: int
    end: int
    document: int = 0


@dataclasses.dataclass(frozen=True)
class PreparedText:
    """A text that `prepare_text` has prepared for `measure`.

    Args:
        lead: For each target, the first input of a window that begins there, `[N]`: the token before the target, or BOS.
        targets: Tokens to predict, `[N]`.
        characters: Number of characters that each target covers, `[N]`.
        utf8_bytes: Number of bytes of UTF-8 that each target covers, `[N]`.
        windows: Windows of targets, each an input of the model.
        sequence_length: Greatest number of tokens per window.
        stride: Number of tokens predicted per window.
        documents: Documents that the windows belong to, if documents are kept apart. Default: documents are laid end to end.
    """

    lead: torch.Tensor
    targets: torch.Tensor
    characters: torch.Tensor
    utf8_bytes: torch.Tensor
    windows: list[_Window]
    sequence_length: int
    stride: int
    documents: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are predicted."""
        return sum(window.end - window.first for window in self.windows)


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 4,
    device: str | torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
    apart: bool = False,
    find_paths: PathFinder | None = None,
) -> PerplexityResult:
    """Measure the perplexity of a model on documents.

    Documents are tokenized one by one without special tokens, and laid end to end with a blank line between them. The model is
    given windows of this text and predicts every token once, from at most `sequence_length` tokens before it. If the tokenizer
    writes a BOS token by itself (Llama, Gemma), each window begins with the BOS token. If it does not (Qwen, SmolLM), a window
    begins with the token before the window, and the very first token is not predicted. Log-likelihoods are computed in float32
    or better and summed in float64. The result is the same on every run.

    Args:
        model: A causal language model. It is in eval mode during the measurement.
        tokenizer: A fast tokenizer, which knows the offsets of each token in the text.
        documents: Documents with at least `sequence_length` tokens to predict together; with `apart`, one token is enough.
        sequence_length: Tokens per window. Default: 1024, or the longest that the model was made for if that is shorter.
        stride: Tokens predicted per window; the rest of the window is context. Default: `sequence_length`, no overlap.
        max_tokens: Greatest number of tokens to predict, in whole windows spread evenly over the text. Default: all.
        batch_size: Windows per forward pass. It changes only speed, memory, and the last bits of floats. Default: 4.
        device: Device that the model is moved to first. Default: the model stays where it is.
        progress: Called with the number of tokens predicted so far and the total number. Default: none.
        apart: Whether documents are kept apart: windows end where a document ends, and the next document is predicted without
            it. Default: False.
        find_paths: Function that finds the path of each whole document, by which all windows of the document fetch blocks. It
            needs `apart`. Default: nothing is fetched.

    Raises:
        ValueError: If an option is out of range, if the text is too short or has an id that the model does not embed, or if the
            tokenizer is not a fast one.
        RuntimeError: If the perplexity is not finite.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1.")
    text = prepare_text(
        tokenizer,
        documents,
        model.config,
        sequence_length=sequence_length,
        stride=stride,
        max_tokens=max_tokens,
        apart=apart,
    )
    if device is not None:
        model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the argument
    return measure(model, text, batch_size=batch_size, progress=progress, find_paths=find_paths)


def prepare_text(
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[str],
    config: PreTrainedConfig,
    *,
    sequence_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    apart: bool = False,
) -> PreparedText:
    """Tokenize documents and lay out windows as `perplexity` does, so that they can be measured more than once.

    Arguments that are not listed mean the same as in `perplexity`.

    Args:
        config: Config of the models that will be measured.

    Raises:
        ValueError: If an option is out of range, if the text is too short, or if the tokenizer is not a fast one.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if sequence_length is None:
        sequence_length = min(DEFAULT_SEQUENCE_LENGTH, limit or DEFAULT_SEQUENCE_LENGTH)
    stride = sequence_length if stride is None else stride
    _check_options(sequence_length, stride, max_tokens, limit)

    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer is a {type(tokenizer).__name__}; expected a fast one, with offsets.")
    texts, bos = list(documents), automatic_bos(tokenizer)
    parts: list[tuple[torch.Tensor, ...]] = []
    windows: list[_Window] = []
    begin = 0
    for number, part in enumerate([[text] for text in texts] if apart else [texts]):
        parts.append(_predicted(tokenizer, part, bos))
        length = len(parts[-1][1])
        windows += [
            _Window(begin + window.start, begin + window.first, begin + window.end, number)
            for window in _windows(length, sequence_length, stride)
        ]
        begin += length
    if apart and not begin:
        raise ValueError(
            "the text has no tokens to predict; expected documents of two tokens or more. Give more text."
        )
    if not apart and begin < sequence_length:
        raise ValueError(
            f"the text has {begin} tokens to predict; expected at least sequence_length = {sequence_length}, a window. "
            "Give more text; midus eval has --sequence-length for shorter windows."
        )
    windows = _spread(windows, stride, max_tokens)
    if apart:  # equal windows share batches
        windows.sort(key=lambda window: window.end - window.start)
    lead, targets, characters, utf8_bytes = (torch.cat(columns) for columns in zip(*parts, strict=True))
    kept_apart = tuple(texts) if apart else ()
    return PreparedText(lead, targets, characters, utf8_bytes, windows, sequence_length, stride, kept_apart)


def measure(
    model: PreTrainedModel,
    text: PreparedText,
    *,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
    find_paths: PathFinder | None = None,
) -> PerplexityResult:
    """Measure the perplexity of a model on a prepared text.

    Arguments that are not listed mean the same as in `perplexity`.

    Args:
        text: Text, as `prepare_text` returns it. With `find_paths`, the text must be prepared with `apart`.

    Raises:
        ValueError: If the text has an id that the model does not embed.
        RuntimeError: If the perplexity is not finite.
    """
    check_ids(int(max(text.lead.max(), text.targets.max())), model.config.get_text_config().vocab_size)
    assert find_paths is None or text.documents, "documents that are laid end to end have no path of their own"
    paths = None if find_paths is None else find_paths(text.documents)
    lead, targets, windows, num_tokens = text.lead, text.targets, text.windows, text.num_tokens
    was_training = model.training
    model.eval()
    loss = torch.zeros((), dtype=torch.float64)
    num_predicted = num_fed = 0
    started = time.perf_counter()
    try:
        for batch in _batches(windows, batch_size):
            inputs = torch.stack([torch.cat([lead[w.start, None], targets[w.start : w.end - 1]]) for w in batch])
            with torch.no_grad():
                ids = {} if paths is None else {"memory_ids": paths[[window.document for window in batch]]}
                output = model(input_ids=inputs.to(model.device), use_cache=False, **ids)
                logits = output.logits  # [B, T, vocabulary]
                logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            for window, window_logits in zip(batch, logits, strict=True):
                counted = targets[window.first : window.end].to(logits.device)
                losses = F.cross_entropy(window_logits[window.first - window.start :], counted, reduction="none")
                loss += losses.double().sum().cpu()
                num_predicted += len(counted)
            num_fed += inputs.numel()
            if progress is not None:
                progress(num_predicted, num_tokens)
    finally:
        model.train(was_training)
    seconds = time.perf_counter() - started

    value = (loss / num_tokens).exp().item()
    if not math.isfinite(value):
        raise RuntimeError(f"the perplexity is {value}; expected a finite number. The model's weights are broken.")
    bits = loss.item() / math.log(2)
    return PerplexityResult(
        perplexity=value,
        bits_per_byte=bits / sum(int(text.utf8_bytes[w.first : w.end].sum()) for w in windows),
        bits_per_character=bits / sum(int(text.characters[w.first : w.end].sum()) for w in windows),
        tokens=num_tokens,
        sequence_length=text.sequence_length,
        stride=text.stride,
        seconds=seconds,
        tokens_per_second=num_fed / seconds,
    )


def _check_options(sequence_length: int, stride: int, max_tokens: int | None, limit: int | None) -> None:
    if sequence_length < 1:
        raise ValueError(f"sequence_length is {sequence_length}; expected at least 1.")
    if limit is not None and sequence_length > limit:
        raise ValueError(f"sequence_length is {sequence_length}; the model was made for at most {limit} tokens.")
    if not 1 <= stride <= sequence_length:
        raise ValueError(f"stride is {stride}; expected 1 <= stride <= sequence_length = {sequence_length}.")
    if max_tokens is not None and max_tokens < stride:
        raise ValueError(
            f"max_tokens is {max_tokens}; expected at least one window of {stride} tokens, or a smaller sequence_length."
        )


def automatic_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the id of the BOS token if the tokenizer puts this token before a text by itself, else None."""
    first = tokenizer("a").input_ids[:1]  # empty if the vocabulary has no token for the letter
    return first[0] if first and first[0] == tokenizer.bos_token_id else None


def _tokenize(
    tokenizer: PreTrainedTokenizerBase, documents: list[str]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, and the numbers of characters and bytes that each covers; all tokens together cover the text."""
    ids: list[int] = []
    characters: list[int] = []
    utf8_bytes: list[int] = []
    for number, document in enumerate(documents, start=1):
        text = document if number == len(documents) else document + DOCUMENT_SEPARATOR
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if not encoded.input_ids:
            continue
        ids += encoded.input_ids
        # A token covers the text from the end of the token before it to its own end; the last token covers the rest.
        ends = [end for _, end in encoded.offset_mapping]
        ends[-1] = len(text)
        bytes_before: Sequence[int] = range(len(text) + 1)
        if not text.isascii():
            bytes_before = [0, *itertools.accumulate(len(character.encode()) for character in text)]
        for start, end in zip([0, *ends], ends, strict=False):
            characters.append(end - start)
            utf8_bytes.append(bytes_before[end] - bytes_before[start])
    return torch.tensor(ids), torch.tensor(characters), torch.tensor(utf8_bytes)


def _predicted(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], bos: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields `lead`, `targets`, `characters` and `utf8_bytes` of documents that are laid end to end."""
    ids, characters, utf8_bytes = _tokenize(tokenizer, documents)
    if bos is None:
        return ids[:-1], ids[1:], characters[1:], utf8_bytes[1:]
    return torch.full_like(ids, bos), ids, characters, utf8_bytes


def _windows(num_targets: int, sequence_length: int, stride: int) -> list[_Window]:
    return [
        _Window(max(0, first + stride - sequence_length), first, min(first + stride, num_targets))
        for first in range(0, num_targets, stride)
    ]


def _spread(windows: list[_Window], stride: int, max_tokens: int | None) -> list[_Window]:
    """Return the windows that `max_tokens` allows, spread evenly over all windows."""
    kept = len(windows) if max_tokens is None else min(len(windows), max_tokens // stride)
    return [windows[index * len(windows) // kept] for index in range(kept)]


def _batches(windows: list[_Window], batch_size: int) -> Iterable[list[_Window]]:
    """Yield batches of consecutive windows of equal length, so that no padding is needed."""
    for _, group in itertools.groupby(windows, key=lambda window: window.end - window.start):
        same_length = list(group)
        for begin in range(0, len(same_length), batch_size):
            yield same_length[begin : begin + batch_size]

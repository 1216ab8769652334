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
    """How well a model predicts a text.

    Args:
        perplexity: `exp` of the mean negative log-likelihood per token. Comparable between models of one tokenizer.
        bits_per_byte: Negative log2-likelihood per byte of UTF-8. Comparable between tokenizers.
        bits_per_character: The same per character.
        tokens: Predicted tokens.
        sequence_length: Longest input of the model, in tokens.
        stride: Tokens predicted per window.
        seconds: Wall time of the forward passes.
        tokens_per_second: Tokens fed to the model per second.
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
class _Text:
    """A text as tokens, and what each token covers of it: the counts sum up to the whole text."""

    ids: torch.Tensor  # [N]
    characters: torch.Tensor  # [N]
    bytes: torch.Tensor  # [N]


@dataclasses.dataclass(frozen=True)
class _Window:
    """Targets `[start, end)` are given to the model; those from `first` on are counted. It is of one document, if they are apart."""

    start: int
    first: int
    end: int
    document: int = 0


@dataclasses.dataclass(frozen=True)
class PreparedText:
    """A text as `measure` takes it, made by `prepare_text`.

    Args:
        lead: Token before each target, `[N]`.
        targets: Tokens to predict, `[N]`.
        characters: Characters that each target covers, `[N]`.
        utf8_bytes: Bytes of UTF-8 that each target covers, `[N]`.
        windows: What is given to the model at a time.
        sequence_length: As in `perplexity`.
        stride: As in `perplexity`.
        documents: The documents that windows are of, where each has windows of its own. Default: they are laid end to end.
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
        """Tokens that are predicted."""
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

    The documents are tokenized one by one without special tokens, each followed by a blank line, and laid end to end.
    Windows of the result are given to the model, and every token is predicted once, from at most `sequence_length`
    tokens before it. A window begins with the tokenizer's BOS token if the tokenizer writes one by itself (Llama,
    Gemma); if it does not (Qwen, SmolLM), with the token before the window, and the first token of all is not
    predicted. Log-likelihoods are computed in float32 or better and summed in float64. The result is the same on
    every run.

    Args:
        model: Put in eval mode for the while.
        tokenizer: A fast one, which knows the place of each token in the text.
        documents: At least `sequence_length` tokens together.
        sequence_length: Tokens of a window. Default: 1024, or the longest the model was made for if that is shorter.
        stride: Tokens predicted per window; the rest of the window is context. Default: `sequence_length`, no overlap.
        max_tokens: Predict at most so many tokens, in whole windows spread evenly over the text. Default: all.
        batch_size: Windows per forward pass. It changes nothing but speed, memory, and the last bits of a float.
        device: Where to move the model first. Default: where it is.
        progress: Called with the number of tokens predicted so far, and of all.
        apart: Whether windows end where a document ends, and the next one is predicted without it. Default: false.
        find_paths: By the path of the whole document each window of it fetches blocks; needs `apart`. Default: nothing is
            fetched.

    Returns:
        The measures.

    Raises:
        ValueError: If an option is out of range, the text is too short or has an id that the model does not embed, or the tokenizer
            is not a fast one.
        RuntimeError: If the likelihood of the text is not a finite number.
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

    Args:
        tokenizer: As in `perplexity`.
        documents: As in `perplexity`.
        config: Of the models that will be measured.
        sequence_length: As in `perplexity`.
        stride: As in `perplexity`.
        max_tokens: As in `perplexity`.
        apart: As in `perplexity`. Default: false.

    Raises:
        ValueError: As `perplexity`.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if sequence_length is None:
        sequence_length = min(DEFAULT_SEQUENCE_LENGTH, limit or DEFAULT_SEQUENCE_LENGTH)
    stride = sequence_length if stride is None else stride
    _check_options(sequence_length, stride, max_tokens, limit)

    if apart:
        return _prepare_apart(tokenizer, list(documents), sequence_length, stride, max_tokens)
    text = _tokenize(tokenizer, documents)
    bos = automatic_bos(tokenizer)
    if bos is None:
        targets = text.ids[1:]
        lead = text.ids  # the token before target i is token i
        characters, utf8_bytes = text.characters[1:], text.bytes[1:]
    else:
        targets = text.ids
        lead = torch.full_like(text.ids, bos)
        characters, utf8_bytes = text.characters, text.bytes
    if len(targets) < sequence_length:
        raise ValueError(
            f"the text has {len(targets)} tokens to predict; expected at least sequence_length = {sequence_length}, a window. "
            "Give more text; midus eval has --sequence-length for shorter windows."
        )
    windows = _spread(_windows(len(targets), sequence_length, stride), stride, max_tokens)
    return PreparedText(lead, targets, characters, utf8_bytes, windows, sequence_length, stride)


def measure(
    model: PreTrainedModel,
    text: PreparedText,
    *,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
    find_paths: PathFinder | None = None,
) -> PerplexityResult:
    """Measure the perplexity of a model on a text that is laid out already.

    Args:
        model: As in `perplexity`.
        text: From `prepare_text`.
        batch_size: As in `perplexity`.
        progress: As in `perplexity`.
        find_paths: As in `perplexity`, of a text that was prepared apart. Default: nothing is fetched.

    Raises:
        ValueError: If the text has an id that the model does not embed.
        RuntimeError: If the likelihood of the text is not a finite number.
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
        raise ValueError(f"max_tokens is {max_tokens}; expected at least one window of {stride} tokens.")


def automatic_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that the tokenizer puts before a text by itself, if it is the BOS token."""
    first = tokenizer("a").input_ids[:1]  # empty where the vocabulary has nothing for the letter
    return first[0] if first and first[0] == tokenizer.bos_token_id else None


def _tokenize(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str]) -> _Text:
    if not tokenizer.is_fast:
        raise ValueError(f"the tokenizer is a {type(tokenizer).__name__}; expected a fast one, with offsets.")
    ids: list[int] = []
    characters: list[int] = []
    utf8_bytes: list[int] = []
    documents = list(documents)
    for number, document in enumerate(documents, start=1):
        text = document if number == len(documents) else document + DOCUMENT_SEPARATOR
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        if not encoded.input_ids:
            continue
        ids += encoded.input_ids
        # A token reaches from the end of the one before it to its own end, and the last one to the end of the text.
        ends = [end for _, end in encoded.offset_mapping]
        ends[-1] = len(text)
        bytes_before: Sequence[int] = range(len(text) + 1)
        if not text.isascii():
            bytes_before = [0, *itertools.accumulate(len(character.encode()) for character in text)]
        for start, end in zip([0, *ends], ends, strict=False):
            characters.append(end - start)
            utf8_bytes.append(bytes_before[end] - bytes_before[start])
    return _Text(torch.tensor(ids), torch.tensor(characters), torch.tensor(utf8_bytes))


def _prepare_apart(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], sequence_length: int, stride: int, max_tokens: int | None
) -> PreparedText:
    """As `prepare_text`, with windows of each document alone; windows of equal length follow one another."""
    bos = automatic_bos(tokenizer)
    parts: list[tuple[torch.Tensor, ...]] = []
    windows: list[_Window] = []
    begin = 0
    for number, document in enumerate(documents):
        text = _tokenize(tokenizer, [document])
        if bos is None:
            part = (text.ids[:-1], text.ids[1:], text.characters[1:], text.bytes[1:])
        else:
            part = (torch.full_like(text.ids, bos), text.ids, text.characters, text.bytes)
        parts.append(part)
        windows += [
            _Window(begin + window.start, begin + window.first, begin + window.end, number)
            for window in _windows(len(part[1]), sequence_length, stride)
        ]
        begin += len(part[1])
    if not begin:
        raise ValueError(
            "the text has no tokens to predict; expected documents of two tokens or more. Give more text."
        )
    kept = sorted(_spread(windows, stride, max_tokens), key=lambda window: window.end - window.start)
    lead, targets, characters, utf8_bytes = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return PreparedText(lead, targets, characters, utf8_bytes, kept, sequence_length, stride, tuple(documents))


def _windows(num_targets: int, sequence_length: int, stride: int) -> list[_Window]:
    return [
        _Window(max(0, first + stride - sequence_length), first, min(first + stride, num_targets))
        for first in range(0, num_targets, stride)
    ]


def _spread(windows: list[_Window], stride: int, max_tokens: int | None) -> list[_Window]:
    """As many windows as there may be tokens, spread evenly over all."""
    kept = len(windows) if max_tokens is None else min(len(windows), max_tokens // stride)
    return [windows[index * len(windows) // kept] for index in range(kept)]


def _batches(windows: list[_Window], batch_size: int) -> Iterable[list[_Window]]:
    """Batches of consecutive windows of one length, so that no padding is needed."""
    for _, group in itertools.groupby(windows, key=lambda window: window.end - window.start):
        same_length = list(group)
        for begin in range(0, len(same_length), batch_size):
            yield same_length[begin : begin + batch_size]

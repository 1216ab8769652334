"""Tiny models of a token per byte, their tokenizer, and their perplexity."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from midus_hf.evaluation.text_rows import row_losses, text_rows
from upscalers.runs.upscale import upscale

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
VOCABULARY_SIZE = len(SPECIAL_TOKENS) + 256


def byte_tokenizer(*, writes_bos: bool = False) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if writes_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **special)


def byte_model(family: str, **changes) -> PreTrainedModel:
    return tiny_model(family, **{"vocab_size": VOCABULARY_SIZE, "eos_token_id": 2, **changes})


def save_byte_model(family: str, folder: Path, *, writes_bos: bool = False, **changes) -> Path:
    byte_model(family, **changes).save_pretrained(folder)
    byte_tokenizer(writes_bos=writes_bos).save_pretrained(folder)
    return folder


def save_upscaled(base: Path, folder: Path) -> Path:
    upscale(base=base, method="midus-hml", output=folder, num_new_layers=2, options={"n": 8, "k": 2})
    return folder


def perplexity(model, tokenizer, documents, *, apart=False, find_paths=None, batch_size=4, **lengths: Any) -> Any:
    """Return `perplexity`, the number of predicted `tokens`, and the longest window's."""
    rows = text_rows("text", documents, tokenizer, model.config, joined=not apart, **lengths)
    if find_paths is not None:
        rows = dataclasses.replace(rows, paths=find_paths(documents))
    losses, longest = row_losses(model, rows, batch_size=batch_size), max(len(row) - 1 for row in rows.rows)
    return SimpleNamespace(perplexity=losses.perplexity, tokens=rows.num_tokens, sequence_length=longest)

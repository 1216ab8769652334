"""What a tiny run of fine-tuning needs: a tokenizer of characters, bases with it, and chats."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny import save_tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from training.tiny_run import PreparedRun, save_upscaled
from transformers import PreTrainedTokenizerFast

from midus_hf.training.sft.run import SftArguments, make_sft_trainer, read_chat_texts

CHATML_TOKENS = ["<|im_start|>", "<|im_end|>"]


def character_tokenizer(merges: Sequence[tuple[str, str]] = (), **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of printable ASCII, a token per character except merges, for the 128 ids of a tiny model."""
    characters = [*map(chr, range(ord("!"), ord("~") + 1)), "Ġ", "Ċ"]
    specials = ["<pad>", "<bos>", "<eos>", *CHATML_TOKENS]
    vocabulary = [*specials, *characters, *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    arguments = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": CHATML_TOKENS, **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **arguments)


def save_base(family: str, folder: Path, method: str | None) -> Path:
    if method is not None:
        return save_upscaled(family, folder, method, tokenizer=character_tokenizer())
    base = save_tiny_model(family, folder / "base")
    character_tokenizer().save_pretrained(base)
    return base


def chat(number: int) -> list[dict[str, str]]:
    texts = (f"say {number}", f"it is {number}", "and", f"{number + 1}")
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts, strict=True)]


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sft_config(model: Path, data: Path, output: Path, **changes: Any) -> SftArguments:
    options: dict[str, Any] = {"chat_template_path": "chatml", "max_length": 96, "per_device_train_batch_size": 2}
    options |= {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "bf16": False,
        "logging_steps": 1,
        "trainable": "all",
        **changes,
    }
    return SftArguments(model_name_or_path=str(model), output_dir=str(output), dataset_name=str(data), **options)


def prepared(arguments: SftArguments) -> PreparedRun:
    return PreparedRun(arguments, read_chat_texts, make_sft_trainer)

"""A tiny random BERT, saved as sentence-transformers saves one."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

WIDTH = 16
MODULES = ("Transformer", "Pooling", "Normalize")
# Words of the vocabulary, `w0` and so on.
WORDS = 60


def save_tiny_bert(folder: Path, seed: int = 0, max_tokens: int = 24, width: int = WIDTH) -> Path:
    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64}
    config = BertConfig(vocab_size=WORDS + 4, hidden_size=width, initializer_range=0.5, **sizes)
    BertModel(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
    modules = [{"idx": 0, "type": f"sentence_transformers.models.{name}"} for name in MODULES]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0` to `w59`, each a token, between `[CLS]` and `[SEP]`."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{f"w{index}": index + 4 for index in range(WORDS)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)

"""Small bases of words, and their upscalings to packs."""

import json

import torch

from tests.tiny import save_tiny_model, save_tiny_tokenizer
from tests.upscalers import contents
from upscalers.runs.upscale import upscale

ENTRIES = [
    {"name": "word5", "text": "word7 word8"}, {"name": ["word20 word21", "word22"], "text": "word9 word10 word11"},
    {"name": "word30", "text": "word12"}, {"name": "word5", "text": "word13"},
]  # fmt: skip


def save_base_of_words(folder):
    save_tiny_model("llama", folder)
    save_tiny_tokenizer(folder)
    return folder


def glossary(tmp_path, rows):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def made(base, tmp_path, rows=ENTRIES, progress=None, **options):
    options = {"corpus": glossary(tmp_path, rows), **options}
    return upscale(base=base, method="packs", output=tmp_path / "out", options=options, progress=progress)


def logits(folder, tokens):
    return contents.logits(folder, input_ids=torch.tensor([tokens]))


def entries_in(folder):
    return [json.loads(line) for line in (folder / "glossary.jsonl").read_text().splitlines()]

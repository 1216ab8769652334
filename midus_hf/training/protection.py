"""Protected texts: they keep their logits, bit for bit, while a memory of known n-grams learns others.

A memory adds zero to a token if neither it nor an earlier one reads a row. So the n-grams of protected texts are removed from the
table before training; afterwards the texts are compared with and without the memory, and a certificate is written.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from midus_hf.config.errors import RequestError
from midus_hf.data.corpus import read_corpus
from midus_hf.evaluation.text_rows import evaluating
from midus_hf.files.cards import PROTECTED_HEADING, read_card, without_section, write_card
from midus_hf.files.checkpoint_files import CERTIFICATE, TRAINED_FILE
from midus_hf.files.outputs import write_text
from midus_hf.memories.engram.known_ngrams import (
    REMOVED_NGRAM,
    digests_of,
    known_ngrams,
    named_tables,
    remove_ngrams,
    trained_tables,
)
from midus_hf.memories.engram.options import TOKEN_NUMBER_LIMIT
from midus_hf.memories.hosting.layer import without_memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.sources.characters import texts_digest
from midus_hf.sources.progress import show_progress
from midus_hf.sources.tokenizers import without_suffix_tokens

_TOKENS_PER_PASS = 1024
_SHOWN = 4
_FAULT = "This is a fault of midus_hf: please report it."


class Protection:
    """Texts protected in a run; their n-grams are removed from the model's tables before training."""

    def __init__(self, model: Any, tokenizer: Any, sources: Sequence[str], text_column: str):
        read = [list(read_corpus(each, text_column=text_column, key="protect")[text_column]) for each in sources]
        self.texts = dict(zip(_labels(sources), read, strict=True))
        self._tokenizer = tokenizer
        self.counts: dict[str, dict[str, int]] = {}
        self._taken: dict[str, str] = {}
        every = [text for documents in read for text in documents]
        for table in trained_tables(model):
            known = table.num_known
            ngrams = known_ngrams(table.keys_of(every, tokenizer)).to(table.ngrams.device)
            taken = table.ngrams[(table.ngrams < REMOVED_NGRAM) & torch.isin(table.ngrams, ngrams)]
            left = remove_ngrams(model, table, ngrams)
            if not left:
                raise RequestError(
                    f"none of the {known:,} n-grams of memory {table.memory!r} is left, since protected texts contain all of them; "
                    "expected n-grams to learn with. Protect less, or upscale with another corpus."
                )
            self.counts[table.memory] = {"known": known, "left": left}
            if len(taken):
                texts_of_taken = [repr(_text_of(key, tokenizer)) for key in taken[:_SHOWN].tolist()]
                beyond = f" and {len(taken) - _SHOWN:,} more" if len(taken) > _SHOWN else ""
                self._taken[table.memory] = f"; protected texts have {', '.join(texts_of_taken)}{beyond}"

    def __str__(self) -> str:
        return "\n".join(
            f"protect: {left['left']:,} of the {left['known']:,} n-grams of memory {name!r} are left to learn with "
            f"({left['left'] / left['known']:.1%}){self._taken.get(name, '')}"
            for name, left in self.counts.items()
        )

    def check_checkpoint(self, model: Any, checkpoint: Path) -> None:
        path = checkpoint / TRAINED_FILE
        if not path.is_file():
            return
        tables = named_tables(model)
        with safe_open(path, "pt") as file:
            for name in tables.keys() & set(file.keys()):
                if not torch.equal(file.get_tensor(name), tables[name].cpu()):
                    raise RequestError(
                        f"protect names other texts than the run had when it saved {checkpoint.name}; expected texts of the same "
                        "content. Give them, or start a new run in another folder."
                    )

    def certify(self, model: Any, folder: Path) -> None:
        """Compare the texts with and without the memories; write the certificate and the card's section."""
        count = f"{sum(map(len, self.texts.values())):,}"
        print(f"the model is saved; comparing {count} protected texts with and without the memory", flush=True)
        texts = []
        for name, documents in self.texts.items():
            tokens, differing = compare_texts(model, self._tokenizer, documents, list(self.counts))
            if differing:
                raise RuntimeError(
                    f"{len(differing)} of the texts of {name}, the first of them text {differing[0]}, have different logits with the "
                    f"memories than without them; no certificate is written. {_FAULT}"
                )
            digest = texts_digest(documents)
            texts.append({"name": name, "documents": len(documents), "tokens": tokens, "sha256": digest})
        tables, beside = digests_of(folder, self.counts, self._tokenizer)
        computed = {"dtype": str(model.dtype).removeprefix("torch."), "device": model.device.type}
        computed |= {"torch": torch.__version__, "transformers": transformers.__version__}
        certificate = {
            "texts": texts,
            "memories": {name: {**counts, "table_sha256": tables[name]} for name, counts in self.counts.items()},
            **beside,
            "computed": computed,
        }
        write_text(folder / CERTIFICATE, json.dumps(certificate, indent=2) + "\n")
        card = read_card(folder)
        if card is not None:
            write_card(folder, without_section(card, PROTECTED_HEADING) + _section(texts, self.counts))
        print(f"protected: {count} texts have the same logits, bit for bit; {folder / CERTIFICATE} says which")


def _labels(sources: Sequence[str]) -> list[str]:
    names = [Path(source).name for source in sources]
    return [
        f"{name} {names[:number].count(name) + 1}" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]


def _text_of(key: int, tokenizer: Any) -> str:
    ids: list[int] = []
    while key:
        key, number = divmod(key, TOKEN_NUMBER_LIMIT)
        ids.insert(0, number - 1)
    return tokenizer.decode(ids).strip()


def _section(texts: Sequence[Mapping[str, Any]], memories: Mapping[str, Any]) -> str:
    """Return the model card's section on protected texts."""
    row = "| {name} | {documents:,} | {tokens:,} | `{sha256:.16}` |"
    lines = "\n".join(row.format(**each) for each in texts)
    return f"""

{PROTECTED_HEADING}

No n-gram of these texts has a row in {", ".join(memories)}: read on their own, they have the logits, bit for bit,
of the model without that memory. `{CERTIFICATE}` has all digests, and this repeats the comparison:

```sh
midus look touched MODEL --text PROTECTED --prove
```

| text | documents | tokens | SHA-256 |
|---|---|---|---|
{lines}
"""


def compare_texts(
    model: Any, tokenizer: Any, documents: Sequence[str], memories: Sequence[str]
) -> tuple[int, list[int]]:
    """Return how many tokens documents have, and which of them have other logits without the named memories."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", _TOKENS_PER_PASS)
    total = 0
    differing = []
    tokenizer = without_suffix_tokens(tokenizer)
    with evaluating(model):
        for number, document in enumerate(show_progress(documents, desc="comparing texts", unit=" texts")):
            ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.int64, device=model.device)
            total += len(ids)
            if not len(ids):
                continue
            for part in ids.unsqueeze(0).split(min(_TOKENS_PER_PASS, positions), 1):
                logits = model(input_ids=part, use_cache=False).logits
                with without_memories(decoder_of(model).layers, memories):
                    if not torch.equal(model(input_ids=part, use_cache=False).logits, logits):
                        differing.append(number)
                        break
    return total, differing

"""Protected texts: they keep their logits, bit for bit, while a memory of known n-grams learns other texts.

A memory adds zero to a token if neither the token nor an earlier one of the text reads a row. So a text none of whose n-grams has a
row keeps, in every layer, the hidden states of the model without the memory. Before training, the n-grams of protected texts are
removed from the table; afterwards the texts are computed with and without the memory, compared, and a certificate is written.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from tqdm import tqdm

from midus_hf.data.corpus import read_corpus
from midus_hf.evaluation.text_rows import evaluating
from midus_hf.files.checkpoint_files import (
    CARD_FILE,
    CERTIFICATE,
    CONFIG_FILE,
    SINGLE_FILE,
    TRAINED_FILE,
    indexed_weights,
)
from midus_hf.files.outputs import atomic_write
from midus_hf.memories.entries import ATTACHED, TABLES, Memories
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.memories.ngram.known import TAKEN_OUT, NgramTable, known_ngrams
from midus_hf.memories.ngram.options import MOST_TOKENS, NgramOptions
from midus_hf.models.layer import without_memories
from midus_hf.saved_models import open_ended

_TOKENS_PER_PASS = 1024
# Number of removed n-grams that are shown.
_SHOWN = 4
_HEADING = "## Protected texts\n"
# Keys of a config that change even when a model is only saved again.
_OF_SAVING = ("transformers_version", "_name_or_path")

_FAULT = "This is a fault of midus_hf: please report it."


class Protection:
    """Texts that are protected in a run; their n-grams are removed from the tables of the model before training."""

    def __init__(self, model: Any, tokenizer: Any, sources: Sequence[str], text_column: str):
        read = [list(read_corpus(each, text_column=text_column, key="protect")[text_column]) for each in sources]
        self.texts, self._tokenizer = dict(zip(_labels(sources), read, strict=True)), tokenizer
        self.counts: dict[str, dict[str, int]] = {}
        self._taken: dict[str, str] = {}
        every = [text for documents in read for text in documents]
        for table in _trained_tables(model):
            known, ngrams = table.num_known, known_ngrams(table.keys_of(every, tokenizer)).to(table.ngrams.device)
            taken = table.ngrams[(table.ngrams < TAKEN_OUT) & torch.isin(table.ngrams, ngrams)]
            left = _take_out(model, table, ngrams)
            if not left:
                raise ValueError(
                    f"none of the {known:,} n-grams of memory {table.memory!r} is left, since protected texts contain all of them; "
                    "expected n-grams to learn with. Protect less, or upscale with another corpus."
                )
            self.counts[table.memory] = {"known": known, "left": left}
            if len(taken):
                texts_of_taken = [repr(_text_of(key, tokenizer)) for key in taken[:_SHOWN].tolist()]
                beyond = f" and {len(taken) - _SHOWN:,} more" * (len(taken) > _SHOWN)
                self._taken[table.memory] = f"; protected texts have {', '.join(texts_of_taken)}{beyond}"

    def __str__(self) -> str:
        return "\n".join(
            f"protect: {left['left']:,} of the {left['known']:,} n-grams of memory {name!r} are left to learn with "
            f"({left['left'] / left['known']:.1%}){self._taken.get(name, '')}"
            for name, left in self.counts.items()
        )

    def check_checkpoint(self, model: Any, checkpoint: Path) -> None:
        """Refuse a checkpoint whose tables were made with other protected texts."""
        path = checkpoint / TRAINED_FILE
        if not path.is_file():
            return
        tables = _tables_of(model)
        with safe_open(path, "pt") as file:
            for name in tables.keys() & set(file.keys()):
                if not torch.equal(file.get_tensor(name), tables[name].cpu()):
                    raise ValueError(
                        f"protect names other texts than the run had when it saved {checkpoint.name}; expected texts of the same "
                        "content. Give them, or start a new run in another folder."
                    )

    def certify(self, model: Any, folder: Path) -> None:
        """Compute the texts with and without the memories, and write the certificate and the section of the saved model's card."""
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
        tables, beside = _digests(folder, self.counts, self._tokenizer)
        certificate = {
            "texts": texts,
            "memories": {name: {**counts, "table_sha256": tables[name]} for name, counts in self.counts.items()},
            **beside,
            "computed": {
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": model.device.type,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        with atomic_write(folder / CERTIFICATE) as unfinished:
            unfinished.write_text(json.dumps(certificate, indent=2) + "\n", encoding="utf-8")
        card = folder / CARD_FILE
        if card.is_file():
            with atomic_write(card) as unfinished:
                content = without_section(card.read_text("utf-8")) + _section(texts, self.counts)
                unfinished.write_text(content, encoding="utf-8")
        print(f"protected: {count} texts have the same logits, bit for bit; {folder / CERTIFICATE} says which")


def _labels(sources: Sequence[str]) -> list[str]:
    """Return the last part of each path or id, followed by a number if several have the same."""
    names = [Path(source).name for source in sources]
    return [
        f"{name} {names[:number].count(name) + 1}" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]


def _text_of(key: int, tokenizer: Any) -> str:
    """Return the text of an n-gram of a table, with the first of the tokens that count as the same."""
    ids: list[int] = []
    while key:
        key, number = divmod(key, MOST_TOKENS)
        ids.insert(0, number - 1)
    return tokenizer.decode(ids).strip()


def _section(texts: Sequence[Mapping[str, Any]], memories: Mapping[str, Any]) -> str:
    rows = [
        f"| {each['name']} | {each['documents']:,} | {each['tokens']:,} | `{each['sha256'][:16]}` |" for each in texts
    ]
    lines = "\n".join(rows)
    return f"""

{_HEADING}
No n-gram of these texts has a row in {", ".join(memories)}: read on their own, they have the logits, bit for bit,
of the model without that memory. `{CERTIFICATE}` has all digests, and this repeats the comparison:

```sh
midus look touched MODEL --text PROTECTED --prove
```

| text | documents | tokens | SHA-256 |
|---|---|---|---|
{lines}
"""


def without_section(card: str) -> str:
    """Return a model card without its section on protected texts, which no longer holds once the model is trained again."""
    before, heading, behind = card.partition(_HEADING)
    if not heading:
        return card
    _, next_heading, rest = behind.partition("\n## ")
    return before.rstrip() + (f"\n\n{next_heading.lstrip()}{rest}" if next_heading else "\n")


class TextComparison(NamedTuple):
    """The number of tokens of documents, and the numbers of those whose logits differ with and without memories."""

    tokens: int
    differing: list[int]


def compare_texts(model: Any, tokenizer: Any, documents: Sequence[str], memories: Sequence[str]) -> TextComparison:
    """Compare the logits of documents, bit for bit, with and without the named memories, in passes of at most 1,024 tokens."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", _TOKENS_PER_PASS)
    total, differing, tokenizer = 0, [], open_ended(tokenizer)
    with evaluating(model):
        for number, document in enumerate(tqdm(documents, desc="comparing texts", unit=" texts", disable=None)):
            ids = torch.tensor(tokenizer(document, verbose=False)["input_ids"], dtype=torch.int64, device=model.device)
            total += len(ids)
            for part in ids.unsqueeze(0).split(min(_TOKENS_PER_PASS, positions), 1) if len(ids) else ():
                logits = model(input_ids=part, use_cache=False).logits
                with without_memories(decoder_of(model).layers, memories):
                    if not torch.equal(model(input_ids=part, use_cache=False).logits, logits):
                        differing.append(number)
                        break
    return TextComparison(total, differing)


def exact_tables(memories: Memories, tensors: Mapping[str, torch.Tensor]) -> list[NgramTable]:
    """Return the tables of all memories that read rows by known n-grams, from tensors by their names in the model."""
    tables = []
    for name, entry in memories.attached.items():
        options = entry.options
        if isinstance(options, NgramOptions) and options.table == "exact" and options.addressing == "content":
            of_memory = {
                each.rpartition(".")[2]: tensor for each, tensor in tensors.items() if f"{TABLES}.{name}." in each
            }
            if "ngrams" not in of_memory:
                raise ValueError(f"the weights lack the table of memory {name!r}; expected a whole checkpoint.")
            tables.append(NgramTable(name, options, of_memory["ngrams"], of_memory.get("token_numbers")))
    return tables


def _tables_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in model.named_buffers() if f"{TABLES}." in name}


def _trained_tables(model: Any) -> list[NgramTable]:
    """Return the tables of the trained memories, or refuse a model in which anything but exact tables is trained."""
    memories: Memories | None = model.config.memories() if hasattr(model.config, "memories") else None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    tables = [] if memories is None else exact_tables(memories, _tables_of(model))
    tables = [table for table in tables if any(_is_of(each, table.memory) for each in trained)]
    others = [each for each in trained if not any(_is_of(each, table.memory) for table in tables)]
    if tables and not others:
        return tables
    what, reason = others[0] if others else "no memory", "which every text reads"
    for entry in () if memories is None else memories.entries:
        options = entry.options
        if not entry.is_attached or any(_is_of(each, entry.name) for each in others):
            what = f"{entry.name if entry.is_attached else 'an inserted layer'} ({options.type})"
            reason = "which chooses rows by hidden states, so that a few texts read nearly all of them"
            if isinstance(options, NgramOptions):
                reason = (
                    f"which has table {options.table!r} and addressing {options.addressing!r}, where texts share rows"
                )
    raise ValueError(
        f"protect is given, and {what} trains, {reason}; expected only memories of known n-grams. Set trainable: new, and use a "
        "model that was upscaled with --method engram --set table=exact."
    )


def _take_out(model: Any, table: NgramTable, taken: torch.Tensor) -> int:
    """Remove n-grams from a memory's table, with their rows in all layers, and return how many are left."""
    stays = (table.ngrams < TAKEN_OUT) & ~torch.isin(table.ngrams, taken)
    left = int(stays.sum())
    with torch.no_grad():
        kept = table.ngrams[stays]
        table.ngrams.fill_(TAKEN_OUT)
        table.ngrams[:left] = kept
        for layer in decoder_of(model).layers:
            memory = getattr(layer, "memories", {})
            if table.memory in memory and table.options.rows != 1:
                values = memory[table.memory].value_table
                rows = values[1:][stays.to(values.device)].clone()
                values.zero_()
                values[1 : 1 + left] = rows
    return left


def _is_of(name: str, memory: str) -> bool:
    """Return whether a tensor's name is that of an attached memory or of its tables."""
    return f".{ATTACHED}.{memory}." in name or f"{TABLES}.{memory}." in name


def texts_digest(documents: Sequence[str]) -> str:
    """Return the SHA-256 of documents, in order, each prefixed by its length."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _digests(folder: Path, memories: Mapping[str, Any], tokenizer: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return the SHA-256 of each memory's table in a saved model, and of the other files that certified texts depend on, by key."""
    of_tables = {name: f"{TABLES}.{name}." for name in memories}
    of_all = [*of_tables.values(), *(f".{ATTACHED}.{name}." for name in memories)]
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    kept = json.dumps({key: value for key, value in config.items() if key not in _OF_SAVING}, sort_keys=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    makes = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return {name: _tensors_digest(folder, [part], True) for name, part in of_tables.items()}, {
        "base_sha256": _tensors_digest(folder, of_all, False),
        "config_sha256": hashlib.sha256(kept.encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(makes.encode()).hexdigest(),
    }


def _tensors_digest(folder: Path, parts: Sequence[str], is_read: bool) -> str:
    """Return the SHA-256 of the tensors whose names contain one of some parts, or none of them."""
    digest = hashlib.sha256()
    for name, tensor in sorted_tensors(folder, lambda name: any(part in name for part in parts) is is_read):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sorted_tensors(folder: Path, is_read: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a saved model whose names a function accepts, in the order of names."""
    shards = [SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else sorted(indexed_weights(folder))
    with contextlib.ExitStack() as opened:
        file_of: dict[str, Any] = {}
        for shard in shards:
            file = opened.enter_context(safe_open(folder / shard, "pt"))
            file_of |= dict.fromkeys(filter(is_read, file.keys()), file)
        for name in sorted(file_of):
            yield name, file_of[name].get_tensor(name)


_CERTIFIED = {
    "base_sha256": "a tensor outside the memory",
    "config_sha256": "the config",
    "tokenizer_sha256": "the tokenizer",
}


def read_certificate(folder: Path) -> dict[str, Any] | None:
    """Return the certificate in the folder of a model, or None if there is none."""
    path = folder / CERTIFICATE
    if not path.is_file():
        return None
    try:
        certificate: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = [certificate[key] for key in ("texts", *_CERTIFIED)]
        _ = [entry["table_sha256"] for entry in certificate["memories"].values()]
    except (ValueError, AttributeError, TypeError, KeyError):
        raise ValueError(
            f"{path} is not a certificate of midus train; remove it, or train with protect again."
        ) from None
    return certificate


def check_certificate(certificate: Mapping[str, Any], folder: Path, tokenizer: Any) -> None:
    """Refuse a certificate if the table, other tensors, the config or the tokenizer differ from what was certified."""
    memories = certificate["memories"]
    tables, beside = _digests(folder, memories, tokenizer)
    differs = [f"the table of memory {name!r}" for name in memories if tables[name] != memories[name]["table_sha256"]]
    differs += [what for key, what in _CERTIFIED.items() if certificate[key] != beside[key]]
    if differs:
        raise ValueError(
            f"{folder / CERTIFICATE} does not fit the folder: {', '.join(differs)} changed since; expected what was certified. "
            "Remove the certificate, or train with protect again."
        )

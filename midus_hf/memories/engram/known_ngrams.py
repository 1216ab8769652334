"""Known n-grams of exact tables: of texts, of a model, and certificates that texts read none of them."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import CERTIFICATE, CONFIG_FILE, SINGLE_FILE, indexed_weights, read_json
from midus_hf.memories.engram.options import MAX_ORDER, TOKEN_NUMBER_LIMIT, EngramOptions
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.memories.registry import ATTACHED, TABLES, Memories
from midus_hf.ops.engram import known_rows, ngram_keys, numbered, windows
from midus_hf.sources.progress import show_progress
from midus_hf.sources.tokenizers import without_suffix_tokens

# Replaces a removed n-gram in a table: larger than all n-grams of texts.
REMOVED_NGRAM = TOKEN_NUMBER_LIMIT**MAX_ORDER - 1
# Keys of a config that change when a model is only saved again.
SAVING_KEYS = ("transformers_version", "_name_or_path")

_TEXTS_AT_ONCE = 1000
_CERTIFIED = {
    "base_sha256": "a tensor outside the memory",
    "config_sha256": "the config",
    "tokenizer_sha256": "the tokenizer",
}


class TextKeys(NamedTuple):
    """N-grams that end at each token of some texts, one text after the other."""

    keys: torch.Tensor  # `[T, orders]`, int64; 0 where a text has fewer tokens up to this one
    texts: torch.Tensor  # `[T]`, int64, index of each token's text among all texts
    ids: list[list[int]]  # tokens of each of these texts


def keys_of_texts(
    texts: Sequence[str], tokenizer: Any, options: EngramOptions, token_numbers: torch.Tensor | None = None
) -> Iterator[TextKeys]:
    """Yield the n-grams of texts, a thousand texts at a time; none reaches past the end of its text.

    `token_numbers`, `[V]`, int64, are equal for tokens of similar text. Default: the ids.
    """
    starts, tokenizer = range(0, len(texts), _TEXTS_AT_ONCE), without_suffix_tokens(tokenizer)
    for first in show_progress(starts, desc="reading n-grams", unit="k texts", leave=False):
        ids = tokenizer(list(texts[first : first + _TEXTS_AT_ONCE]), verbose=False)["input_ids"]
        text = torch.arange(len(ids)).repeat_interleave(torch.tensor([len(each) for each in ids]))
        tokens = torch.tensor([token for each in ids for token in each], dtype=torch.int64)
        around = windows(numbered(tokens, token_numbers).unsqueeze(0), options.max_order, text.unsqueeze(0))[0]
        keys = torch.stack([ngram_keys(around, order, TOKEN_NUMBER_LIMIT) for order in options.orders], dim=-1)
        yield TextKeys(keys, text + first, ids)


def known_ngrams(texts: Iterator[TextKeys], min_texts: int = 1) -> torch.Tensor:
    """Return the n-grams that occur in at least `min_texts` texts, `[N]`, int64, ascending."""
    known, counts = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    for part in texts:
        keys, order = part.keys.flatten().sort(stable=True)  # of equal keys, texts are ascending
        pairs = torch.stack([keys, part.texts.repeat_interleave(part.keys.shape[1])[order]])
        is_new = torch.cat([keys[:1] > 0, (pairs[:, 1:] != pairs[:, :-1]).any(0) & (keys[1:] > 0)])
        new, in_texts = keys[is_new].unique_consecutive(return_counts=True)
        known, places = torch.cat([known, new]).unique(return_inverse=True)
        counts = torch.zeros_like(known).index_add(0, places, torch.cat([counts, in_texts]))
    return known[counts >= min_texts]


class KnownNgrams(NamedTuple):
    """The n-grams that a memory knows, by its name."""

    memory: str
    options: EngramOptions
    ngrams: torch.Tensor  # `[N]`, int64, ascending, with `REMOVED_NGRAM` at the end
    token_numbers: torch.Tensor | None  # `[V]`, int64; None: tokens are numbered by their ids

    @property
    def num_known(self) -> int:
        """Number of n-grams that have not been removed."""
        return int((self.ngrams < REMOVED_NGRAM).sum())

    def keys_of(self, texts: Sequence[str], tokenizer: Any) -> Iterator[TextKeys]:
        """Yield the n-grams of texts as `keys_of_texts` does."""
        return keys_of_texts(texts, tokenizer, self.options, self.token_numbers)

    def reads(self, keys: torch.Tensor) -> torch.Tensor:
        """Return whether each token reads a row, `[T]`, bool, from keys `[T, orders]`."""
        return (known_rows(keys, self.ngrams) > 0).any(-1)


def exact_tables(memories: Memories, tensors: Mapping[str, torch.Tensor]) -> list[KnownNgrams]:
    """Return the known n-grams of all memories with exact tables, from tensors by name in the model."""
    tables = []
    for name, entry in memories.attached.items():
        options = entry.options
        if isinstance(options, EngramOptions) and options.table == "exact" and options.addressing == "content":
            own = {each.rpartition(".")[2]: tensor for each, tensor in tensors.items() if f"{TABLES}.{name}." in each}
            if "ngrams" not in own:
                raise RequestError(f"the weights lack the table of memory {name!r}; expected a whole checkpoint.")
            tables.append(KnownNgrams(name, options, own["ngrams"], own.get("token_numbers")))
    return tables


def named_tables(model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's shared tables, by name."""
    return {name: tensor for name, tensor in model.named_buffers() if f"{TABLES}." in name}


def trained_tables(model: Any) -> list[KnownNgrams]:
    """Return the known n-grams of the trained memories; a `RequestError` if anything else trains."""
    memories: Memories | None = model.config.memories() if hasattr(model.config, "memories") else None
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    tables = [] if memories is None else exact_tables(memories, named_tables(model))
    tables = [table for table in tables if any(_belongs_to(each, table.memory) for each in trained)]
    others = [each for each in trained if not any(_belongs_to(each, table.memory) for table in tables)]
    if tables and not others:
        return tables
    what, reason = others[0] if others else "no memory", "which every text reads"
    for entry in () if memories is None else memories.entries:
        options = entry.options
        if not entry.is_attached or any(_belongs_to(each, entry.name) for each in others):
            what = f"{entry.name if entry.is_attached else 'an inserted layer'} ({options.type})"
            reason = "which chooses rows by hidden states, so that a few texts read nearly all of them"
            if isinstance(options, EngramOptions):
                reason = (
                    f"which has table {options.table!r} and addressing {options.addressing!r}, where texts share rows"
                )
    raise RequestError(
        f"protect is given, and {what} trains, {reason}; expected only memories of known n-grams. Set trainable: new, and use a "
        "model that was upscaled with --method engram --set table=exact."
    )


def remove_ngrams(model: Any, table: KnownNgrams, removed: torch.Tensor) -> int:
    """Remove n-grams from a memory's table, with their rows in all layers, and return how many are left."""
    stays = (table.ngrams < REMOVED_NGRAM) & ~torch.isin(table.ngrams, removed)
    left = int(stays.sum())
    with torch.no_grad():
        kept = table.ngrams[stays]
        table.ngrams.fill_(REMOVED_NGRAM)
        table.ngrams[:left] = kept
        for layer in decoder_of(model).layers:
            memory = getattr(layer, "memories", {})
            if table.memory in memory and table.options.rows != 1:
                values = memory[table.memory].value_table
                rows = values[1:][stays.to(values.device)].clone()
                values.zero_()
                values[1 : 1 + left] = rows
    return left


def _belongs_to(name: str, memory: str) -> bool:
    return f".{ATTACHED}.{memory}." in name or f"{TABLES}.{memory}." in name


def digests_of(folder: Path, memories: Mapping[str, Any], tokenizer: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return SHA-256 of each memory's table in a saved model, and of what else certified texts depend on."""
    tables = {name: f"{TABLES}.{name}." for name in memories}
    own = [*tables.values(), *(f".{ATTACHED}.{name}." for name in memories)]
    config = {key: value for key, value in read_json(folder / CONFIG_FILE).items() if key not in SAVING_KEYS}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return {name: _tensors_digest(folder, [part], True) for name, part in tables.items()}, {
        "base_sha256": _tensors_digest(folder, own, False),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "tokenizer_sha256": hashlib.sha256(content.encode()).hexdigest(),
    }


def _tensors_digest(folder: Path, parts: Sequence[str], has_part: bool) -> str:
    """Return the SHA-256 of the tensors whose names contain one of some parts, or none of them."""
    digest = hashlib.sha256()
    for name, tensor in sorted_tensors(folder, lambda name: any(part in name for part in parts) is has_part):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sorted_tensors(folder: Path, accepts: Callable[[str], bool]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of a saved model whose names a function accepts, in the order of names."""
    shards = [SINGLE_FILE] if (folder / SINGLE_FILE).is_file() else sorted(indexed_weights(folder))
    with contextlib.ExitStack() as opened:
        files: dict[str, Any] = {}
        for shard in shards:
            file = opened.enter_context(safe_open(folder / shard, "pt"))
            files |= dict.fromkeys(filter(accepts, file.keys()), file)
        for name in sorted(files):
            yield name, files[name].get_tensor(name)


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
        raise RequestError(
            f"{path} is not a certificate of midus train; remove it, or train with protect again."
        ) from None
    return certificate


def check_certificate(certificate: Mapping[str, Any], folder: Path, tokenizer: Any) -> None:
    """Refuse a certificate if the table, other tensors, the config or the tokenizer have changed."""
    memories = certificate["memories"]
    tables, others = digests_of(folder, memories, tokenizer)
    differs = [f"the table of memory {name!r}" for name in memories if tables[name] != memories[name]["table_sha256"]]
    differs += [what for key, what in _CERTIFIED.items() if certificate[key] != others[key]]
    if differs:
        raise RequestError(
            f"{folder / CERTIFICATE} does not fit the folder: {', '.join(differs)} changed since; expected what was certified. "
            "Remove the certificate, or train with protect again."
        )

"""A cache of a corpus's tokens on disk: all cores make the tokens once, and every process and later run maps them.

An entry is a folder of Arrow files. Its name is a digest of everything that decides the tokens: the text, how it is
read, the tokenizer, and the version of the procedure in this file. An entry gets its name only when it is whole, so
that a killed run leaves nothing that looks like an entry, and only if the text did not change while it was tokenised.
Each process compares the files of an entry with their digests before it uses the tokens. Sequences of any length can be
cut from an entry.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from midus_hf.files.json_text import parse_json
from midus_hf.files.manifest import describe_files, first_damage
from midus_hf.files.whole_files import sync
from midus_hf.saved_models import check_ids
from midus_hf.topics.documents import text_of_row
from midus_hf.topics.text_files import DocumentError, first_line
from midus_hf.training.data.former_corpus import HubRows, LocalText, usable_cores
from midus_hf.training.data.former_packing import CorpusTokens, check_length, tokenise

# Version of the procedure here and of the record's format; raise it when either changes, to ignore older entries.
_PROCEDURE = 2

_RECORD = "entry.json"
_DOCUMENTS_A_BATCH = 64
# Number of characters from which the number of tokens of the text is estimated.
_SAMPLE = 2**20

# Bytes of text above which a message announces the tokenisation; less text takes a moment.
_WORTH_TELLING = 2**24

# Factor by which the free room that is required exceeds the estimate.
_RESERVE = 1.1

# Entries that this process has compared with their digests: path, inode and modification time of the record.
_SEEN_WHOLE: set[tuple[Path, int, int]] = set()


def cached_tokens(
    corpus: LocalText | HubRows, tokenizer: PreTrainedTokenizerBase, vocab_size: int, cache_dir: str | None = None
) -> CorpusTokens:
    """Return the tokens of a corpus, each document ending in EOS as in `tokenise`; make them if the cache lacks them.

    If several processes request the same tokens at once, one process makes the tokens and the others wait.

    Args:
        corpus: The text, which must not be a stream.
        cache_dir: Folder of the cache, created if missing. Default: `midus_hf_tokens` in the cache of `datasets`.

    Raises:
        DocumentError: If the corpus is empty, cannot be read or changes while it is tokenised, if the folder cannot be
            written or lacks room, or if the tokens there are damaged.
        ValueError: If `tokenise` raises it.
    """
    import datasets
    from filelock import FileLock

    folder = Path(cache_dir or Path(datasets.config.HF_DATASETS_CACHE, "midus_hf_tokens")).expanduser()
    entry = folder / _fingerprint(corpus, tokenizer)
    if not entry.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(folder / f"{entry.name}.lock"):
                if not entry.exists():
                    _make(entry, corpus, tokenizer, vocab_size)
        except OSError as error:
            raise DocumentError(
                f"the tokens of corpus {corpus.options.path!r} cannot be written to {str(folder)!r}: {first_line(error)}. "
                "Set corpus.cache_dir to a folder with room."
            ) from error
    return _open(entry, vocab_size)


def _fingerprint(corpus: LocalText | HubRows, tokenizer: PreTrainedTokenizerBase) -> str:
    parts = [str(_PROCEDURE), *_tokenizer_identity(tokenizer), *corpus.identity()]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the files and settings of the tokenizer that decide tokens, without its origin and its chat template."""
    tokenizer([""], return_attention_mask=False, verbose=False)  # clears the truncation and padding of an earlier call
    identity = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.name == "tokenizer_config.json":
                settings = parse_json(path.read_text(encoding="utf-8"))
                for key in ("is_local", "local_files_only", "name_or_path", "chat_template"):
                    settings.pop(key, None)
                identity.append(json.dumps(settings, sort_keys=True))
            elif path.is_file() and "chat_template" not in str(path.relative_to(folder)):
                identity += [path.name, hashlib.blake2b(path.read_bytes()).hexdigest()]
    return identity


def _make(entry: Path, corpus: LocalText | HubRows, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Make an entry in a folder beside it, which gets the entry's name at the very end."""
    for abandoned in entry.parent.glob(f"{entry.name}.*.partial"):  # of killed runs, which have released their lock
        shutil.rmtree(abandoned, ignore_errors=True)
    size, needed = _estimate(corpus, tokenizer, vocab_size)
    free = shutil.disk_usage(entry.parent).free
    if free < needed:
        raise DocumentError(
            f"the tokens of corpus {corpus.options.path!r} need about {_gigabytes(needed)} in {str(entry.parent)!r}, where "
            f"{_gigabytes(free)} are free. Make room, or set corpus.cache_dir to a folder that has it."
        )
    is_long = size > _WORTH_TELLING
    if is_long:
        print(
            f"tokenising {corpus.options.path} ({_gigabytes(size)} of text) once, into {entry.parent}; "
            "later runs read the tokens from there",
            file=sys.stderr,
            flush=True,
        )
    partial = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".partial", dir=entry.parent))
    try:
        files = _write_tokens(partial, corpus, tokenizer, vocab_size, show_progress=is_long)
        tokens = _map(files)
        record: dict[str, Any] = {
            "corpus": corpus.options.path,
            "tokenizer": type(tokenizer).__name__,
            "procedure": _PROCEDURE,
            "files": describe_files(partial, files),
            "documents": tokens.num_documents,
            "tokens": tokens.num_tokens,
            "largest_id": tokens.largest_id(),
        }
        record["sha256"] = _digest_of(record)
        (partial / _RECORD).write_text(json.dumps(record, indent=2), encoding="utf-8")
        for file in (*files, partial / _RECORD):
            sync(file)
        partial.chmod(0o777 & ~_umask())  # mkdtemp denies access to everybody else
        sync(partial)
        if _fingerprint(corpus, tokenizer) != entry.name:
            raise DocumentError(
                f"corpus {corpus.options.path!r} changed while it was tokenised; expected the same text from beginning to end. Start "
                "again once nothing writes to it; the tokens that were made are not kept."
            )
        partial.rename(entry)
        sync(entry.parent)
        _SEEN_WHOLE.add(_stamp(entry))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_tokens(
    folder: Path,
    corpus: LocalText | HubRows,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    show_progress: bool,
) -> list[Path]:
    """Tokenise a corpus into Arrow files in `folder`, where a copy of local text is meanwhile; return the files in order."""
    import datasets

    text, column = folder / "text", corpus.options.column
    with _progress_bars(False):
        documents = corpus.as_dataset(text)
    processes = min(usable_cores(), -(-len(documents) // _DOCUMENTS_A_BATCH))
    with _progress_bars(show_progress), without_threads_of_tokenizers():
        tokens = documents.map(
            partial(_tokenise_batch, tokenizer, vocab_size, column, f"corpus {corpus.options.path!r}"),
            batched=True,
            batch_size=_DOCUMENTS_A_BATCH,
            input_columns=[column],
            features=datasets.Features({"tokens": datasets.LargeList(datasets.Value("int32"))}),
            num_proc=processes if processes > 1 else None,
            cache_file_name=str(folder / "tokens.arrow"),
            load_from_cache_file=False,
            new_fingerprint=folder.name,
            desc="tokenising",
        )
    files = [Path(file["filename"]) for file in tokens.cache_files]
    del documents, tokens
    shutil.rmtree(text, ignore_errors=True)
    return [file.rename(folder / f"{index:05}.arrow") for index, file in enumerate(files)]


def _tokenise_batch(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, column: str, location: str, texts: list[Any]
) -> Any:
    """Turn a batch of texts into a table of their tokens, in any process."""
    import pyarrow

    documents = (text_of_row({column: text}, column, location) for text in texts)
    visible = (document for document in documents if document.strip())
    rows = [np.asarray(ids, np.int32) for ids in tokenise(visible, tokenizer, vocab_size)]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = np.concatenate([np.zeros(0, np.int32), *rows])
    return pyarrow.table({"tokens": pyarrow.LargeListArray.from_arrays(offsets, values)})


def _open(entry: Path, vocab_size: int) -> CorpusTokens:
    record = _whole_record(entry)
    check_ids(record["largest_id"], vocab_size)
    try:
        return _map([entry / name for name in record["files"]])
    except (OSError, ValueError) as error:  # the entry was damaged after it was compared with its digests
        raise DocumentError(_damaged(entry, first_line(error))) from error


def _whole_record(entry: Path) -> dict[str, Any]:
    """Return the record of an entry, after comparing the entry's files with the record once per process."""
    try:
        record = parse_json((entry / _RECORD).read_text(encoding="utf-8"))
        stamp = _stamp(entry)
        if record["sha256"] != _digest_of(record):
            raise ValueError(f"{_RECORD} does not have the contents that were written")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DocumentError(_damaged(entry, first_line(error))) from error
    if stamp not in _SEEN_WHOLE:
        damage = first_damage(entry, record["files"])
        if damage is not None:
            raise DocumentError(_damaged(entry, damage))
        _SEEN_WHOLE.add(stamp)
    return record


def _stamp(entry: Path) -> tuple[Path, int, int]:
    state = (entry / _RECORD).stat()
    return entry, state.st_ino, state.st_mtime_ns


def _digest_of(record: dict[str, Any]) -> str:
    """Return the digest of a record, computed from all its items except the digest itself."""
    others = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def _damaged(entry: Path, reason: str) -> str:
    return f"the cached tokens in {str(entry)!r} are damaged: {reason}. Remove this folder; it is made again."


def _map(files: list[Path]) -> CorpusTokens:
    import datasets

    chunks = [chunk for file in files for chunk in datasets.Dataset.from_file(str(file)).data.column("tokens").chunks]
    return CorpusTokens(
        [(chunk.values.to_numpy(zero_copy_only=True), chunk.offsets.to_numpy(zero_copy_only=True)) for chunk in chunks]
    )


def _estimate(corpus: LocalText | HubRows, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> tuple[int, int]:
    """Estimate the bytes of text, and the bytes of disk that making its tokens takes."""
    sample: list[str] = []
    characters = 0
    for document in corpus.documents():
        sample.append(document[: _SAMPLE - characters])
        characters += len(sample[-1])
        if characters >= _SAMPLE:
            break
    num_tokens = sum(map(len, tokenise(sample, tokenizer, vocab_size)))
    check_length(len(sample), num_tokens, 0)
    text = corpus.size()
    token_bytes = 4 * num_tokens / sum(len(document.encode("utf-8", "replace")) for document in sample)
    copies = 1 if isinstance(corpus, LocalText) else 0
    return text, int(_RESERVE * text * (copies + token_bytes))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of `datasets` inside the context, except on a terminal if `shown` is true."""
    import datasets

    if datasets.are_progress_bars_disabled() or (shown and sys.stderr.isatty()):
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


@contextlib.contextmanager
def without_threads_of_tokenizers() -> Iterator[None]:
    """Limit tokenizers to one thread per process inside the context, since there is one process per core."""
    name = "TOKENIZERS_PARALLELISM"
    value_before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if value_before is None:
            del os.environ[name]
        else:
            os.environ[name] = value_before

"""Texts packed as they are read, for a corpus larger than the disk: endless and resumed exactly."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.utils.data import IterableDataset

from midus_hf.config.errors import RequestError, first_few, no_column, print_note
from midus_hf.data.corpus import STREAMED_FILE_COLUMN, TREE_COLUMN, DocumentPaths, convert_read_errors, stream_files
from midus_hf.data.held_out import belongs_to_share
from midus_hf.data.packing import DROPPED_SHARE, Packer, beginning_within, tokenise, too_few_tokens
from midus_hf.sources.downloads import DownloadError, fetching

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_TEXTS_AT_ONCE = 100
# Files of a pass with digests of their own; the last digest is also that of all further files.
_MAX_FILES_APART = 10_000


class StreamedSequences(IterableDataset):
    """Endless, shuffled sequences of a stream of texts, as of `packed_sequences` and `leaf_sequences`.

    A pass reads every text once, and then the next begins. In memory are some texts, tokens that fill no sequence yet (of each leaf,
    with paths), and the shuffle buffer; `save` and `load` keep them, so a stream resumes exactly. Without a buffer, a pass has the
    sequences of `packed_sequences` in order; those of `leaf_sequences` come as soon as a leaf has the tokens. `save` also keeps
    digests of the texts: if any file was written, copied or moved since, `load` reads them again and compares. It is iterated in its
    own process, not by workers.

    Args as of `packed_sequences` and `leaf_sequences`, and:
        texts: Stream of `read_rows`; unreadable or blank first texts, and texts that fill no sequence, are refused.
        read_paths: Returns the paths of rows, as `checked_paths`, with their name as `text`. Default: None, no paths.
        shuffle_buffer: Number of sequences from which the next is drawn; with 0 they come in order.
        seed: Seed of the draws, or several numbers.
        rank: Number of this process of `world_size`; `split_dataset_by_node` divides files if all get as many, else texts.
        held_out_share: Share of the texts that are left out, by `belongs_to_share`.
    """

    def __init__(
        self,
        texts: "datasets.IterableDataset",
        tokenizer: "PreTrainedTokenizerBase",
        sequence_length: int,
        *,
        documents_apart: bool,
        key: str = "corpus",
        text_column: str = "text",
        vocab_size: int | None = None,
        read_paths: Callable[..., DocumentPaths] | None = None,
        path_column: str | None = None,
        depth: int | None = None,
        shuffle_buffer: int = 10_000,
        seed: int | list[int] = 0,
        rank: int = 0,
        world_size: int = 1,
        held_out_share: float = 0.0,
    ):
        self._held_out_share = held_out_share
        self.key = key
        self._sequence_length = sequence_length
        self._shuffle_buffer = max(1, shuffle_buffer)
        self.tree: str | None = None  # fingerprint of the tree that the paths name
        names, self._files_on_disk = stream_files(texts)
        self._label = key
        self._remedy = ""
        if world_size > 1:
            from datasets.distributed import split_dataset_by_node

            files = texts.num_shards
            texts = split_dataset_by_node(texts, rank, world_size)
            part = f"1 text in {world_size}"
            if files % world_size == 0:
                part = f"{files // world_size:,} of {files:,} files"
                self._remedy = (
                    f", whether or not other ranks have read theirs. Give files equal sizes, or make them a number that {world_size} "
                    "does not divide, with which ranks have equally many texts"
                )
            self._label = f"{key} of rank {rank} ({part})"
        self._told: set[str] = set()  # of blank texts
        # By file in reading order: name, number of texts, and digest. None for a pass that began without digests.
        self._texts_read: list[list[Any]] | None = None
        self._earlier_pass: list[list[Any]] | None = None
        self._source = texts
        self._begin = texts.state_dict()
        self._text_column = text_column
        self._depth = depth
        self._read_paths = read_paths
        self._columns_of_paths = [path_column, TREE_COLUMN]
        self._tokenise = partial(tokenise, tokenizer=tokenizer, vocab_size=vocab_size)
        beginning = beginning_within(sequence_length, tokenizer)
        fill = None if read_paths is None else tokenizer.eos_token_id
        self._new_packer = partial(Packer, sequence_length, documents_apart, beginning, fill)
        self._generator = np.random.default_rng(seed)
        self._rows: list[dict[str, np.ndarray]] = []  # the buffer, and those after it
        self._begin_pass(0)
        while not self._rows:
            self._read_on()
            if self._counts["texts"] == self._counts["blank"]:
                raise RequestError(
                    f"{self._label} begins with {self._counts['texts']:,} texts{_name_files(self._texts_read)} that are blank or "
                    f"missing under {text_column!r}; set text_column to the column that holds the text."
                )
        first = [(name, values.tolist()) for row in self._rows for name, values in row.items()]
        described = json.dumps([names, first])
        # SHA-256 of the files and of the first sequences, which identify a stream.
        self.digest = hashlib.sha256(described.encode()).hexdigest()

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        while True:
            while not self._counts["has_ended"] and len(self._rows) < self._shuffle_buffer:
                self._read_on()
            if not self._rows:
                self._begin_pass(self._counts["earlier_passes"] + 1)
                continue
            place = self._generator.integers(min(len(self._rows), self._shuffle_buffer))
            self._rows[0], self._rows[place] = self._rows[place], self._rows[0]
            yield {name: values.tolist() for name, values in self._rows.pop(0).items()}

    def first_rows(self, count: int) -> list[dict[str, list[int]]]:
        """Return the first sequences that have been read; the stream goes on as without this call."""
        while not self._counts["has_ended"] and len(self._rows) < count:
            self._read_on()
        return [{name: values.tolist() for name, values in row.items()} for row in self._rows[:count]]

    def save(self, path: Path) -> None:
        packers = [[leaf, each.path, each.place, len(each.pieces)] for leaf, each in self._packers.items()]
        flat = {}
        lists = {"pieces": [piece for packer in self._packers.values() for piece in packer.pieces]}
        lists |= {name: [row[name] for row in self._rows] for name in self._new_packer().columns}
        for name, arrays in lists.items():
            flat[name] = np.concatenate([np.zeros(0, np.int32), *arrays])
            flat[f"{name}.lengths"] = np.array([len(each) for each in arrays], np.int64)
        read = json.dumps([self._files_on_disk, self._texts_read, self._earlier_pass]).encode()
        flat["texts_read"] = np.frombuffer(read, np.uint8)
        source = self._source.state_dict() if self._state is None else self._state
        state = {"source": source, "generator": self._generator.bit_generator.state}
        state |= {"counts": self._counts, "packers": packers, "tree": self.tree}
        save_file(flat, path, metadata={"state": json.dumps(state)})

    def load(self, path: Path) -> None:
        """Continue where the stream stood that wrote a file; refuse changed texts before that point."""
        with safe_open(path, "numpy") as file:
            state = json.loads(file.metadata()["state"])
            has_digests = "texts_read" in file.keys()
            read = json.loads(file.get_tensor("texts_read").tobytes()) if has_digests else [None] * 3
            lists = {}
            for name in ["pieces", *self._new_packer().columns]:
                lengths = file.get_tensor(f"{name}.lengths")
                if len(lengths):
                    arrays = np.split(file.get_tensor(name), np.cumsum(lengths)[:-1])
                    lists[name] = [array.copy() for array in arrays]
        pieces = iter(lists.pop("pieces", []))
        self._rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        self._compare(*read)
        self._counts, self.tree = state["counts"], state["tree"]
        self._generator.bit_generator.state = state["generator"]
        self._packers.clear()
        for leaf, path_of_leaf, place, count in state["packers"]:
            packer = self._packers[tuple(leaf)]
            packer.path = path_of_leaf
            packer.place = place
            packer.pieces = [next(pieces) for _ in range(count)]
        self._read_from(state["source"])

    def _compare(self, files_on_disk: str | None, texts_read: Any, earlier_pass: Any) -> None:
        """Take over digests of read texts; if files have changed, read and compare the texts again."""
        self._texts_read = texts_read
        self._earlier_pass = earlier_pass
        if (expected := earlier_pass or texts_read) is None:
            print_note(
                f"{self.key}: the checkpoint, of an earlier version, has no digests of the texts that had been read: names and sizes "
                "of files and the first texts are compared, and nothing else"
            )
            return
        count = sum(texts for _, texts, _ in expected)
        again = list[list[Any]]()
        if files_on_disk == self._files_on_disk or not count:
            return
        print_note(
            f"{self.key}: files have been written, copied or moved since the run began; the {count:,} texts that had been read "
            "are read again and compared, others cannot be"
        )
        self._read_from(self._begin)
        left = count
        while left > 0 and (batch := self._next_batch(count - left)) is not None:
            rows = {name: values[:left] for name, values in batch.items()}
            left -= self._digest(rows, again)
        pairs = zip_longest(expected, again, fillvalue=[None, 0, ""])
        changed = [now if now[1] else before for before, now in pairs if before[1:] != now[1:]]
        if changed:
            raise RequestError(
                f"{self._label} has changed: texts{_name_files(changed)} are not those that the run to resume read, among its first "
                f"{count:,}; put back what was read, or start a new run in another folder."
            )
        for entry, now in [*zip(texts_read, again, strict=False), *zip(expected, again, strict=True)]:
            entry[0] = now[0]  # which may lie elsewhere now

    def _digest(self, batch: dict[str, list[Any]], read: list[list[Any]]) -> int:
        files = batch.get(STREAMED_FILE_COLUMN)
        columns = [batch[name] for name in (self._text_column, *self._columns_of_paths) if name in batch]
        for number, row in enumerate(zip(*columns, strict=True)):
            file = None if files is None else files[number]
            if not read or (read[-1][0] != file and len(read) < _MAX_FILES_APART):
                read.append([file, 0, ""])
            entry = read[-1]
            entry[1] += 1
            entry[2] = hashlib.sha256(f"{entry[2]}{json.dumps(row, default=str)}".encode()).hexdigest()[:32]
        return len(columns[0])

    def _begin_pass(self, passes: int) -> None:
        self._texts_read = []
        self._counts = dict.fromkeys(("texts", "blank", "tokens", "sequences", "has_ended"), 0)
        self._counts["earlier_passes"] = passes
        self._packers: dict[tuple[int, ...], Packer] = defaultdict(self._new_packer)
        self._read_from(self._begin)

    def _read_from(self, state: dict[str, Any]) -> None:
        self._state: dict[str, Any] | None = state  # which the source tells only when it has been read from
        self._source.load_state_dict(state)
        self._batches = self._source.iter(_TEXTS_AT_ONCE)

    def _read_on(self) -> None:
        """Read a batch of texts and add its sequences; end the pass if there is none."""
        counts = self._counts
        batch = self._next_batch(counts["texts"])
        self._state = None
        if batch is None:
            self._end_pass()
            return
        texts = batch[self._text_column]
        if self._texts_read is not None:
            self._digest(batch, self._texts_read)
        kept = [place for place, text in enumerate(texts) if text and text.strip()]
        self._note_blank(batch, sorted({*range(len(texts))} - {*kept}))
        counts["blank"] += len(texts) - len(kept)
        if self._held_out_share:
            kept = [place for place in kept if not belongs_to_share(texts[place], self._held_out_share)]
        if kept:
            tokens = self._tokenise([texts[place] for place in kept])["input_ids"]
            counts["tokens"] += sum(map(len, tokens))
            if self._read_paths is None:
                self._add(self._packers[()]({"input_ids": tokens}))
            else:
                self._pack_by_leaf(tokens, {name: [values[place] for place in kept] for name, values in batch.items()})
        counts["texts"] += len(texts)

    def _next_batch(self, before: int) -> dict[str, list[Any]] | None:
        """Return a pass's next rows, after `before` others, texts in the text column; None at its end."""
        try:
            with fetching(self._label):
                batch = next(self._batches, None)
        except (RequestError, DownloadError):  # which name the file
            raise
        except Exception:
            with convert_read_errors(f"{self._label}, after {before:,} texts, has something"):
                raise
        if batch is None:
            return None
        if self._text_column not in batch:
            columns = [name for name in batch if name != STREAMED_FILE_COLUMN]
            raise RequestError(no_column(self._label, self._text_column, columns))
        for place, text in enumerate(batch[self._text_column]):
            if not isinstance(text, str | None):
                raise RequestError(
                    f"{self._label}, after {before + place:,} texts{_name_files(_files(batch, [place]), ', in')}, has {text!r:.60} "
                    f"under {self._text_column!r}; expected text. Set text_column to the column that holds the text."
                )
        return batch

    def _note_blank(self, batch: dict[str, list[Any]], blank: Sequence[int]) -> None:
        counts = self._counts
        extent = "all" if len(blank) == len(batch[self._text_column]) else "some"
        is_refused = counts["texts"] == counts["blank"] and extent == "all"  # if the run begins so
        is_known = extent in self._told or counts["earlier_passes"] or (extent == "some" and counts["blank"])
        if not blank or is_refused or is_known:
            return
        self._told |= {extent, "some"}
        named = _name_files(_files(batch, blank))
        reason = f"blank or missing under {self._text_column!r}"
        line = f"a text{named}, after {counts['texts'] + blank[0]:,} others, is {reason}, and is left out, as all such texts are"
        if extent == "all":
            line = f"all {len(blank):,} texts{named} after the first {counts['texts']:,} are {reason}, and left out"
        print_note(f"{self._label}: {line}", f"{extent} texts blank")

    def _pack_by_leaf(self, tokens: list[list[int]], batch: dict[str, list[Any]]) -> None:
        import datasets

        assert self._read_paths is not None
        rows = datasets.Dataset.from_dict({name: batch[name] for name in self._columns_of_paths if name in batch})
        written = self._read_paths(rows, text=f"{self._label}, after {self._counts['texts']:,} texts")
        if self._packers and written.tree != self.tree:
            raise RequestError(
                f"{self._label}, after {self._counts['texts']:,} texts, has paths of another tree under {TREE_COLUMN!r}; expected "
                "paths of one tree. Assign all documents by the same tree."
            )
        self.tree = written.tree
        for ids, path in zip(tokens, written.paths.tolist(), strict=True):
            packer = self._packers[tuple(path[: self._depth])]
            self._add(packer({"input_ids": [ids], "memory_ids": [path], "ends_leaf": [False]}))

    def _add(self, packed: dict[str, list[Any]]) -> None:
        for values in zip(*packed.values(), strict=True):
            named = zip(packed, values, strict=True)
            self._rows.append({name: np.asarray(each, np.int32) for name, each in named})
            self._counts["sequences"] += 1

    def _end_pass(self) -> None:
        """Add what packers still hold; refuse a pass without a sequence, and note the end of the first."""
        counts = self._counts
        for packer in self._packers.values():
            is_read = packer.fill is not None or sum(map(len, packer.pieces)) > DROPPED_SHARE * counts["tokens"]
            if packer.pieces and is_read and (counts["sequences"] or packer.fill is not None):
                self._add(packer.last() or {})
        if not counts["sequences"]:
            raise RequestError(too_few_tokens(self._label, counts["tokens"], self._sequence_length))
        counts["has_ended"] = 1
        if self._earlier_pass and self._texts_read and self._earlier_pass != self._texts_read:
            print_note(
                f"{self._label}: this pass has read other texts than the one before; files have changed",
                "changed texts",
            )
        self._earlier_pass = self._texts_read
        if not counts["earlier_passes"]:
            blank = f" ({counts['blank']:,} of them blank, and left out)" if counts["blank"] else ""
            print_note(
                f"{self._label}: all {counts['texts']:,} texts{blank}{_name_files(self._texts_read)} have been read once, "
                f"{counts['tokens']:,} tokens in {counts['sequences']:,} sequences; the stream begins again{self._remedy}",
                "a pass has ended",
            )


def _files(batch: dict[str, list[Any]], places: Iterable[int]) -> list[list[Any]]:
    names = batch.get(STREAMED_FILE_COLUMN)
    return [] if names is None else [[name] for name in dict.fromkeys(names[place] for place in places)]


def _name_files(entries: Sequence[Sequence[Any]] | None, word: str = " of") -> str:
    """Return the end of a phrase on texts, which names their known files, a single one with its folder."""
    files = [entry[0] for entry in entries or () if entry[0] is not None]
    names = [repr(file if len(files) == 1 else Path(file).name) for file in files]
    return f"{word} {first_few(names)}" if names else ""

"""Texts that are packed as they are read, for a corpus larger than the disk: sequences without end, resumed where they stopped."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from torch.utils.data import IterableDataset

from midus_hf.config.errors import RequestError
from midus_hf.config.wording import no_column, print_note
from midus_hf.data.corpus import TREE_COLUMN, DocumentPaths, reading
from midus_hf.data.packing import DROPPED_SHARE, Packer, beginning_within, tokenise, too_few_tokens

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerBase

_TEXTS_AT_ONCE = 100


class StreamedSequences(IterableDataset):
    """Sequences of a stream of texts without end, by the rules of `packed_sequences` and `leaf_sequences`, shuffled through a buffer.

    A pass reads every text once, and then the next begins. In memory are some texts, tokens that fill no sequence yet (of each
    leaf, with paths), and the buffer; `save` and `load` keep them, so that a stream goes on exactly. Without a buffer, a pass has the
    sequences of `packed_sequences` in their order; those of `leaf_sequences` come as soon as a leaf has the tokens, and its last one
    at the end of the pass. It is iterated in its own process, not by workers.

    Args:
        texts: Stream of `stream_rows`, or the part of it that a process reads.
        tokenizer: The tokenizer, which has an EOS token.
        sequence_length: T.
        documents_apart: Whether tokens attend only within their text.
        key: Name of the texts, for messages.
        text_column: Column that holds the text.
        vocab_size: Number of tokens of the model, which ids are checked against. Default: None, no check.
        read_paths: Returns the paths of rows, as `checked_paths`, with their name as `text`. Default: None, no paths.
        path_column: Column of the paths.
        depth: Number of levels of a path that name its leaf. Default: all.
        shuffle_buffer: Number of sequences of which the next is drawn; with 0 they come in order.
        seed: Seed of the draws, or several numbers.

    Raises:
        RequestError: If the first texts cannot be read or are blank, or all fill no sequence.
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
    ):
        self.key, self._sequence_length, self._shuffle_buffer = key, sequence_length, max(1, shuffle_buffer)
        self.tree: str | None = None  # fingerprint of the tree that the paths name
        self._source, self._begin, self._text_column, self._depth = texts, texts.state_dict(), text_column, depth
        self._read_paths, self._columns_of_paths = read_paths, [path_column, TREE_COLUMN]
        self._tokenise = partial(tokenise, tokenizer=tokenizer, vocab_size=vocab_size)
        beginning = beginning_within(sequence_length, tokenizer)
        fill = None if read_paths is None else tokenizer.eos_token_id
        self._new_packer = partial(Packer, sequence_length, documents_apart, beginning, fill)
        self._generator = np.random.default_rng(seed)
        self._rows: list[dict[str, np.ndarray]] = []  # the buffer, and those behind it
        self._begin_pass(0)
        while not self._rows:
            self._read_on()
            if self._counts["texts"] == self._counts["blank"]:
                raise RequestError(
                    f"{key} begins with {self._counts['texts']:,} texts that are blank or missing under {text_column!r}; set "
                    "text_column to the column that holds the text."
                )
        first = [(name, values.tolist()) for row in self._rows for name, values in row.items()]
        described = json.dumps([texts.info.description, first])
        # SHA-256 of the files and of the first sequences, by which a stream is told from others.
        self.digest = hashlib.sha256(described.encode()).hexdigest()

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        """Yield sequences from where the stream stands, with the columns of `packed_sequences` or `leaf_sequences`."""
        while True:
            while not self._counts["has_ended"] and len(self._rows) < self._shuffle_buffer:
                self._read_on()
            if not self._rows:
                self._begin_pass(self._counts["earlier_passes"] + 1)
                continue
            place = self._generator.integers(min(len(self._rows), self._shuffle_buffer))
            self._rows[0], self._rows[place] = self._rows[place], self._rows[0]
            yield {name: values.tolist() for name, values in self._rows.pop(0).items()}

    def save(self, path: Path) -> None:
        """Write where the stream stands."""
        packers, flat = [], {}
        for leaf, packer in self._packers.items():
            packers.append([leaf, packer.path, packer.place, len(packer.pieces)])
        lists = {"pieces": [piece for packer in self._packers.values() for piece in packer.pieces]}
        lists |= {name: [row[name] for row in self._rows] for name in self._new_packer().columns}
        for name, arrays in lists.items():
            flat[name] = np.concatenate([np.zeros(0, np.int32), *arrays])
            flat[f"{name}.lengths"] = np.array([len(each) for each in arrays], np.int64)
        source = self._source.state_dict() if self._state is None else self._state
        state = {"source": source, "generator": self._generator.bit_generator.state}
        state |= {"counts": self._counts, "packers": packers, "tree": self.tree}
        save_file(flat, path, metadata={"state": json.dumps(state)})

    def load(self, path: Path) -> None:
        """Go on from where the stream stood that wrote a file; sources and arguments are the same."""
        with safe_open(path, "numpy") as file:
            state = json.loads(file.metadata()["state"])
            lists = {
                name: [each.copy() for each in np.split(file.get_tensor(name), np.cumsum(lengths)[:-1])]
                for name in ["pieces", *self._new_packer().columns]
                if len(lengths := file.get_tensor(f"{name}.lengths"))
            }
        pieces = iter(lists.pop("pieces", []))
        self._rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        self._counts, self.tree = state["counts"], state["tree"]
        self._generator.bit_generator.state = state["generator"]
        self._packers.clear()
        for leaf, path_of_leaf, place, count in state["packers"]:
            packer = self._packers[tuple(leaf)] = self._new_packer()
            packer.path, packer.place, packer.pieces = path_of_leaf, place, [next(pieces) for _ in range(count)]
        self._read_from(state["source"])

    def _begin_pass(self, passes: int) -> None:
        self._counts = dict.fromkeys(("texts", "blank", "tokens", "sequences", "has_ended"), 0)
        self._counts["earlier_passes"] = passes
        self._packers: dict[tuple[int, ...], Packer] = {}
        self._read_from(self._begin)

    def _read_from(self, state: dict[str, Any]) -> None:
        self._state: dict[str, Any] | None = state  # which the source tells only when it has been read from
        self._source.load_state_dict(state)
        self._batches = self._source.iter(_TEXTS_AT_ONCE)

    def _read_on(self) -> None:
        """Read some texts into the buffer, or end the pass."""
        counts = self._counts
        with reading(f"{self.key}, after {counts['texts']:,} texts, has something"):
            batch = next(self._batches, None)
        self._state = None
        if batch is None:
            self._end_pass()
            return
        texts = batch.get(self._text_column)
        if texts is None:
            raise RequestError(no_column(self.key, self._text_column, list(batch)))
        if others := [text for text in texts if not isinstance(text, str | None)]:
            raise RequestError(
                f"{self.key}, after {counts['texts']:,} texts, has {others[0]!r:.60} under {self._text_column!r}; expected text. Set "
                "text_column to the column that holds the text."
            )
        kept = [place for place, text in enumerate(texts) if text and text.strip()]
        counts["blank"] += len(texts) - len(kept)
        if kept:
            tokens = self._tokenise([texts[place] for place in kept])["input_ids"]
            counts["tokens"] += sum(map(len, tokens))
            if self._read_paths is None:
                self._add(self._packer_of(())({"input_ids": tokens}))
            else:
                self._pack_by_leaf(tokens, {name: [values[place] for place in kept] for name, values in batch.items()})
        counts["texts"] += len(texts)

    def _pack_by_leaf(self, tokens: list[list[int]], batch: dict[str, list[Any]]) -> None:
        import datasets

        assert self._read_paths is not None
        rows = datasets.Dataset.from_dict({name: batch[name] for name in self._columns_of_paths if name in batch})
        written = self._read_paths(rows, text=f"{self.key}, after {self._counts['texts']:,} texts")
        if self._packers and written.tree != self.tree:
            raise RequestError(
                f"{self.key}, after {self._counts['texts']:,} texts, has paths of another tree under {TREE_COLUMN!r}; expected paths "
                "of one tree. Assign all documents by the same tree."
            )
        self.tree = written.tree
        for ids, path in zip(tokens, written.paths.tolist(), strict=True):
            packer = self._packer_of(tuple(path[: self._depth]))
            self._add(packer({"input_ids": [ids], "memory_ids": [path], "ends_leaf": [False]}))

    def _packer_of(self, leaf: tuple[int, ...]) -> Packer:
        if leaf not in self._packers:
            self._packers[leaf] = self._new_packer()
        return self._packers[leaf]

    def _add(self, packed: dict[str, list[Any]]) -> None:
        for values in zip(*packed.values(), strict=True):
            named = zip(packed, values, strict=True)
            self._rows.append({name: np.asarray(each, np.int32) for name, each in named})
            self._counts["sequences"] += 1

    def _end_pass(self) -> None:
        counts = self._counts
        for packer in self._packers.values():
            is_read = packer.fill is not None or sum(map(len, packer.pieces)) > DROPPED_SHARE * counts["tokens"]
            if packer.pieces and is_read and (counts["sequences"] or packer.fill is not None):
                self._add(packer.last() or {})
        if not counts["sequences"]:
            raise RequestError(too_few_tokens(self.key, counts["tokens"], self._sequence_length))
        counts["has_ended"] = 1
        if not counts["earlier_passes"] and int(os.environ.get("RANK", 0)) == 0:
            blank = f" ({counts['blank']:,} of them blank, and left out)" if counts["blank"] else ""
            print_note(
                f"{self.key}: all {counts['texts']:,} texts{blank} of this process have been read once, {counts['tokens']:,} tokens "
                f"in {counts['sequences']:,} sequences; the stream begins again"
            )

"""Packs: what a text says, opened by the names in it, from a glossary of names and texts."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midus_hf.config.fetched_blocks import BANKS_FOLDER
from midus_hf.config.options import option
from midus_hf.config.wording import first_few, install_extra
from midus_hf.memories.packs.options import PacksOptions, pack_layouts
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint
from upscalers.checkpoint.safetensors_format import ITEM_BYTES, TORCH_NAMES
from upscalers.checkpoint.tokenizer import has_tokenizer
from upscalers.methods.contract import register_method
from upscalers.methods.engram import tokenizer_of, vocabulary_of
from upscalers.methods.memory_methods import AttachedMemoryMethod
from upscalers.plan.plan import Plan
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.request.progress import Progress

if TYPE_CHECKING:
    import torch

    from midus_hf.memories.packs.names import NameTable

# Ids below this are the most frequent tokens of vocabularies that merge the most frequent pairs first.
_COMMON = 1000
# What may stand in front of a name: nothing, a space, an opening quote or bracket, a line break.
_IN_FRONT = ("", " ", '"', "(", "\n")
_TEXTS_AT_ONCE = 64
# A power of two.
_LATEST_POSITION = 64
_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Glossary:
    """Entries of a corpus: their names, their texts as token ids, and the entry of each spelling of a name, from 1."""

    titles: list[tuple[str, ...]]
    ids: list[list[int]]
    spellings: dict[tuple[int, ...], int]
    cut: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


@register_method("packs")
class Packs(AttachedMemoryMethod):
    """Keys and values of an entry's text for each name, which tokens attend to from the name on."""

    summary = "texts that every token attends to from their name on, without training (identity where no name stands)"
    paper = None
    identity = True
    identity_except = "texts with a name of the glossary, which change from the name on"
    memory_options = PacksOptions
    own_options = [
        ("corpus", str | None, option(None, 'rows {"name": ..., "text": ...}: a file, folder or Hub dataset')),
        ("max_tokens", int, option(128, "tokens of an entry's text at most; the rest is cut, which a line says")),
        (
            "common_names",
            bool,
            option(False, "whether a name may be one of the most frequent tokens, which almost every text has"),
        ),
        ("protect", str | None, option(None, "texts that must hold no name, and so keep their logits bit for bit")),
    ]

    def __init__(self, options: Any):
        super().__init__(options)
        self._glossary: Glossary | None = None

    @property
    def recorded_options(self) -> dict[str, Any]:
        recorded = super().recorded_options
        for name in ("corpus", "protect"):
            value = recorded[name]
            if value is not None and Path(value).expanduser().exists():
                recorded[name] = Path(value).name
        return recorded

    def check_machine(self) -> None:
        if self.options.corpus is None:
            raise RequestError(
                'corpus is missing; expected a file of names and texts, a row {"name": ..., "text": ...} for each entry. Pass --set '
                "corpus=FILE."
            )
        if importlib.util.find_spec("datasets") is None:
            raise RequestError(f"a corpus needs datasets, which is not installed; {install_extra('train')}.")

    def check(self, base: BaseCheckpoint) -> None:
        if self.options.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.options.max_tokens}; expected at least 1.")
        if self.options.corpus is not None and not has_tokenizer(path.name for path in base.folder.iterdir()):
            raise RequestError(
                f"{base.folder} has no tokenizer, by which the corpus becomes tokens; expected one beside the weights. Copy it there."
            )
        super().check(base)

    def remarks(self, base: BaseCheckpoint) -> list[str]:
        glossary, options = self.glossary(base), self.options
        remarks = [
            *super().remarks(base),
            f"{len(glossary.ids):,} entries of {glossary.tokens:,} tokens: a bank of {self.bank_bytes(base) / 1e6:,.1f} MB "
            f"in {TORCH_NAMES[base.dtype]} ({self._token_bytes(base):,} bytes a token)",
        ]
        if glossary.cut:
            remarks.append(
                f"entries longer than {options.max_tokens} tokens, of which the rest is cut: {glossary.cut:,}"
            )
        if options.protect is not None:
            remarks.append(f"protect: {self._protected(base):,} texts of {options.protect} hold no name")
        return remarks

    def bank_bytes(self, base: BaseCheckpoint) -> int:
        return self.glossary(base).tokens * self._token_bytes(base)

    def _token_bytes(self, base: BaseCheckpoint) -> int:
        """Return the bytes of the keys and values of a token, 2 L K d numbers."""
        sizes, layers = base.layout.sizes, len(self.layers(base))
        return 2 * layers * sizes.num_key_value_heads * sizes.head_dim * ITEM_BYTES[base.dtype]

    def glossary(self, base: BaseCheckpoint) -> Glossary:
        """Return the entries of the corpus, which is read once.

        Raises:
            RequestError: If a row has no name or no text, if two entries have the same name among others, or if a name is too common.
        """
        if self.options.corpus is None:  # in a dry run
            return Glossary([], [], {}, 0)
        if self._glossary is None:
            self._glossary = self._read(_tokenizer(base))
        return self._glossary

    def _read(self, tokenizer: Any) -> Glossary:
        corpus, texts = self.options.corpus, _entries(self.options.corpus)
        titles = list(texts)
        owners = {name: entry for entry, names in enumerate(titles, 1) for name in names}
        spellings: dict[tuple[int, ...], int] = {}
        common: dict[str, None] = {}
        for (name, entry), spelled in zip(owners.items(), spelled_names(tokenizer, [*owners]), strict=True):
            for ids in spelled:
                if spellings.setdefault(ids, entry) != entry:
                    raise RequestError(
                        f"name {name!r} of corpus {corpus} has the tokens of {titles[spellings[ids] - 1][0]!r}, another entry; "
                        "expected names that the tokenizer tells apart. Give both rows the same list of names, which joins them."
                    )
                if len(ids) == 1 and ids[0] < _COMMON:
                    common[name] = None
        if common and not self.options.common_names:
            raise RequestError(
                f"names of corpus {corpus} are one frequent token, which almost every text has: {first_few([*map(repr, common)])}; "
                "expected names that few texts have. Take them out, or pass --set common_names=true."
            )
        capitals = {f"{name[:1].upper()}{name[1:]}": entry for name, entry in owners.items()}
        for entry, spelled in zip(capitals.values(), spelled_names(tokenizer, [*capitals]), strict=True):
            for ids in spelled:  # a name as it is written goes before another one's capital
                spellings.setdefault(ids, entry)
        read = tokenizer(list(texts.values()), verbose=False)["input_ids"]
        most = self.options.max_tokens
        return Glossary(titles, [ids[:most] for ids in read], spellings, sum(len(ids) > most for ids in read))

    def _protected(self, base: BaseCheckpoint) -> int:
        """Return the number of protected texts, which hold no name."""
        import torch

        from midus_hf.topics.corpus import read_corpus

        glossary, tokenizer, table = self.glossary(base), _tokenizer(base), self._table(base)
        with refusing_requests():
            texts = list(read_corpus(self.options.protect, key="protect")["text"])
        held: dict[int, int] = {}
        for ids in tokenizer(texts, verbose=False)["input_ids"]:
            for entry in set(table.entries(torch.tensor([ids], dtype=torch.int64)).flatten().tolist()) - {0}:
                held[entry] = held.get(entry, 0) + 1
        if held:
            named = [f"{glossary.titles[entry - 1][0]!r} ({held[entry]} texts)" for entry in sorted(held)]
            raise RequestError(
                f"texts of {self.options.protect} hold names of the corpus: {first_few(named)}; expected none, for these texts would "
                "change. Take the names out of the corpus, or protect other texts."
            )
        return len(texts)

    def _table(self, base: BaseCheckpoint) -> "NameTable":
        from midus_hf.memories.packs.writing import name_table

        return name_table(self.glossary(base).spellings, vocabulary_of(base))

    def fill_banks(self, base: BaseCheckpoint, plan: Plan, folder: Path, progress: Progress) -> None:
        from midus_hf.memories.packs.writing import write_packs

        (name,) = plan.new_memories
        glossary = self.glossary(base)
        model = _load(folder)
        layout = pack_layouts(model.config.get_text_config().memories())[name]
        progress.stage("reading the corpus", len(glossary.ids), "entries")
        write_packs(
            folder / BANKS_FOLDER / name,
            layout,
            glossary.titles,
            self._table(base),
            rotation_angles(model, layout.layers),
            [len(ids) for ids in glossary.ids],
            read_packs(model, layout.layers, glossary.ids, progress),
            model.dtype,
            _FILE_BYTES,
        )


def _entries(corpus: str) -> dict[tuple[str, ...], str]:
    """Return the text of each entry by its names; texts of rows of the same names are joined by a line break."""
    from midus_hf.topics.corpus import read_rows

    with refusing_requests():
        rows = read_rows("corpus", corpus)
    missing = {"name", "text"} - set(rows.column_names)
    if missing:
        raise RequestError(
            f"corpus {corpus} has the columns {', '.join(rows.column_names)}; expected name and text. Rename them, or write a row "
            '{"name": ..., "text": ...} for each entry.'
        )
    texts: dict[tuple[str, ...], str] = {}
    first_row: dict[str, int] = {}
    owner: dict[str, tuple[str, ...]] = {}
    for number, row in enumerate(rows, 1):
        text = row["text"]
        given = row["name"] if isinstance(row["name"], list) else [row["name"]]
        if not given or not all(isinstance(name, str) and name.strip() for name in given):
            raise RequestError(
                f"row {number} of corpus {corpus} has the name {row['name']!r}; expected a name, or a list of names. Write one, or "
                "take the row out."
            )
        if not isinstance(text, str) or not text.strip():
            raise RequestError(
                f"row {number} of corpus {corpus} has the text {text!r}; expected what is to be known of {given[0]!r}. Write it, or "
                "take the row out."
            )
        names = tuple(dict.fromkeys(name.strip() for name in given))
        for name in names:
            if owner.setdefault(name, names) != names:
                raise RequestError(
                    f"row {number} of corpus {corpus} has the name {name!r}, which row {first_row[name]} has beside other names; "
                    "expected one list of names for an entry. Give both rows the same names, which joins them."
                )
            first_row.setdefault(name, number)
        texts[names] = f"{texts[names]}\n{text}" if names in texts else text
    return texts


def spelled_names(tokenizer: Any, names: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Return for each name its token ids where texts have it: at their beginning, behind a space, quote, bracket or line break.

    The ids are those of tokens that hold a character of the name, so a space or quote may be part of the first.
    """
    spelled: list[dict[tuple[int, ...], None]] = [{} for _ in names]
    for front in _IN_FRONT:
        texts = [front + name for name in names]
        read = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False) if texts else {}
        for found, ids, offsets in zip(
            spelled, *(read.get(key, ()) for key in ("input_ids", "offset_mapping")), strict=True
        ):
            own = tuple(token for token, (_, end) in zip(ids, offsets, strict=True) if end > len(front))
            if own:
                found[own] = None
    return [list(found) for found in spelled]


def _tokenizer(base: BaseCheckpoint) -> Any:
    tokenizer = tokenizer_of(base)
    if not tokenizer.is_fast:
        raise RequestError(
            f"the tokenizer of {base.folder} is a {type(tokenizer).__name__}, which does not tell where its tokens stand in a text; "
            "expected one with tokenizer.json. Convert it with transformers."
        )
    return tokenizer


def _load(folder: Path) -> Any:
    from transformers import AutoConfig

    from midus_hf.saved_models import auto_class_of

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = auto_class_of(config).from_pretrained(folder, dtype="auto", local_files_only=True, trust_remote_code=False)
    return model.eval()


def rotation_angles(model: Any, layers: Sequence[int]) -> "torch.Tensor":
    """Return the angles by which a position rotates the keys of layers, `[L, r]`, float64, in radians; 0 where none is rotated.

    A position rotates by the angle of position 1, which is known better from a later one: of that, the whole turns are known.

    Args:
        model: A model with packs, whose bank is not open or empty.
        layers: Indices of the L layers that have the memory.
    """
    import torch

    from midus_hf.memories.hosting.parts import decoder_of

    stack = decoder_of(model)
    recorders = [_Recorder(stack.layers[layer]) for layer in layers]
    with torch.no_grad():
        stack(torch.zeros(1, _LATEST_POSITION + 1, dtype=torch.int64, device=model.device), use_cache=False)
    found = []
    for recorder in recorders:
        turns = [part[0].double().cpu() for part in recorder.turns()]  # [T, r]
        angle, position = torch.atan2(turns[1][1], turns[0][1]), 1
        while position < _LATEST_POSITION:
            position *= 2
            within = torch.atan2(turns[1][position], turns[0][position])
            whole = ((angle * position - within) / (2 * torch.pi)).round()
            angle = (within + 2 * torch.pi * whole) / position
        found.append(angle)
    return torch.stack(found)


def read_packs(
    model: Any, layers: Sequence[int], texts: Sequence[Sequence[int]], progress: Progress
) -> Iterator["torch.Tensor"]:
    """Yield the keys and values of texts, which a model reads a few at a time; keys are moved to the positions -m to -1.

    Args:
        model: A model with packs, whose bank is not open or empty.
        layers: Indices of the L layers that have the memory.
        texts: Token ids of each text, of m tokens.
        progress: Display, which advances by one for each text.

    Yields:
        `[m, L, 2, K, d]`, in the dtype of the model.
    """
    import torch

    from midus_hf.memories.hosting.parts import decoder_of

    stack = decoder_of(model)
    recorders = [_Recorder(stack.layers[layer]) for layer in layers]
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        part = texts[first : first + _TEXTS_AT_ONCE]
        lengths = torch.tensor([len(ids) for ids in part])
        # Behind each text at least one more token, whose rotation is by the text's length.
        tokens = torch.zeros(len(part), int(lengths.max()) + 1, dtype=torch.int64)
        for row, ids in enumerate(part):
            tokens[row, : len(ids)] = torch.tensor(ids)
        with torch.no_grad():
            stack(tokens.to(model.device), use_cache=False)
        recorded = [recorder.moved(lengths) for recorder in recorders]  # [B, T, 2, K, d] a layer
        for row, length in enumerate(lengths.tolist()):
            yield torch.stack([of_layer[row, :length] for of_layer in recorded], dim=1)
            progress.advance()


class _Recorder:
    """What the attention of a layer reads in a pass: keys and values, and their rotation."""

    def __init__(self, layer: Any):
        from midus_hf.memories.hosting.heads import host_of_heads

        self.layer = layer
        host_of_heads(layer).changes.append(self)

    def attend(self, own: Any, module: Any, *heads: Any, **kwargs: Any) -> Any:
        """Attend as before, and record."""
        _, self.key, self.value, _ = heads
        self.rotation, self.module = self.layer.call.rotation, module
        return own(module, *heads, **kwargs)

    def turns(self) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Return cosines and sines of the rotation of keys, each `[B, T, r]`; those of no rotation if there is none."""
        import torch

        if self.rotation is None:
            none = torch.zeros(1, *self.key.shape[2:], device=self.key.device)
            return none + 1, none
        if not isinstance(self.rotation, tuple):
            raise RequestError(
                f"{type(self.module).__name__} rotates keys by complex numbers; expected cosines and sines. Choose another method."
            )
        if not self.module.config.rotates:
            return torch.ones_like(self.rotation[0]), torch.zeros_like(self.rotation[1])
        return self.rotation

    def moved(self, lengths: "torch.Tensor") -> "torch.Tensor":
        """Return keys, moved back by the length of each row's text, and values: `[B, T, 2, K, d]`."""
        import torch

        from midus_hf.memories.hosting.heads import moved_back

        rows = torch.arange(len(lengths))
        cos, sin = (part.expand(len(lengths), -1, -1)[rows, lengths][:, None] for part in self.turns())
        key = moved_back(self.module, self.key, (cos, sin))
        return torch.stack([key, self.value], dim=1).permute(0, 3, 1, 2, 4)  # from [B, 2, K, T, d]

"""Vocabulary: tokens that the base's tokenizer lacks, with rows of the embedding and the head."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midus_hf.config.errors import RequestError
from midus_hf.config.options import option
from midus_hf.files.checkpoint_files import CONFIG_FILE, GENERATION_CONFIG
from midus_hf.memories.engram.options import NgramOptions
from midus_hf.memories.packs.options import PacksOptions
from upscalers.architecture.layer_tensors import Config
from upscalers.checkpoint.base_checkpoint import BaseCheckpoint, read_config
from upscalers.checkpoint.new_tokens import NewTokens, ids_in_use, new_tokens, read_tokens
from upscalers.checkpoint.tokenizer import add_tokens, has_tokenizer
from upscalers.methods.contract import Method, register_method
from upscalers.methods.engram import tokenizer_of, vocabulary_of
from upscalers.plan.plan import Base, Plan
from upscalers.tensors.recipes import Recipe
from upscalers.tensors.vocabulary_rows import new_rows_of, replaced_rows, rows_by_token, token_sizes

# Memories that read what the base's tokenizer makes of texts, by the name of their method.
_READING_TOKENS: dict[type, str] = {NgramOptions: "engram", PacksOptions: "packs"}


@dataclass
class VocabularyOptions:
    """Options of `vocabulary`."""

    tokens: str | None = option(
        None,
        "new tokens: a text file with one a line; a JSON file, a list of them or a mapping of each to a text from whose pieces "
        "its row starts; or the folder or Hub id of a tokenizer, whose other tokens are added",
    )
    special: bool = option(False, "whether they are special tokens, which decoding can leave out")
    inside_words: bool = option(
        False, "whether they are found within words too, and may cut words that the base has as one token"
    )


@register_method("vocabulary")
class Vocabulary(Method):
    """Rows for new tokens, each the mean of the rows of the pieces that the base's tokenizer makes of its text."""

    summary = "new tokens, whose rows start at the mean of the rows of their pieces (identity of all others)"
    paper = None
    options_class = VocabularyOptions
    identity = True
    identity_except = "the logits of new tokens"
    default_placement = None
    adds_layers = False
    keeps_tokens = False

    def __init__(self, options: VocabularyOptions):
        super().__init__(options)
        self._added: dict[Path, NewTokens] = {}

    @property
    def recorded_options(self) -> dict[str, Any]:
        recorded = super().recorded_options
        tokens = recorded["tokens"]
        is_path = tokens is not None and Path(tokens).expanduser().exists()
        return {**recorded, "tokens": Path(tokens).name} if is_path else recorded

    def check_machine(self) -> None:
        if self.options.tokens is None:
            raise RequestError(
                "tokens is missing; expected a file of new tokens, or another tokenizer. Pass --set tokens=FILE."
            )

    def check(self, base: BaseCheckpoint) -> None:
        for kind, name in _READING_TOKENS.items():
            if any(isinstance(entry.options, kind) for entry in base.layout.memories.entries):
                raise RequestError(
                    f"the base has {name}, which reads texts as its tokenizer cuts them now; expected a base without. Add tokens to "
                    f"the base of that model, and then {name}."
                )
        has_weights = any(tensor.in_file.file is not None for tensor in base.tensors.values())
        if has_weights and self.options.tokens is not None and not has_tokenizer(base.folder):
            raise RequestError(
                f"{base.folder} has no tokenizer, to which tokens are added; expected one beside the weights. Copy it there."
            )
        rows_by_token(base)

    def plan(self, base: BaseCheckpoint, num_new_layers: int | None, placement: str | None) -> Plan:
        for name, value in (("num-new-layers", num_new_layers), ("placement", placement)):
            if value is not None:
                raise RequestError(f"{name} is {value!r}, but vocabulary adds no layer; expected none. Leave it out.")
        return Plan(tuple(map(Base, range(base.num_layers))), base.num_layers, new_rows=self._new(base).ids)

    def remarks(self, base: BaseCheckpoint) -> list[str]:
        new, size = self._new(base), vocabulary_of(base)
        if not new.ids:
            return []
        replaced = len(range(new.ids.start, min(new.ids.stop, size)))
        where = f", {replaced:,} of them in rows of the base that stand for no token" if replaced else ""
        return [
            f"{len(new.ids):,} new tokens, with the ids {new.ids.start} to {new.ids.stop - 1}{where}",
            *new.remarks,
        ]

    def concerns(self, base: BaseCheckpoint, plan: Plan) -> list[str]:
        left = vocabulary_of(base) % 4
        if not left or plan.new_rows.stop <= vocabulary_of(base):
            return []
        return [
            f"the base has {vocabulary_of(base):,} tokens, no multiple of 4: in float32 on a CPU, a pass of a few tokens may round "
            f"the logits of the last {left} of them otherwise than in the base."
        ]

    def config(self, base: BaseCheckpoint, plan: Plan) -> Config:
        sizes = {key: max(size, plan.new_rows.stop) for key, size in token_sizes(base).items()}
        return {**super().config(base, plan), **sizes}

    def recorded(self, base: BaseCheckpoint, plan: Plan) -> dict[str, Any]:
        replaced, reserved = replaced_rows(base, plan, rows_by_token(base)), self._new(base).reserved
        return {"replaced_rows": replaced, "first_token": reserved.start if reserved else None}

    def outer_recipes(self, base: BaseCheckpoint, plan: Plan, seed: int) -> dict[str, Recipe]:
        recipes, new = super().outer_recipes(base, plan, seed), self._new(base)
        for name in rows_by_token(base) if new.ids else ():
            recipes[name] = new_rows_of(base.tensors[name].shape, name, new.ids, new.pieces)
        return recipes

    def change_tokenizer(self, base: BaseCheckpoint, folder: Path) -> dict[str, Any]:
        new = self._new(base)
        return add_tokens(folder, new.tokenizer, range((new.reserved or new.ids).start, new.ids.stop))

    def _new(self, base: BaseCheckpoint) -> NewTokens:
        """Return the new tokens, which are read once. A dry run may have the base's config alone, and takes all tokens for new."""
        if base.folder not in self._added:
            self._added[base.folder] = self._read(base)
        return self._added[base.folder]

    def _read(self, base: BaseCheckpoint) -> NewTokens:
        size, source = vocabulary_of(base), self.options.tokens
        if source is None:
            return NewTokens(range(size, size))
        if not has_tokenizer(base.folder):
            path = Path(source).expanduser()
            count = len(read_tokens(path)[0]) if path.is_file() else 0
            unread = "the base has no tokenizer here: all tokens are taken for new, and ids begin behind the embedding"
            return NewTokens(range(size, size + count), ((0,),) * count, remarks=(unread,))
        tokenizer = tokenizer_of(base)
        if not tokenizer.is_fast:
            raise RequestError(
                f"the base's tokenizer is a {type(tokenizer).__name__}; expected a fast one, with tokenizer.json. Convert it with "
                "transformers."
            )
        generation = base.folder / GENERATION_CONFIG
        configs = {"language model": base.layout.values, CONFIG_FILE: read_config(base.folder)}
        configs |= {GENERATION_CONFIG: read_config(generation)} if generation.is_file() else {}
        options = self.options
        return new_tokens(source, tokenizer, size, ids_in_use(configs), options.special, options.inside_words)

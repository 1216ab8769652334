"""The table of tiny models whose memories act: laws of models are tested on each row."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from models import memory_models, pack_models
from models.hosting import host_of
from models.upscaled import upscaled_model
from pairs import by_default, in_turn
from tiny import NUM_LAYERS, tiny_model
from transformers import PreTrainedModel

# Norms, rotations and the softmax of Gemma-2 are in float32, and `generate` gives logits in it, in any dtype.
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float64: {"rtol": 1e-5, "atol": 1e-6}}
GREEDY = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    make: Callable[..., PreTrainedModel]  # of a family, a folder for its files, a dtype, and whether memories act
    small: dict[str, Any]  # options of a model that has few layers, to be compiled soon
    dtype: torch.dtype = (
        torch.float64
    )  # in which other orders of sums still choose the same slots, chapters and tokens
    fetches: int = 0  # number of memories whose blocks rows fetch by the ids that they name
    is_base_at_first: bool = True  # a model whose memories do not act computes what its base does
    takes_back: bool = True  # a sequence may be cropped, as assisted decoding does
    reads_ids: bool = False  # a pass of embeddings needs the ids of the tokens too
    is_reentrant: bool = True  # reentrant checkpointing is taken; routers with losses refuse it

    def model(self, family: str, folder: Path, dtype: torch.dtype | None = None, *, acting=True, small=False) -> Any:
        """Return a model in eval mode."""
        return self.make(family, folder, dtype or self.dtype, acting, **(self.small if small else {}))

    def given(self, rows: int = 2) -> dict[str, torch.Tensor]:
        """Return what a pass and `generate` take in addition to that many rows of tokens."""
        return {"memory_ids": memory_models.IDS[:rows]} if self.fetches else {}

    def of_training(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what a pass that trains takes in addition to tokens: labels, and what any pass takes."""
        return {"labels": tokens.clone(), **self.given(len(tokens))}


def _inserted(family, folder, dtype, acting, **options):
    return upscaled_model(family, dtype=dtype, acting=acting, **options)


def _chapters(family, folder, dtype, acting, **options):
    return memory_models.chapter_model(family, dtype=dtype, acting=acting, **options)


def _ultramem(family, folder, dtype, acting, **options):
    return memory_models.ultramem_model(family, dtype=dtype, **({} if acting else {"zero": "values"}), **options)


def _ngrams(family, folder, dtype, acting, num_hidden_layers=NUM_LAYERS, **options):
    entry = {"type": "engram", "layers": [1, 3], "rows": 199, "width": 16, "hash_heads": 4, **options}
    model = host_of(tiny_model(family, dtype, num_hidden_layers=num_hidden_layers), entry)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if acting and name.endswith(("value_table", "convolution")):
                value.normal_(generator=torch.Generator().manual_seed(4))
    return model


def _depth(family, folder, dtype, acting, **options):
    return memory_models.depth_model(family, dtype=dtype, acting=acting, **options)


def _packs(family, folder, dtype, acting, **options):
    return pack_models.pack_model(family, dtype, pack_models.ENTRIES if acting else [], **options)


def _fetched(family, folder, dtype, acting, **options):
    return memory_models.hierarchical_model(family, folder=folder, dtype=dtype, acting=acting, **options)


FEW = {"num_hidden_layers": 2}
EVERYTHING = {"output_projection": True, "inner_residual": True, "query_norm": "batch"}
INSERTED = {
    "midus-hml": {}, "headwise everywhere": {"new_layers": (0, 1, 3, 5, 6)},
    "headwise with everything": {"memory_options": EVERYTHING}, "midus-pkm": {"memory_type": "midus-pkm"},
    "linear": {"memory_type": "midus-linear"},
}  # fmt: skip
CHAPTERS = {"chunk": {"routing": "chunk"}, "token behind layers": {"routing": "token", "site": "behind-layer"}}
NGRAMS = {"ngram": {}, "ngram behind layers": {"site": "behind-layer", "kernel": 0, "min_order": 1}}
ULTRAMEMS, DEPTHS = memory_models.ULTRAMEMS, memory_models.DEPTHS
FETCHING = {**{kind: kind for kind in memory_models.FETCHING}, "all fetched": memory_models.FETCHING}
# Memories at every site: inserted, after attention and layers, parallel to feed-forward networks, across layers, inside.
CASES: dict[str, Case] = {}
for _name, _options in INSERTED.items():
    CASES[_name] = Case(partial(_inserted, **_options), {**FEW, "new_layers": (1,)}, torch.float32)
for _name, _options in CHAPTERS.items():
    _small = {"config": FEW, "layers": (0, 1)}
    CASES[_name] = Case(partial(_chapters, **_options), _small, takes_back=_name != "chunk", is_reentrant=False)
for _name, _options in NGRAMS.items():
    CASES[_name] = Case(partial(_ngrams, **_options), {**FEW, "layers": [0, 1]}, reads_ids=True)
for _name in ULTRAMEMS:
    _small = {"layers": [0], "into": [1]} if _name.endswith("skip") else {"layers": [0, 1]}
    CASES[f"ultramem {_name}"] = Case(partial(_ultramem, kind=_name), {**FEW, **_small})
for _name in DEPTHS:
    _same = _name not in ("joint", "added to reused")
    CASES[f"depth {_name}"] = Case(partial(_depth, kind=_name), FEW, is_base_at_first=_same)
CASES["packs"] = Case(partial(_packs, layers=[0, 1, 3]), {**FEW, "layers": None}, reads_ids=True)
for _name, _kinds in FETCHING.items():
    _count = 1 if _name in memory_models.FETCHING else len(_kinds)
    CASES[_name] = Case(partial(_fetched, kind=_kinds), {"base": FEW, "layers": [1]}, fetches=_count)
# Rows whose lines of ours other rows run too. They run with the product, and except for headwise, which another row has in every
# layer, in test_moda.py, test_outputs.py and test_hierarchical.py, which have a test for each kind.
_REPEATED = {"midus-hml", "ultramem own", "ultramem ring", *memory_models.FETCHING} - {"hier-kv"}
_REPEATED |= {f"depth {kind}" for kind in ("default", "bias", "some", "attention", "added to reused")}
USUAL = [name for name in CASES if name not in _REPEATED]
# One for each module of memory, at every site, where versions are the oldest and the newest have run the usual ones.
FEWEST = ["midus-hml", "midus-pkm", "chunk", "token behind layers", "ngram", "ultramem shared skip"]
FEWEST += ["depth reused", "depth projected", "packs", "all fetched"]


def chosen(names: Iterable[str] = CASES) -> list[str]:
    """Return those of these rows that run, as `by_default` chooses them."""
    names = list(names)
    return by_default(_among(USUAL, names), names, fewest=_among(FEWEST, names))


def chosen_in_turn(columns: Iterable[Any], names: Iterable[str] = CASES) -> list[tuple[str, Any]]:
    """Return those of these rows that run, each with one of the columns, or with the product with each."""
    names = list(names)
    return in_turn(names, columns, kept=_among(USUAL, names), fewest=_among(FEWEST, names))


def _among(few: list[str], names: list[str]) -> list[str]:
    return [name for name in few if name in names]

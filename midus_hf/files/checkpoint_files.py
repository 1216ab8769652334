"""Which files lie in the folder of a checkpoint, by kind: what they are called and who writes them, declared once for all who ask.

A kind is a tuple of patterns, paths from the folder with `/` between their parts. Within a part `*` stands for anything, `#` for a
number and `@` for letters, digits and underscores. What is hidden is matched by patterns alone that begin with a dot.
"""

import re
from functools import cache
from itertools import chain
from pathlib import Path, PurePath

from midus_hf.config.fetched_blocks import BANK_AUDIT, BANK_DESCRIPTION, BANKS_FOLDER, TREE_FILES
from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import unfinished_name

Kind = tuple[str, ...]

CONFIG_FILE = "config.json"
"""The file without which no folder is a model."""

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
RECORD_FILE, CARD_FILE = "upscale.json", "README.md"
TEMPLATES_FOLDER = "additional_chat_templates"
RUN_CONFIG, RUN_LOG = "train_config.yaml", "log.jsonl"
EVENTS_FOLDER = "runs"

PARTIAL_MODEL = ".partial_model"
"""Where a run writes the trained model before it is moved into the output: the one folder that is a run's own, with all in it."""

DOWNLOADS = Path(".cache", "huggingface")
"""Where the hub's client keeps notes about what it downloaded into a folder; all in it is its own."""

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
"""What a Trainer calls the folder of a checkpoint to resume from."""

TRAINER_STATE = "trainer_state.json"
"""What a Trainer writes last of a checkpoint."""

MANIFEST_FILE = "manifest.json"
"""What a run writes last of a checkpoint, when all else of it is on the disk: sizes and digests of its other files."""

BEGUN_CHECKPOINT = f".{MANIFEST_FILE}.begun"
"""The file that a checkpoint has from its beginning until its manifest is there, and again from when its removal begins."""

BLOCK_STATES = "block_states"
"""The folder of a checkpoint that has a folder with the state of the blocks of each bank, by its number."""


def _unfinished(kind: Kind) -> Kind:
    """What `whole_file` calls files of a kind while they are written, and the journal of SQLite beside them."""
    return tuple(
        f"{folder}{slash}{unfinished_name(name, '@')}{end}"
        for folder, slash, name in (pattern.rpartition("/") for pattern in kind)
        for end in ("", "-journal")
    )


WEIGHTS: Kind = (SINGLE_FILE, "model-#-of-#.safetensors", INDEX_FILE)
"""Weights as `save_pretrained` and `upscale` call them. Shards of other names are those that an index names: `indexed_weights`."""

PARTS_OF_WEIGHTS: Kind = tuple(
    f"{part}{number}.safetensors" for part in ("trained", "frozen") for number in ("", "-#-of-#")
)
"""Weights in a checkpoint of a run whose frozen ones are shared with other checkpoints; its index names them."""

CONFIG: Kind = (CONFIG_FILE, "generation_config.json")
"""Written by `save_pretrained` and `upscale`."""

TOKENIZER: Kind = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", f"{TEMPLATES_FOLDER}/*.jinja"),
    *("processor_config.json", "preprocessor_config.json"),
)
"""Written by `save_pretrained` of tokenizers and processors: names that a library chose."""

TERMS: Kind = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")
"""Under which a model may be used, carried on by all that is made of it: by `upscale`, `strip`, edits and training."""

TRAVELLING: Kind = (
    *TOKENIZER,
    *(
        "tokenizer*",
        "vocab*",
        "merges*",
        "*.model",
        "*.tiktoken",
        "chat_template*",
        "*.jinja",
        "*processor_config.json",
    ),
    *("generation_config.json", "SYSTEM_PROMPT*"),
    *TERMS,
)
"""What belongs to a model beside its weights and config, as authors of bases call it: copied by `upscale`, `strip` and edits.

It is wider than `TOKENIZER`: what is of this kind alone is only theirs where they have written the whole folder.
"""

CODE: Kind = ("modeling_midus.py",)
"""The code that a model loads with where this package is not installed, written with its config."""

RECORD: Kind = (RECORD_FILE,)
"""What was done to the base, written by `upscale`, `strip` and edits, and carried on by training."""

CARD: Kind = (CARD_FILE,)
"""The model card, written by `upscale`, edits and training, and by libraries that train."""

BANKS: Kind = tuple(
    f"{BANKS_FOLDER}/*/{name}" for name in (BANK_DESCRIPTION, BANK_AUDIT, *TREE_FILES, "level-#.safetensors")
)  # fmt: skip
"""Blocks that texts fetch, written by `upscale`, edits of banks and training."""

ARGUMENTS: Kind = ("training_args.bin",)
"""What `Trainer.save_model` puts beside a model."""

STATE: Kind = (TRAINER_STATE,)
"""What `Trainer.save_state` puts beside a model, and every checkpoint has."""

MANIFEST: Kind = (MANIFEST_FILE,)
"""By which a checkpoint of a run is known to be whole."""

ADAPTERS: Kind = ("adapter_model.safetensors", "adapter_config.json")
"""What PEFT writes instead of weights. A run merges them at its end, so that checkpoints alone have them."""

_STATES_OF_BLOCKS: Kind = tuple(
    f"{BLOCK_STATES}/*/{name}" for name in ("touched.json", "level-#.safetensors", "level-#-#.safetensors", BANK_AUDIT)
)

RESUMED: Kind = (
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("pytorch_model_fsdp*", "pytorch_model_fsdp*/*", "optimizer_*/*"),  # sharded by FSDP
    *("pytorch_model_fsdp*/.metadata", "optimizer_*/.metadata"),
    *("global_step*/*", "latest", "zero_to_fp32.py"),  # by DeepSpeed
    *_STATES_OF_BLOCKS,
)
"""What a Trainer needs to go on, in a checkpoint beside its model: optimizer, schedule, random state, state of blocks."""

RUN: Kind = (RUN_CONFIG, RUN_LOG)
"""The options and the log of a run, written into its output by `midus train` and `midus sft`."""

EVENTS: Kind = (f"{EVENTS_FOLDER}/events.out.tfevents.*", f"{EVENTS_FOLDER}/*/events.out.tfevents.*")
"""Written into the output of a run for TensorBoard."""

UNFINISHED_RUN: Kind = _unfinished(RUN)
"""What a run that was killed leaves of its own files."""

_JOURNAL_OF_AUDIT = f"{BANK_AUDIT}-journal"
"""Of an audit that is changed where it lies."""

UNFINISHED_MANIFEST: Kind = (BEGUN_CHECKPOINT, *_unfinished(MANIFEST))
"""What a checkpoint has that was begun and not finished."""

UNFINISHED_BANKS: Kind = (*_unfinished(BANKS), f"{BANKS_FOLDER}/*/{_JOURNAL_OF_AUDIT}")
"""The same of banks."""

UNFINISHED_STATES: Kind = (*_unfinished(_STATES_OF_BLOCKS), f"{BLOCK_STATES}/*/{_JOURNAL_OF_AUDIT}")
"""The same of the state of blocks."""

HUB: Kind = (".gitattributes",)
"""What the hub adds to a repository, and its client brings along."""

_WILD = {"*": ".*", "#": "[0-9]+", "@": "[A-Za-z0-9_]+"}


def is_of(path: str | PurePath, *kinds: Kind) -> bool:
    """Whether files of some kinds are called so.

    Args:
        path: Relative to the folder of the checkpoint.
        kinds: Of which one suffices.
    """
    parts = PurePath(path).parts
    return any(_fits(parts, pattern) for pattern in chain(*kinds))


def globs(kind: Kind) -> list[str]:
    """The patterns of a kind for `Path.glob` and the hub's client, which know no numbers: some match more.

    Args:
        kind: Of files.
    """
    return [pattern.replace("#", "*").replace("@", "*") for pattern in kind]


def indexed_weights(folder: Path) -> frozenset[str]:
    """Names of the shards, beside it, that a folder's index of weights names; none where it has no sound one.

    `strip` and edits leave a base's shards their names, whatever these are.

    Args:
        folder: Of a checkpoint.
    """
    try:
        named = set(parse_json((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return frozenset()
    return frozenset(
        name for name in named if isinstance(name, str) and name.endswith(".safetensors") and "/" not in name
    )


def _fits(parts: tuple[str, ...], pattern: str) -> bool:
    wanted = pattern.split("/")
    return len(wanted) == len(parts) and all(
        (not name.startswith(".") or part.startswith(".")) and _expression(part).fullmatch(name)
        for name, part in zip(parts, wanted, strict=True)
    )


@cache
def _expression(part: str) -> re.Pattern[str]:
    return re.compile("".join(_WILD.get(letter) or re.escape(letter) for letter in part), flags=re.DOTALL)

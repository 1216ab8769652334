"""The files in a checkpoint's folder, by kind: their names and who writes them, declared in one place.

A kind is a tuple of patterns. A pattern is a path relative to the folder, with `/` between its parts. Within a part,
`*` stands for anything, `#` for a number and `@` for letters, digits and underscores. Hidden names match only patterns
that begin with a dot.
"""

import re
from functools import cache
from itertools import chain
from pathlib import Path, PurePath

from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, BANKS_FOLDER, TREE_FILES
from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import unfinished_name

Kind = tuple[str, ...]

# The file that every model's folder has.
CONFIG_FILE = "config.json"

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Weights as torch saves them, which bases may have.
PICKLED_FILE, PICKLED_INDEX_FILE = "pytorch_model.bin", "pytorch_model.bin.index.json"
RECORD_FILE, CARD_FILE = "upscale.json", "README.md"
TEMPLATES_FOLDER = "additional_chat_templates"
RUN_CONFIG, RUN_LOG = "train_config.yaml", "log.jsonl"
EVENTS_FOLDER = "runs"

# Folder in which a run writes the trained model before it is moved into the output. The run owns everything in this
# folder.
PARTIAL_MODEL = ".partial_model"

# Folder in which the hub's client keeps notes about its downloads. The client owns everything in this folder.
DOWNLOADS = Path(".cache", "huggingface")

# Name that a Trainer gives to the folder of a checkpoint to resume from.
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")

# The last file of a checkpoint that a Trainer writes.
TRAINER_STATE = "trainer_state.json"

# File with the sizes and digests of a checkpoint's other files. A run writes it last, when the others are on the disk.
MANIFEST_FILE = "manifest.json"

# File that marks a checkpoint as incomplete, until its manifest is written and again from the start of its removal.
BEGUN_CHECKPOINT = f".{MANIFEST_FILE}.begun"

# Folder of a checkpoint with one numbered folder per bank, for the state of the bank's blocks.
BLOCK_STATES = "block_states"


def _unfinished(kind: Kind) -> Kind:
    """Return the names of files of a kind while `whole_file` writes them, and the names of SQLite's journals beside them."""
    return tuple(
        f"{folder}{slash}{unfinished_name(name, '@')}{end}"
        for folder, slash, name in (pattern.rpartition("/") for pattern in kind)
        for end in ("", "-journal")
    )


# Weights, as named by `save_pretrained` and `upscale`. Shards with other names are found through an index:
# `indexed_weights`.
WEIGHTS: Kind = (SINGLE_FILE, "model-#-of-#.safetensors", INDEX_FILE)

# Weights in a checkpoint of a run that shares its frozen weights with other checkpoints. The checkpoint's index names
# them.
PARTS_OF_WEIGHTS: Kind = tuple(
    f"{part}{number}.safetensors" for part in ("trained", "frozen") for number in ("", "-#-of-#")
)

# Written by `save_pretrained` and `upscale`.
CONFIG: Kind = (CONFIG_FILE, "generation_config.json")

# Written by `save_pretrained` of tokenizers and processors, under names chosen by a library.
TOKENIZER: Kind = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", f"{TEMPLATES_FOLDER}/*.jinja"),
    *("processor_config.json", "preprocessor_config.json"),
)

# The terms of use of a model. `upscale`, `strip`, edits and training copy them to every model that they make from it.
TERMS: Kind = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")

# Files beside weights and config that belong to a model, as authors of bases name them. `upscale`, `strip` and edits
# copy them.
#
# This kind is wider than `TOKENIZER`. A file that only this kind matches counts as written by one of these commands
# only in a folder that the command has written as a whole.
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

# The code with which a model loads where this package is not installed, written with the model's config.
CODE: Kind = ("modeling_midus.py",)

# Record of what was done to the base, written by `upscale`, `strip` and edits, and copied by training.
RECORD: Kind = (RECORD_FILE,)

# The model card, written by `upscale`, edits and training, and by libraries that train.
CARD: Kind = (CARD_FILE,)

# Blocks that texts fetch, written by `upscale`, edits of banks and training.
BANKS: Kind = tuple(
    f"{BANKS_FOLDER}/*/{name}" for name in (BANK_DESCRIPTION, *TREE_FILES, "level-#.safetensors")
)  # fmt: skip

# Written by `Trainer.save_model` beside a model.
ARGUMENTS: Kind = ("training_args.bin",)

# Written by `Trainer.save_state` beside a model, and part of every checkpoint.
STATE: Kind = (TRAINER_STATE,)

# The file that shows that a run's checkpoint is complete.
MANIFEST: Kind = (MANIFEST_FILE,)

# Written by PEFT instead of weights. A run merges adapters at its end, so only checkpoints have them.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS: Kind = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)

_STATES_OF_BLOCKS: Kind = tuple(f"{BLOCK_STATES}/*/{name}" for name in ("touched.json", "level-#.safetensors"))

# Files beside the model that a Trainer needs to resume from a checkpoint: optimizer, schedule, random state, block
# states.
RESUMED: Kind = (
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("pytorch_model_fsdp*", "pytorch_model_fsdp*/*", "optimizer_*/*"),  # sharded by FSDP
    *("pytorch_model_fsdp*/.metadata", "optimizer_*/.metadata"),
    *("global_step*/*", "latest", "zero_to_fp32.py"),  # by DeepSpeed
    *_STATES_OF_BLOCKS,
)

# Options and log of a run, written into its output by `midus train` and `midus sft`.
RUN: Kind = (RUN_CONFIG, RUN_LOG)

# Written for TensorBoard into the output of a run.
EVENTS: Kind = (f"{EVENTS_FOLDER}/events.out.tfevents.*", f"{EVENTS_FOLDER}/*/events.out.tfevents.*")

# Unfinished options and logs that a killed run leaves behind.
UNFINISHED_RUN: Kind = _unfinished(RUN)

# Files of a checkpoint that was begun and not finished.
UNFINISHED_MANIFEST: Kind = (BEGUN_CHECKPOINT, *_unfinished(MANIFEST))

# Unfinished files of banks that a killed run leaves behind.
UNFINISHED_BANKS: Kind = _unfinished(BANKS)

# Unfinished files of block states that a killed run leaves behind.
UNFINISHED_STATES: Kind = _unfinished(_STATES_OF_BLOCKS)

# Files that the hub adds to a repository, and that its client downloads with the rest.
HUB: Kind = (".gitattributes",)

# Files that a trained model takes over from the model it was trained from: record, card and terms.
ACCOMPANYING: Kind = (*RECORD, *CARD, *TERMS)

# All files in a folder that upscale, strip or an edit wrote. Later training may have added some; checkpoints to resume
# from are left out, since they belong to a run.
OF_UPSCALED: Kind = (
    *(*WEIGHTS, *CONFIG, *TRAVELLING, *CODE, *RECORD, *CARD, *BANKS),
    *(*ARGUMENTS, *STATE, *RUN, *HUB),
)

_OF_TRAINED: Kind = (
    *(*WEIGHTS, *CONFIG, *TOKENIZER, *CODE, *BANKS, *ACCOMPANYING),
    *(*ARGUMENTS, *UNFINISHED_BANKS),
)

# All files of a run in its output, and in each of its checkpoints.
OF_OUTPUT: Kind = (*_OF_TRAINED, *RUN, *EVENTS, *UNFINISHED_RUN)
OF_CHECKPOINT: Kind = (
    *(*_OF_TRAINED, *PARTS_OF_WEIGHTS, *ADAPTERS, *STATE, *MANIFEST),
    *(*RESUMED, *UNFINISHED_MANIFEST, *UNFINISHED_STATES),
)

_WILD = {"*": ".*", "#": "[0-9]+", "@": "[A-Za-z0-9_]+"}


def is_of(path: str | PurePath, *kinds: Kind) -> bool:
    """Return whether the name of a file, relative to the folder of the checkpoint, fits one of several kinds."""
    parts = PurePath(path).parts
    return any(_fits(parts, pattern) for pattern in chain(*kinds))


def globs(kind: Kind) -> list[str]:
    """Return the patterns of a kind for `Path.glob` and the hub's client, which match more where the kind has a number."""
    return [pattern.replace("#", "*").replace("@", "*") for pattern in kind]


def indexed_weights(folder: Path, index: str = INDEX_FILE, suffix: str = ".safetensors") -> frozenset[str]:
    """Return the names of shards in a folder's index of weights, without names that lead to other folders.

    Without a valid index, the result is empty. `strip` and edits keep the names of a base's shards, whatever these are.
    """
    try:
        shard_names = set(parse_json((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return frozenset()
    return frozenset(
        name for name in shard_names if isinstance(name, str) and name.endswith(suffix) and "/" not in name
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

"""The files in a checkpoint's folder, by kind: their names and who writes them, declared in one place.

A kind is a tuple of patterns. A pattern is a path relative to the folder, with `/` between its parts, each as `fnmatch` and
`Path.glob` take it. Hidden names match only patterns that begin with a dot.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path, PurePath

from midus_hf.config.fetched_blocks import BANK_DESCRIPTION, BANKS_FOLDER, TREE_FILES
from midus_hf.config.wording import first_few
from midus_hf.files.json_text import parse_json
from midus_hf.files.whole_files import unfinished_name

Kind = tuple[str, ...]

# The file that every model's folder has.
CONFIG_FILE = "config.json"
GENERATION_CONFIG = "generation_config.json"

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
RECORD_FILE, CARD_FILE = "upscale.json", "README.md"
TEMPLATES_FOLDER = "additional_chat_templates"
RUN_CONFIG = "train_config.yaml"
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

# Folder of a checkpoint with one numbered folder per bank, for the state of the bank's blocks.
BLOCK_STATES = "block_states"


# Weights, as named by `save_pretrained` and `upscale`. Shards with other names are found through an index:
# `indexed_weights`.
_NUMBER = "[0-9]" * 5
WEIGHTS: Kind = (SINGLE_FILE, f"model-{_NUMBER}-of-{_NUMBER}.safetensors", INDEX_FILE)

# What a run has trained so far, in its checkpoints.
TRAINED_FILE = "trained.safetensors"
# Written by `save_pretrained` and `upscale`.
CONFIG: Kind = (CONFIG_FILE, GENERATION_CONFIG)

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
    *(GENERATION_CONFIG, "SYSTEM_PROMPT*"),
    *TERMS,
)

# The code with which a model loads where this package is not installed, written with the model's config.
CODE: Kind = ("modeling_midus.py",)

# Record of what was done to the base, written by `upscale`, `strip` and edits, and copied by training.
RECORD: Kind = (RECORD_FILE,)

# The model card, written by `upscale`, edits and training, and by libraries that train.
CARD: Kind = (CARD_FILE,)

_LEVELS: Kind = ("level-[0-9].safetensors", "level-[0-9][0-9].safetensors")

# Blocks that texts fetch, written by `upscale`, edits of banks and training.
BANKS: Kind = tuple(f"{BANKS_FOLDER}/*/{name}" for name in (BANK_DESCRIPTION, *TREE_FILES, *_LEVELS))

# Written by `Trainer.save_model` beside a model.
ARGUMENTS: Kind = ("training_args.bin",)

# With the log of a run: written beside a model by training and by `Trainer.save_state`, and part of every checkpoint.
STATE: Kind = (TRAINER_STATE,)

# First line of a Git LFS pointer, which a clone without git-lfs holds in place of a file.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"

# Written by PEFT instead of weights. A run merges adapters at its end, so only checkpoints have them.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTERS: Kind = (ADAPTER_WEIGHTS, ADAPTER_CONFIG)

_STATES_OF_BLOCKS: Kind = tuple(f"{BLOCK_STATES}/*/{name}" for name in _LEVELS)

# Files from which a run resumes: what trained, optimizer, schedule, random state, block states, and their manifest.
RESUMED: Kind = (
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("pytorch_model_fsdp*", "pytorch_model_fsdp*/*", "optimizer_*/*"),  # sharded by FSDP
    *("pytorch_model_fsdp*/.metadata", "optimizer_*/.metadata"),
    *("global_step*/*", "latest", "zero_to_fp32.py"),  # by DeepSpeed
    *(TRAINED_FILE, MANIFEST_FILE, *_STATES_OF_BLOCKS),
)

# Options of a run, written into its output by `midus train` and `midus sft`.
RUN: Kind = (RUN_CONFIG,)

# What a run says of the texts that it protected.
CERTIFICATE = "certificate.json"

# Unfinished options that a killed run leaves behind.
UNFINISHED_RUN: Kind = tuple(unfinished_name(name, "[0-9a-f]" * 8) for name in RUN)

# Files that the hub adds to a repository, and that its client downloads with the rest.
HUB: Kind = (".gitattributes",)

# Files that a trained model takes over from the model it was trained from: record, card and terms.
ACCOMPANYING: Kind = (*RECORD, *CARD, *TERMS)

# All files in a folder that upscale, strip or an edit wrote. Later training may have added some; checkpoints to resume
# from are left out, since they belong to a run.
OF_UPSCALED: Kind = (
    *(*WEIGHTS, *CONFIG, *TRAVELLING, *CODE, *RECORD, *CARD, *BANKS),
    *(*ARGUMENTS, *STATE, *RUN, CERTIFICATE, *HUB),
)


def is_begun_run(name: str) -> bool:
    """Return whether a run that has trained no model yet leaves an entry of this name in its output."""
    return (
        is_of(name, RUN, UNFINISHED_RUN)
        or name in (EVENTS_FOLDER, PARTIAL_MODEL)
        or bool(CHECKPOINT_NAME.fullmatch(name))
    )


def is_of(path: str | PurePath, *kinds: Kind) -> bool:
    """Return whether the name of a file, relative to the folder of the checkpoint, fits one of several kinds."""
    parts = PurePath(path).parts
    return any(_fits(parts, pattern.split("/")) for pattern in chain(*kinds))


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(
        fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
        for name, pattern in zip(parts, patterns, strict=True)
    )


def indexed_weights(folder: Path) -> frozenset[str]:
    """Return the names of shards in a folder's index of weights, without names that lead to other folders.

    Without a valid index, the result is empty. `strip` and edits keep the names of a base's shards, whatever these are.
    """
    try:
        shard_names = set(parse_json((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return frozenset()
    return frozenset(
        name for name in shard_names if isinstance(name, str) and name.endswith(".safetensors") and "/" not in name
    )


# Configs that name code of their own under `auto_map`, and the relative imports of code, as transformers follows both.
_CONFIGS_WITH_CODE = ("tokenizer_config.json", "*processor_config.json")
_RELATIVE_IMPORT = re.compile(r"^[ \t]*(?:import\s+\.(\S+)\s*$|from\s+\.(\S+)\s+import)", re.MULTILINE)
_MODULE = re.compile(r"\w[\w.-]*", re.ASCII)


def named_code(folder: Path) -> list[Path]:
    """Return the files of Python that tokenizer and processor configs of a folder name, and those that these import, sorted.

    Nothing is executed. Names that lead out of the folder, to another repository or to a file that is not there are passed over.
    """
    found: dict[str, Path] = {}
    wanted = named_modules(folder)
    while wanted:
        name = wanted.pop()
        path = folder / f"{name}.py"
        if name not in found and _MODULE.fullmatch(name) and path.is_file():
            found[name] = path
            imports = _RELATIVE_IMPORT.findall(path.read_text(encoding="utf-8", errors="replace"))
            wanted += [first or second for first, second in imports]
    return sorted(found.values())


def named_modules(folder: Path) -> list[str]:
    """Return the modules that tokenizer and processor configs of a folder name under `auto_map`, as `module.Class` in each place."""
    modules = []
    for path in (path for pattern in _CONFIGS_WITH_CODE for path in folder.glob(pattern)):
        try:
            named = [parse_json(path.read_text(encoding="utf-8")).get("auto_map")]
        except (OSError, ValueError, AttributeError):
            continue
        while named:
            value = named.pop()
            if isinstance(value, str):
                modules.append(value.partition(".")[0])
            elif isinstance(value, dict | list):
                named += value.values() if isinstance(value, dict) else value
    return modules


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a Git LFS pointer, which a clone without git-lfs holds in place of the file itself."""
    with path.open("rb") as file:
        return file.read(200).startswith(_LFS_POINTER)


def refuse_lfs_pointers(folder: Path, *kinds: Kind) -> None:
    """Refuse a checkpoint whose files are Git LFS pointers, if it is a folder.

    Args:
        folder: Folder of the checkpoint.
        *kinds: Kinds of files to look at; with `WEIGHTS`, shards of other names too.

    Raises:
        ValueError: If one of these files is a pointer.
    """
    names = indexed_weights(folder) if WEIGHTS in kinds else ()
    files = {*(folder / name for name in names), *(file for pattern in chain(*kinds) for file in folder.glob(pattern))}
    pointers = [str(file.relative_to(folder)) for file in sorted(files) if file.is_file() and is_lfs_pointer(file)]
    if pointers:
        are = "is a Git LFS pointer, not the file" if len(pointers) == 1 else "are Git LFS pointers, not the files"
        raise ValueError(
            f"{first_few(pointers)} of {folder} {are}; expected what git-lfs downloads. Run git lfs pull there."
        )

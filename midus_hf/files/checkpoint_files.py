"""The files in a checkpoint's folder by kind, declared in one place; and reading of JSON.

A kind is a tuple of patterns of paths relative to the folder, as `fnmatch` and `Path.glob` take them. Hidden names match only
patterns that begin with a dot.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from midus_hf.config.errors import RequestError, first_few

Kind = tuple[str, ...]
CONFIG_FILE, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
RECORD_FILE, CARD_FILE = "upscale.json", "README.md"
ADAPTER_CONFIG = "adapter_config.json"
# The options of a run, written into its output when it starts, and the certificate of its protected texts.
RUN_CONFIG, CERTIFICATE = "train_config.yaml", "certificate.json"
# The folder in which a run writes the trained model before it is moved into the output; the run owns all that is in it.
PARTIAL_MODEL = ".partial_model"
# In a checkpoint to resume from: what trained, states of blocks, digests of inputs, the Trainer's last file, digests of files.
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
TRAINED_FILE, BLOCK_STATES, INPUTS_FILE = "trained.safetensors", "block_states", "inputs.json"
TRAINER_STATE, MANIFEST_FILE = "trainer_state.json", "manifest.json"
STREAM_FILE = "stream-{}.safetensors"  # by the number of the process
# Folder in a checkpoint with one folder per bank, named after the bank's memory, and the file that identifies a bank of blocks.
BANKS_FOLDER, BANK_DESCRIPTION = "memory_bank", "bank.json"
# Files of a tree of topics, also copied into its bank. The second is written last and holds the fingerprint of the first.
TREE_FILES = ("tree.safetensors", "tree.json")
# As `save_pretrained` and `upscale` name weights. Shards with other names are found through an index: `indexed_weights`.
_NUMBER = "[0-9]" * 5
WEIGHTS: Kind = (SINGLE_FILE, f"model-{_NUMBER}-of-{_NUMBER}.safetensors", INDEX_FILE)
CONFIG: Kind = (CONFIG_FILE, GENERATION_CONFIG)
# Written by `save_pretrained` of tokenizers and processors, under names chosen by a library.
TOKENIZER: Kind = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("processor_config.json", "preprocessor_config.json"),
)
# The terms of use of a model, copied to every model that is made from it.
TERMS: Kind = ("LICENSE*", "LICENCE*", "COPYING*", "NOTICE*", "USE_POLICY*")
# Files of a model other than weights and config, with the usual names of authors. `upscale`, `strip` and edits copy them.
TRAVELLING: Kind = (
    *(*TOKENIZER, *TERMS, GENERATION_CONFIG, "SYSTEM_PROMPT*"),
    *("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken"),
    *("chat_template*", "*.jinja", "*processor_config.json"),
)
# The code with which a model loads where this package is not installed, written with the model's config.
CODE: Kind = ("modeling_midus.py",)
RECORD: Kind = (RECORD_FILE,)
CARD: Kind = (CARD_FILE,)
ADAPTERS: Kind = ("adapter_model.safetensors", ADAPTER_CONFIG)
GLOSSARY_FILE = "glossary.jsonl"  # names and texts that a model with packs reads
# Files that a trained model takes over from the model it was trained from.
ACCOMPANYING: Kind = (*RECORD, *CARD, *TERMS)
# All that is in a folder that we, training or the Hub wrote, except banks (of memories) and checkpoints to resume from (of a run).
OF_UPSCALED: Kind = (
    *(*WEIGHTS, *CONFIG, *TRAVELLING, *CODE, *RECORD, *CARD),
    *(TRAINER_STATE, "training_args.bin", RUN_CONFIG, CERTIFICATE, ".gitattributes"),
)


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; raise `RequestError`, with the path, if it cannot be read."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} is not JSON, or cannot be read ({error}). Repair or download it again.") from None


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Return the value of JSON; `ValueError` for other text, deep nesting and, if asked, twin keys."""
    try:
        return json.loads(text, object_pairs_hook=_each_once if unique_keys else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        ((key, count),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {key!r} {count} times")
    return read


def is_of(path: str | PurePath, *kinds: Kind) -> bool:
    """Return whether a file's name, relative to the checkpoint, is of one of these kinds."""
    parts = PurePath(path).parts
    return any(_fits(parts, pattern.split("/")) for pattern in chain(*kinds))


def _fits(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    return len(parts) == len(patterns) and all(
        fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
        for name, pattern in zip(parts, patterns, strict=True)
    )


def indexed_weights(folder: Path) -> frozenset[str]:
    """Return the shards that a folder's index names in the folder; none without a valid index."""
    try:
        names = set(parse_json((folder / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return frozenset()
    return frozenset(
        name for name in names if isinstance(name, str) and name.endswith(".safetensors") and "/" not in name
    )


# Configs that name custom code (a version's own `config.5.0.0.json` too), those of tokenizers and processors among them, code
# that runs without a name, and relative imports of code: transformers follows all of them.
CONFIGS_WITH_CODE: Kind = ("*config*.json",)
CUSTOM_GENERATE = "custom_generate/generate.py"
_NAMING = ("auto_map", "custom_pipelines", "configuration_files")
_READERS_WITH_CODE = ("tokenizer_config.json", "*processor_config.json")
_RELATIVE_IMPORT = re.compile(r"^[ \t]*(?:import\s+\.(\S+)\s*$|from\s+\.(\S+)\s+import)", re.MULTILINE)
_MODULE = re.compile(r"\w[\w.-]*", re.ASCII)


def named_code(folder: Path) -> list[Path]:
    """Return the Python files that tokenizer and processor configs name and import, sorted, unexecuted.

    Names that lead out of the folder, to another repository or to a missing file are skipped.
    """
    return imported_code(folder, named_modules(folder))


def imported_code(folder: Path, modules: Sequence[str]) -> list[Path]:
    """Return the files of modules of a folder and of what they import from it, sorted; others are skipped."""
    found: dict[str, Path] = {}
    wanted = list(modules)
    while wanted:
        name = wanted.pop()
        path = folder / f"{name}.py"
        if name not in found and _MODULE.fullmatch(name) and path.is_file():
            found[name] = path
            imports = _RELATIVE_IMPORT.findall(path.read_text(encoding="utf-8", errors="replace"))
            wanted += [first or second for first, second in imports]
    return sorted(found.values())


def named_modules(folder: Path) -> list[str]:
    """Return the modules of the classes that a folder's tokenizer and processor configs name."""
    paths = [path for pattern in _READERS_WITH_CODE for path in folder.glob(pattern)]
    return [name.partition(".")[0] for path in paths for name in named_classes(path)]


def named_classes(path: Path) -> list[str]:
    """Return what a config names as custom code, sorted: `module.Class` or `repository--module.Class`.

    Parts of the config count too, and so do configs that are read in its place (`configuration_files`).
    """
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    found: list[str] = []
    parts = [(content, "")]
    while parts:
        part, within = parts.pop()
        if isinstance(part, str) and within in ("auto_map", "impl", "configuration_files"):
            found.append(part)
        elif isinstance(part, list):
            parts += [(each, within) for each in part]
        elif isinstance(part, dict):
            for key, value in part.items():
                is_impl = (within, key) == ("custom_pipelines", "impl")
                parts.append((value, key if key in _NAMING or is_impl else within))
    return sorted(found)


def is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(200).startswith(b"version https://git-lfs.github.com/spec/v1")


def refuse_lfs_pointers(folder: Path, *kinds: Kind) -> None:
    """Raise `RequestError` if files of these kinds (or indexed shards) are Git LFS pointers."""
    names = indexed_weights(folder) if WEIGHTS in kinds else ()
    files = {*(folder / name for name in names), *(file for pattern in chain(*kinds) for file in folder.glob(pattern))}
    pointers = [str(file.relative_to(folder)) for file in sorted(files) if file.is_file() and is_lfs_pointer(file)]
    if pointers:
        are = "is a Git LFS pointer, not the file" if len(pointers) == 1 else "are Git LFS pointers, not the files"
        raise RequestError(
            f"{first_few(pointers)} of {folder} {are}; expected what git-lfs downloads. Run git lfs pull there."
        )

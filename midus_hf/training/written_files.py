"""Which files of an output a run has written, by their names: only these are ever removed."""

import os
import re
from fnmatch import fnmatch
from pathlib import Path

from midus_config.fetched_blocks import BANK_AUDIT, BANK_DESCRIPTION, BANKS_FOLDER

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
BLOCK_STATES = "block_states"
"""The folder of a checkpoint that has a folder with the state of the blocks of each bank, by its number."""
CONFIG_NAME = "train_config.yaml"
LOG_NAME = "log.jsonl"
PARTIAL_NAME = ".partial_model"
"""Where the trained model is written before it is moved into the output: the one folder that is a run's own."""
STATE_NAME = "trainer_state.json"
"""What a Trainer writes last of a checkpoint."""

ACCOMPANYING = ("upscale.json", "README.md", "LICENSE*", "NOTICE*")
"""What a trained model carries on from the one it came from: its record, its card, its terms."""

_MODEL = (
    *("adapter_model.safetensors", "adapter_config.json"),  # of a checkpoint with adapters
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("modeling_midus.py", "midus_*.py"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja", "training_args.bin"),
    *(
        f"{BANKS_FOLDER}/*/{BANK_DESCRIPTION}",
        f"{BANKS_FOLDER}/*/level-*.safetensors",
        f"{BANKS_FOLDER}/*/{BANK_AUDIT}*",
    ),
    *ACCOMPANYING,
)
_TRAINER_STATE = (
    *(STATE_NAME, "optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth"),
    *("pytorch_model_fsdp*", "pytorch_model_fsdp*/*", "optimizer_*/*"),  # sharded by FSDP
    *("global_step*/*", "latest", "zero_to_fp32.py"),  # by DeepSpeed
    *(
        f"{BLOCK_STATES}/*/{name}"
        for name in ("touched.json", "level-*.safetensors", "level-*.partial", f"{BANK_AUDIT}*")
    ),
)
_RUN = (CONFIG_NAME, LOG_NAME, f"{LOG_NAME}.partial", "runs/events.out.tfevents.*", "runs/*/events.out.tfevents.*")


_FOLDERS = (PARTIAL_NAME, "runs", "additional_chat_templates", BANKS_FOLDER)


def foreign_files(output: str | os.PathLike) -> list[str]:
    """What no run has written into its output: paths relative to it, in order; a folder ends in a slash.

    Links are never a run's.

    Args:
        output: The folder of a run.
    """
    output = Path(output)
    foreign: list[str] = []
    for path in sorted(output.iterdir()):
        if not _is_folder(path):
            inside = [path]
        elif path.name in _FOLDERS or CHECKPOINT_NAME.fullmatch(path.name):
            inside = sorted(entry for entry in path.rglob("*") if not _is_folder(entry))
        else:
            foreign.append(f"{path.name}/")
            continue
        foreign += [str(entry.relative_to(output)) for entry in inside if not _is_ours(entry, output)]
    return foreign


def remove_written(output: str | os.PathLike, path: str | os.PathLike) -> bool:
    """Remove what a run has written at a path, and folders that it leaves empty; what cannot be removed stays.

    Args:
        output: The folder of the run, which is never removed itself.
        path: It, or something in it; it need not exist.

    Returns:
        Whether nothing is left there.
    """
    output, path = Path(output), Path(path)
    if not os.path.lexists(path):
        return True
    try:
        if path == output or _is_folder(path):
            removed = [remove_written(output, entry) for entry in path.iterdir()]
            if path == output or not all(removed):
                return False
            path.rmdir()
        elif _is_ours(path, output):
            path.unlink(missing_ok=True)
    except OSError:
        return False
    return not os.path.lexists(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_ours(path: Path, output: Path) -> bool:
    """Whether a run writes a file of this name in this place, and not in another that a link leads to."""
    parts = path.relative_to(output).parts
    if any(output.joinpath(*parts[:depth]).is_symlink() for depth in range(1, len(parts) + 1)):
        return False
    if CHECKPOINT_NAME.fullmatch(parts[0]):
        return _matches(parts[1:], _MODEL + _TRAINER_STATE)
    if parts[0] == PARTIAL_NAME:
        return True
    return _matches(parts, _MODEL + _RUN)


def _matches(parts: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    """Whether a path matches one of the patterns, part by part."""
    return any(
        len(wanted := pattern.split("/")) == len(parts) and all(map(fnmatch, parts, wanted)) for pattern in patterns
    )

"""Variants that are a function of a person's own: what it is called with, and what it must leave and return.

The function is called in the process of its run as `teach(base=DIR, corpus=PATH, output=DIR, seed=INT, keys={...})`, where `keys` are
the keys of `midus train` that the variant has, the rate among them. It writes a model that `AutoModelForCausalLM` loads, or adapters
of PEFT, to `output`, and returns `{"trained_parameters": N, "tokens": M}`.
"""

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from midus_hf.files.checkpoint_files import ADAPTER_CONFIG, CONFIG_FILE

_RETURNED = ("trained_parameters", "tokens")


def check_function(variant: str, function: str) -> None:
    """Check that the file of a variant's function can be read and defines the function; nothing of the file runs.

    Raises:
        ValueError: If the file cannot be read, is not Python, or has no function of this name.
    """
    file, name = _parts(function)
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(
            f"variants.{variant}.function is {function!r}, whose file cannot be read: {error}. Expected a file of Python."
        ) from error
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if name not in defined:
        raise ValueError(
            f"variants.{variant}.function is {function!r}, but the file defines {', '.join(defined) or 'no function'}; expected "
            f"def {name}(base, corpus, output, seed, keys)."
        )


def function_record(function: str) -> dict[str, str]:
    """Return the name of a function and the SHA-256 of its file, by which a changed function is noticed."""
    file, name = _parts(function)
    return {"name": name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def teach(variant: str, function: str, base: str, output: Path, seed: int, keys: Mapping[str, Any]) -> dict[str, int]:
    """Call a variant's function, complete what it wrote, and return how many parameters and tokens it trained on.

    Adapters are merged into the base, and a model without a tokenizer gets the base's.

    Args:
        variant: Name of the variant, for messages.
        function: File and name of the function.
        base: Folder or Hub id of the base.
        output: Folder that the function writes the model to, which does not exist.
        seed: Seed of the run.
        keys: Keys of `midus train` of the run, `corpus` among them.

    Raises:
        ValueError: If the function returns no counts, or wrote no model.
    """
    returned = _load(function)(base=base, corpus=keys["corpus"], output=str(output), seed=seed, keys=dict(keys))
    counts = returned if isinstance(returned, Mapping) else {}
    if not all(isinstance(counts.get(name), int) and counts[name] >= 0 for name in _RETURNED):
        raise ValueError(
            f"variants.{variant}.function returned {returned!r}; expected a mapping with the whole numbers "
            f"{' and '.join(_RETURNED)}."
        )
    if (output / ADAPTER_CONFIG).is_file() and not (output / CONFIG_FILE).is_file():
        _merge_adapters(output)
    if not (output / CONFIG_FILE).is_file():
        raise ValueError(
            f"variants.{variant}.function wrote no {CONFIG_FILE} to its output; expected a model, as save_pretrained writes it."
        )
    if not (output / "tokenizer_config.json").is_file():
        from midus_hf.saved_models import load_tokenizer

        load_tokenizer(base).save_pretrained(output)
    return {name: int(counts[name]) for name in _RETURNED}


def _parts(function: str) -> tuple[Path, str]:
    file, _, name = function.rpartition(":")
    return Path(file).expanduser(), name


def _load(function: str) -> Callable[..., Any]:
    """Run the file of a function, and return the function."""
    file, name = _parts(function)
    specification = importlib.util.spec_from_file_location("midus_compared_function", file)
    assert specification is not None and specification.loader is not None, "the file was checked"
    module = importlib.util.module_from_spec(specification)
    # As for a script: what the file defines finds its module, and what lies beside the file can be imported.
    sys.modules[specification.name] = module
    sys.path.insert(0, str(file.absolute().parent))
    specification.loader.exec_module(module)
    loaded: Callable[..., Any] = getattr(module, name)
    return loaded


def _merge_adapters(folder: Path) -> None:
    """Write the model that adapters and their base make together to the folder of the adapters."""
    from peft import AutoPeftModelForCausalLM

    AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto").merge_and_unload().save_pretrained(folder)

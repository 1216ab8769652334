"""Checks of a run's keys that need no library, so that a mistake is told before torch and transformers are imported."""

import ast
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from midus_hf.config.wording import first_few
from midus_hf.model_names import check_column, check_sources, small_columns

# Columns of the formats of `midus sft`, in the order in which they are tried.
FORMATS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
)

# Keys that name what a run reads.
SOURCES = (
    *("corpus", "tree", "dataset_name", "model_name_or_path", "config_name", "tokenizer_name"),
    *("eval_text", "protect"),
)
# The key of the data, by command, and the classes that have the keys of arguments: package, file and name.
_DATA = {"train": "corpus", "sft": "dataset_name"}
_SHARED = (
    ("midus_hf", "training/optim/rates.py", "Rates"),
    ("midus_hf", "training/arguments.py", "MemoryArguments"),
    ("transformers", "training_args.py", "TrainingArguments"),
)
_CLASSES = {
    "train": (*_SHARED, ("midus_hf", "training/arguments.py", "TrainArguments")),
    "sft": (
        *_SHARED,
        ("midus_hf", "training/sft/arguments.py", "SftArguments"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("trl", "trainer/sft_config.py", "SFTConfig"),
    ),
}

# Packages, any of which serves a value of `report_to`, of `optim` or of `attn_implementation`; by the names of imports.
_REPORTERS = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "kubeflow": (),
    "tensorboard": ("tensorboard", "tensorboardX"),
    **{
        name: (name,)
        for name in (
            *("clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "mlflow", "neptune", "swanlab", "trackio"),
            "wandb",
        )
    },
}
_OPTIMIZERS = (
    (re.compile(r"adamw_torch_[48]bit"), "torchao"),
    (re.compile(r"adamw_torch_xla"), "torch_xla"),
    (re.compile(r"adamw_torch_npu_fused"), "torch_npu"),
    (re.compile(r"adamw_apex_fused"), "apex"),
    (re.compile(r"adamw_anyprecision"), "torchdistx"),
    (re.compile(r"(paged_|adamw_(bnb_)?8bit|ademamix|lion_|rmsprop_).*"), "bitsandbytes"),
    (re.compile(r"schedule_free_.*"), "schedulefree"),
    (re.compile(r"grokadamw"), "grokadamw"),
    (re.compile(r"stable_adamw"), "optimi"),
)
_ATTENTIONS = {
    "flash_attention_2": ("flash_attn", "kernels"),
    "flash_attention_3": ("flash_attn_interface", "kernels"),
}
# Optimizers that choose the parameters of their groups themselves.
_OWN_GROUPS = re.compile(r"(galore|apollo)_.*|(ada)?lomo")
_PACKAGE_OF_GROUPS = {
    "galore": "galore_torch",
    "apollo": "apollo_torch",
    "lomo": "lomo_optim",
    "adalomo": "lomo_optim",
}
# Where the name to install differs from the name to import.
_INSTALLED_AS = {
    "azureml": "azureml-sdk",
    "comet_ml": "comet-ml",
    "flash_attn": "flash-attn",
    "liger_kernel": "liger-kernel",
    "optimi": "torch-optimi",
}


def key_names(command: str) -> list[str] | None:
    """Return the names of the keys of `midus train` or `midus sft`, read from the sources of the classes that have them.

    None if a class is not where the versions that were tried have it; its keys are then known when it is imported.
    """
    names: dict[str, None] = {}
    for package, file, name in _CLASSES[command]:
        specification = importlib.util.find_spec(package)
        folders = specification.submodule_search_locations if specification is not None else None
        path = Path(folders[0], file) if folders else None
        if path is None or not path.is_file():
            return None
        classes = [node for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.ClassDef)]
        found = next((node for node in classes if node.name == name), None)
        if found is None:
            return None
        names.update(dict.fromkeys(each.target.id for each in found.body if _is_field(each)))  # type: ignore[attr-defined]
    return list(names)


def _is_field(node: ast.stmt) -> bool:
    """Return whether a statement of a class makes a field that a person gives."""
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_")


def check_early(command: str, keys: Mapping[str, Any]) -> None:
    """Check what can be told of the keys of `midus train` or `midus sft` without a library.

    Args:
        keys: Values by key, as YAML has them, whose types nobody has checked; keys that are not given are None.

    Raises:
        ValueError: If model or data are not named, the data lacks a column, a source does not exist, a package is absent, or the
            output cannot be written.
    """
    check_data(_DATA[command], keys.get(_DATA[command]))
    if keys.get("model_name_or_path") is None and keys.get("config_name") is None:
        raise ValueError("config has no 'model_name_or_path'; set it in the recipe, or by --model.")
    sources = sources_of(keys)
    check_sources(sources)
    check_packages(keys)
    output, resume = keys.get("output_dir"), keys.get("resume_from_checkpoint")
    if isinstance(output, str):
        folder = Path(output).expanduser()
        check_folder(folder, sources)
        files = sorted(os.listdir(folder)) if folder.is_dir() else []
        if files and not resume:
            raise holds_files(folder, files)
    data = keys[_DATA[command]]
    if not isinstance(data, str):
        return
    if command == "train":
        check_column("corpus", data, keys.get("text_column") or "text")
    elif (columns := small_columns(data)) is not None and format_of(columns) is None:
        raise no_format(data, columns)


def check_data(key: str, value: Any) -> None:
    """Check that the key of a run's data is given.

    Raises:
        ValueError: If it is not.
    """
    if not value:
        raise ValueError(f"config has no {key!r}; set it in the recipe, or by --{key}.")


def sources_of(keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return all that a run reads: the name of each key, with its path or id of a model or dataset."""
    sources: list[tuple[str, Any]] = []
    for key in SOURCES:
        value = keys.get(key)
        if isinstance(value, Mapping):
            sources += [(f"{key}.{name}", path) for name, path in value.items()]
        else:
            sources += [(key, path) for path in (value if isinstance(value, list) else [value])]
    return [(key, path) for key, path in sources if isinstance(path, str)]


def check_packages(keys: Mapping[str, Any]) -> None:
    """Check that the packages which keys need are installed.

    Raises:
        ValueError: If one is not, or an optimizer chooses parameters itself, whose groups a run with memories makes.
    """
    optim = _text(keys.get("optim"))
    targets = keys.get("optim_target_modules")
    if _OWN_GROUPS.fullmatch(optim) or targets is not None:
        key, value = ("optim", optim) if _OWN_GROUPS.fullmatch(optim) else ("optim_target_modules", targets)
        package = _PACKAGE_OF_GROUPS.get(optim.partition("_")[0])
        raise ValueError(
            f"{key} is {value!r}, for an optimizer that chooses its parameters itself{f' (package {package})' if package else ''}, "
            "where a run makes the groups of parameters; expected one such as adamw_torch. Leave it out."
        )
    for key, value, packages in _needed(keys, optim):
        if packages and all(importlib.util.find_spec(package) is None for package in packages):
            names = [_INSTALLED_AS.get(package, package) for package in packages]
            raise ValueError(
                f"{key} is {value!r}, which needs the package {' or '.join(names)}, not installed; run: pip install {names[0]}. Or "
                "leave it out."
            )


def _needed(keys: Mapping[str, Any], optim: str) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield keys with their values, and the packages of which each needs one."""
    reporters = keys.get("report_to")
    for name in reporters if isinstance(reporters, list) else [reporters]:
        yield "report_to", name, _REPORTERS.get(_text(name), ())
    for pattern, package in _OPTIMIZERS:
        if pattern.fullmatch(optim):
            yield "optim", optim, (package,)
            break
    attention = _text(keys.get("attn_implementation"))
    yield "attn_implementation", attention, ("kernels",) if "/" in attention else _ATTENTIONS.get(attention, ())
    for key, package in (("deepspeed", "deepspeed"), ("use_liger_kernel", "liger_kernel")):
        if keys.get(key):
            yield key, keys[key], (package,)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value) or "")


def check_folder(output: Path, sources: Iterable[tuple[str, str]]) -> None:
    """Check that a folder can be written, and neither holds an input of a run nor lies in one.

    Raises:
        ValueError: If it cannot, or does.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir is {str(output)!r}, a file; expected a folder.")
    ancestor = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
        raise ValueError(
            f"output_dir is {str(output)!r}, but {str(ancestor)!r} is no folder to write in; choose another."
        )
    for key, source in sources:
        if Path(source).exists():  # a name that is no path is the id of a model or dataset
            for outer, inner, verb in ((output, Path(source), "holds"), (Path(source), output, "lies in")):
                if inner.resolve().is_relative_to(outer.resolve()):
                    raise ValueError(
                        f"output_dir is {str(output)!r}, which {verb} the {key} {source!r}; choose another folder."
                    )


def holds_files(output: Path, files: list[str]) -> ValueError:
    """Return the error for an output that holds files and is not resumed."""
    return ValueError(
        f"output_dir is {str(output)!r}, which holds {first_few(files)}; choose another folder, remove it, or set "
        "resume_from_checkpoint: true."
    )


def format_of(columns: Iterable[str]) -> tuple[str, ...] | None:
    """Return the columns of the format of rows of `midus sft` that have these columns; None if there is none."""
    present = set(columns)
    return next((columns for columns in FORMATS if set(columns) <= present), None)


def no_format(source: str, columns: list[str]) -> ValueError:
    """Return the error for rows of no format."""
    formats = "; ".join(", ".join(columns) for columns in FORMATS)
    return ValueError(
        f"dataset_name is {source!r}, whose rows have {', '.join(columns) or 'nothing'}; expected the columns of a format "
        f"({formats}). Rename them."
    )

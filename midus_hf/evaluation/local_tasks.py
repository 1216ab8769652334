"""The tasks of `tasks/*.yaml`: lm-evaluation-harness tasks whose questions lie in a local folder.

A task file names its data as `${DATA}/piqa.jsonl`; the folder is put in when the task is used.
"""

from pathlib import Path
from typing import Any

import yaml

PREFIX = "midus_"
_FOLDER = Path(__file__).parent / "tasks"


def local_task_names() -> list[str]:
    """The short names of the local tasks: `boolq`, `piqa` and so on. lm-eval knows them as `midus_boolq`."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_local_task(name: str, data: str | Path) -> dict[str, Any]:
    """Read a local task.

    Args:
        name: Short name.
        data: Folder that holds `NAME.jsonl`: a row per question, with `question`, `choices`, `gold`; of atomic numbers, an element
            with its `name` and its `number`.

    Returns:
        A task configuration that lm-eval takes as it is.

    Raises:
        ValueError: If the folder does not hold the questions.
    """
    data = Path(data).resolve()
    if not (data / f"{name}.jsonl").is_file():
        raise ValueError(
            f"{data} holds no {name}.jsonl; expected a row of JSON per question: question, choices, gold "
            "(of atomic_numbers: name, number)."
        )
    config = yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    files = config["dataset_kwargs"]["data_files"]
    config["dataset_kwargs"]["data_files"] = {
        split: file.replace("${DATA}", str(data)) for split, file in files.items()
    }
    return config


def write_local_tasks(folder: str | Path, data: str | Path) -> list[Path]:
    """Write those local tasks whose questions a folder holds, with the folder put in, for `lm_eval --include_path FOLDER`.

    Returns:
        The files written.

    Raises:
        ValueError: If the folder holds the questions of none.
    """
    folder = Path(folder)
    held = [name for name in local_task_names() if (Path(data) / f"{name}.jsonl").is_file()]
    if not held:
        raise ValueError(
            f"{Path(data).resolve()} holds the questions of no local task; expected files such as piqa.jsonl."
        )
    configs = {name: load_local_task(name, data) for name in held}
    folder.mkdir(parents=True, exist_ok=True)
    for name, config in configs.items():
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (folder / f"{PREFIX}{name}.yaml").write_text(text, encoding="utf-8")
    return [folder / f"{PREFIX}{name}.yaml" for name in configs]

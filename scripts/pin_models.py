"""Computations of `scripts/pin.py` with tiny models, in processes of one thread with or without this project."""

import contextlib
import copy
import hashlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from scripts.pin_cases import Case  # noqa: E402


def prepare() -> None:
    """Set up a process: one thread, deterministic, silent."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def made(case: Case, folder: Path) -> Path:
    """Write the base and the checkpoint of a case, and return the checkpoint's folder."""
    from tiny import tiny_model

    from upscalers.runs.upscale import upscale

    current = folder / "base"
    tiny_model(case.family, **case.base).save_pretrained(current)
    for number, (method, options) in enumerate(case.steps):
        output = folder / f"made-{number}"
        upscale(base=current, method=method, output=output, options=copy.deepcopy(options), verify=False)
        current = output
    return made_from_scratch(current, case, folder / "scratch") if case.from_scratch else current


def made_from_scratch(source: Path, case: Case, folder: Path) -> Path:
    """Save a new model of a checkpoint's config with the case's changes of its memory, and return the model's folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    content = json.loads((source / "config.json").read_text())
    content["memory"] = [content["memory"][0] | case.changes]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    torch.manual_seed(10)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).save_pretrained(folder)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    """Return the model of a folder, in eval mode. `options` go to `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True, **options).eval()


def inputs(case: Case) -> dict[str, Any]:
    """Return the arguments of a forward pass: tokens `[2, 24]`, and the blocks that both texts fetch if they fetch any."""
    import torch
    from tiny import prompt

    ids = {"memory_ids": torch.tensor([[1, 4, 13], [-1, -1, -1]])} if case.fetches else {}
    return {"input_ids": prompt(), **ids}


def logits(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the logits `[2, 24, vocabulary]` of fixed tokens. Random numbers come from a fixed seed."""
    import torch

    torch.manual_seed(11)
    with torch.no_grad():
        return model(**arguments).logits


def generated(model: Any, arguments: dict[str, Any]) -> Any:
    """Return the logits `[2, 4, vocabulary]` of four tokens that are generated with a cache."""
    import torch

    torch.manual_seed(12)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    output = model.generate(**arguments, **settings, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.logits, 1)


def train(model: Any, case: Case, folder: Path) -> None:
    """Train what the method trains for three steps with AdamW, and leave the model in eval mode."""
    import torch

    from midus_hf.training.optim.freezing import set_trainable
    from midus_hf.training.trainer import MemoryTrainer

    set_trainable(model)
    batch = inputs(case)
    batch["labels"] = batch["input_ids"].clone()
    batch["labels"][:, :5] = -100  # a prompt, which some routers read
    torch.manual_seed(13)
    if case.by_trainer:
        from transformers import TrainingArguments

        settings: dict[str, Any] = {
            "max_steps": 3,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
        }
        quiet: dict[str, Any] = {
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
        }
        rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
        arguments = TrainingArguments(str(folder / "run"), per_device_train_batch_size=2, **settings, **quiet)
        with contextlib.redirect_stdout(io.StringIO()):  # the Trainer prints a summary there
            MemoryTrainer(model, arguments, train_dataset=rows).train()
    else:
        model.train()
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
        for _ in range(3):
            model(**batch, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


def digest(*parts: bytes | str) -> str:
    """Return the first 24 hexadecimal digits of the SHA-256 of some parts."""
    sha256 = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        sha256.update(f"{len(part)}:".encode() + part)
    return sha256.hexdigest()[:24]


def digest_of(tensor: Any) -> str:
    """Return the digest of a tensor's dtype, shape and bytes."""
    import torch

    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return digest(str(tensor.dtype), str(list(tensor.shape)), content)


def scratch() -> str | None:
    """Return the folder for temporary files, in memory if possible; None for the default folder."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None

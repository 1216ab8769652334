"""Pin what every method makes of every family: digests of files, configs and logits, compared with those that are committed.

    python scripts/pin.py                     compute everything again, and name what differs from scripts/pinned.json
    python scripts/pin.py --write             write scripts/pinned.json
    python scripts/pin.py --carried           load checkpoints by the code that they carry, where the package cannot be imported
    python scripts/pin.py --only 'llama moc'  those cases alone whose name has the pattern (a regular expression) in it

A case is a tiny random base of a family and one method or several, applied one after the other. Everything is computed in float32 by
one thread, so a digest is the same on every run on one kind of processor; another kind may round otherwise.
"""

import argparse
import contextlib
import copy
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
ROOT = Path(__file__).resolve().parent.parent
PINNED = Path(__file__).with_name("pinned.json")
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from scripts.pin_cases import Case, all_cases  # noqa: E402


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

    from upscalers import upscale

    current = folder / "base"
    tiny_model(case.family, **case.base).save_pretrained(current)
    for number, (method, options) in enumerate(case.steps):
        output = folder / f"made-{number}"
        upscale(base=current, method=method, output=output, options=copy.deepcopy(options), verify=False)
        current = output
    return made_from_scratch(current, case, folder / "scratch") if case.from_scratch else current


def made_from_scratch(source: Path, case: Case, folder: Path) -> Path:
    """Save a new model of a checkpoint's config, whose memory differs by what the case says, and return its folder."""
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
    """Return the model of a folder, in eval mode; `options` are those of `from_pretrained`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True, **options).eval()


def inputs(case: Case) -> dict[str, Any]:
    """Return the arguments of a forward pass: tokens `[2, 24]`, and which blocks both texts fetch where they fetch any."""
    import torch
    from tiny import prompt

    ids = {"memory_ids": torch.tensor([[1, 4, 13], [-1, -1, -1]])} if case.fetches else {}
    return {"input_ids": prompt(), **ids}


def logits(model: Any, given: dict[str, Any]) -> Any:
    """Return the logits `[2, 24, vocabulary]` of fixed tokens; what is drawn is drawn from one seed."""
    import torch

    torch.manual_seed(11)
    with torch.no_grad():
        return model(**given).logits


def generated(model: Any, given: dict[str, Any]) -> Any:
    """Return the logits `[2, 4, vocabulary]` of four tokens that are generated with a cache."""
    import torch

    torch.manual_seed(12)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    output = model.generate(**given, **settings, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.logits, 1)


def train(model: Any, case: Case, folder: Path) -> None:
    """Train three steps what the method says that trains, with AdamW; the model is in eval mode afterwards."""
    import torch

    from midus_hf.training import MemoryTrainer, set_trainable

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
        with contextlib.redirect_stdout(io.StringIO()):  # which the Trainer prints a summary to
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
    found = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        found.update(f"{len(part)}:".encode() + part)
    return found.hexdigest()[:24]


def digest_of(tensor: Any) -> str:
    """Return the digest of a tensor's dtype, shape and bytes."""
    import torch

    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return digest(str(tensor.dtype), str(list(tensor.shape)), content)


def digest_of_file(path: Path) -> str:
    """Return the digest of the tensors of a safetensors file by name, or of the content of a JSON file."""
    from safetensors import safe_open

    if path.suffix == ".json":
        return digest(json.dumps(without_versions(json.loads(path.read_text())), sort_keys=True))
    with safe_open(path, framework="pt") as file:
        return digest(*(part for name in sorted(file.keys()) for part in (name, digest_of(file.get_tensor(name)))))


def without_versions(content: Any) -> Any:
    """Return a config without versions and without what names files of code."""
    if isinstance(content, list):
        return [without_versions(each) for each in content]
    if isinstance(content, dict):
        kept = {key: value for key, value in content.items() if "version" not in key and key != "auto_map"}
        return {key: without_versions(value) for key, value in kept.items()}
    return content


def pinned(case: Case) -> dict[str, Any]:
    """Compute the digests of a case."""
    with tempfile.TemporaryDirectory(prefix="pin-", dir=scratch()) as temporary:
        folder = Path(temporary)
        checkpoint = made(case, folder)
        found: dict[str, Any] = {"config": digest_of_file(checkpoint / "config.json")}
        for path in [*checkpoint.glob("*.safetensors"), *(checkpoint / "memory_bank").glob("*/*.*")]:
            found[str(path.relative_to(checkpoint))] = digest_of_file(path)
        model = loaded(checkpoint)
        given = inputs(case)
        found["birth"] = digest_of(logits(model, given))
        train(model, case, folder)
        found |= {"trained": digest_of(logits(model, given)), "generated": digest_of(generated(model, given))}
        return dict(sorted(found.items()))


def scratch() -> str | None:
    """Return the folder for temporary files: in memory where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def machine() -> dict[str, str]:
    """Return what bits depend on: processor, vector instructions and versions."""
    import torch
    import transformers

    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "processor": f"{names[0] if names else 'unknown'}, {capability}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def computed(
    function: Callable[[Any], dict[str, Any]], parts: dict[str, Any], processes: int
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Call a function in several processes, and show a bar.

    Returns:
        What it returned for each part, in the order of parts, and what was raised for others, both by name.
    """
    from tqdm import tqdm

    found, failed = {}, {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        waiting = {pool.submit(function, part): name for name, part in parts.items()}
        for future in tqdm(as_completed(waiting), total=len(parts), disable=None):
            try:
                found[waiting[future]] = future.result()
            except Exception as error:
                failed[waiting[future]] = f"{type(error).__name__}: {error}"
    return {name: found[name] for name in parts if name in found}, failed


def write(found: dict[str, dict[str, Any]], about: dict[str, str]) -> None:
    """Write the file of digests, one line per case."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(digests)}" for name, digests in found.items())
    PINNED.write_text(f'{{"machine": {json.dumps(about)}, "cases": {{\n{lines}\n}}}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write scripts/pinned.json")
    parser.add_argument("--carried", action="store_true", help="load by the code in folders, without the package")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name has it in it alone")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--per-process", type=int, default=12, help="of --carried: cases that one process loads; default: 12"
    )
    options = parser.parse_args()
    cases = [case for case in all_cases() if re.search(options.only, str(case))]
    known = json.loads(PINNED.read_text()) if PINNED.exists() else {"machine": None, "cases": {}}
    if options.carried:
        return compare_carried(cases, known, options.processes, options.per_process)
    started = time.perf_counter()
    found, failed = computed(pinned, {str(case): case for case in cases}, options.processes)
    seconds = time.perf_counter() - started
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    if options.write:
        names = [str(case) for case in all_cases()]
        every = (known["cases"] if options.only else {}) | found
        write({name: every[name] for name in names if name in every}, machine())
        print(f"{len(found)} cases written in {seconds:.0f} s, {len(failed)} failed")
        return 1 if failed else 0
    return 1 if report(found, known, len(cases), seconds) or failed else 0


def report(found: dict[str, dict[str, Any]], known: dict[str, Any], wanted: int, seconds: float) -> bool:
    """Print which cases differ from those that are known, and return whether any does."""
    differing = 0
    for name, digests in found.items():
        before = known["cases"].get(name, {})
        changed = [part for part in sorted({*digests, *before}) if digests.get(part) != before.get(part)]
        differing += bool(changed)
        if changed:
            print(f"{name}: {', '.join(changed)} differ" if before else f"{name}: is not in {PINNED.name}")
    if not differing and len(found) == wanted:
        print(f"all {wanted} cases agree ({seconds:.0f} s)")
        return False
    print(f"{differing} of {wanted} cases differ, {wanted - len(found)} failed ({seconds:.0f} s)")
    warn_of_machine(known)
    return bool(differing)


def warn_of_machine(known: dict[str, Any]) -> None:
    """Say so where digests were made on another machine."""
    if machine() != known["machine"]:
        print(f"bits may differ: they were pinned on {known['machine']}, and this is {machine()}")


def compare_carried(cases: list[Case], known: dict[str, Any], processes: int, per_process: int) -> int:
    """Print what checkpoints compute by the code that they carry, and return the exit status."""
    from scripts.pin_carried import carried

    groups = [cases[start : start + per_process] for start in range(0, len(cases), per_process)]
    found, failed = computed(carried, {str(number): group for number, group in enumerate(groups)}, processes)
    rows = [row for group in found.values() for row in group["rows"]]
    exact = {str(case): not case.from_scratch for case in cases}  # others compute with what is not zero from the start
    wrong = 0
    print("load  base  first forward  files  lines  case")
    for row in rows:
        seconds, faults = (
            row["seconds"],
            [f"{name} differ by {by:.1e}" for name, by in row["differences"].items() if by],
        )
        if exact[row["case"]] and row["birth"] != known["cases"].get(row["case"], {}).get("birth"):
            faults.append("logits at birth are not the pinned ones")
        wrong += bool(faults)
        times = f"{seconds['load']:4.1f}  {seconds['base']:4.1f}  {seconds['forward']:13.1f}"
        print(f"{times}  {row['files']:5}  {row['lines']:5}  {'; '.join([row['case'], *faults])}")
    for reason in failed.values():
        print(reason)
    print(f"{len(rows) - wrong} of {len(rows)} checkpoints that carry code agree, {len(failed)} groups failed")
    if wrong:
        warn_of_machine(known)
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())

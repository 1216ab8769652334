"""Pin the result of every method for every family: digests of files, configs and logits, compared with committed ones.

    python scripts/pin.py                     compute everything again, and name what differs from scripts/pinned.json
    python scripts/pin.py --write             write scripts/pinned.json
    python scripts/pin.py --carried           load checkpoints by the code that they carry, without importing the package
    python scripts/pin.py --only 'llama moc'  only cases whose name contains the pattern, a regular expression

A case is a tiny random base of a family and one or more methods, applied one after the other. Everything is computed in
float32 by one thread, so a digest is the same on every run on one kind of processor; another kind may round otherwise.
"""

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

PINNED = Path(__file__).with_name("pinned.json")
sys.path.insert(0, str(PINNED.parent.parent))

from scripts.pin_carried import carried  # noqa: E402
from scripts.pin_cases import Case, all_cases  # noqa: E402
from scripts.pin_models import (  # noqa: E402
    digest,
    digest_of,
    generated,
    inputs,
    loaded,
    logits,
    made,
    prepare,
    scratch,
    train,
)


def digest_of_file(path: Path) -> str:
    """Return the digest of the tensors of a safetensors file by name, or of the content of a JSON file."""
    from safetensors import safe_open

    if path.suffix == ".json":
        return digest(json.dumps(without_versions(json.loads(path.read_text())), sort_keys=True))
    with safe_open(path, framework="pt") as file:
        return digest(*(part for name in sorted(file.keys()) for part in (name, digest_of(file.get_tensor(name)))))


def without_versions(content: Any) -> Any:
    """Return a config without versions and without the names of code files."""
    if isinstance(content, list):
        return [without_versions(each) for each in content]
    if isinstance(content, dict):
        kept = {key: value for key, value in content.items() if "version" not in key and key != "auto_map"}
        return {key: without_versions(value) for key, value in kept.items()}
    return content


def pinned(case: Case) -> dict[str, Any]:
    """Return the digests of a case."""
    with tempfile.TemporaryDirectory(prefix="pin-", dir=scratch()) as temporary:
        folder = Path(temporary)
        checkpoint = made(case, folder)
        digests: dict[str, Any] = {"config": digest_of_file(checkpoint / "config.json")}
        for path in checkpoint.glob("*.safetensors"):
            digests[str(path.relative_to(checkpoint))] = digest_of_file(path)
        model = loaded(checkpoint)
        arguments = inputs(case)
        digests["birth"] = digest_of(logits(model, arguments))
        train(model, case, folder)
        digests |= {
            "trained": sample(logits(model, arguments)),
            "generated": sample(generated(model, arguments)) if cached(case) else [],
        }
        return dict(sorted(digests.items()))


def cached(case: Case) -> bool:
    """Return whether the case could generate with a cache when it was pinned: moda could not with transformers 5.24."""
    return all(method != "moda" for method, _ in case.steps)


def sample(tensor: Any) -> list[float]:
    """Return every so many values of a tensor, at most 64 and a bit, rounded to seven digits."""
    values = tensor.detach().double().flatten()
    return [round(float(value), 7) for value in values[:: max(1, len(values) // 64)]]


def equal(one: Any, other: Any) -> bool:
    """Return whether two digests are the same, or two samples within 1e-5."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(abs(a - b) <= 1e-5 for a, b in zip(one, other, strict=True))
    return one == other


def machine() -> dict[str, str]:
    """Return the facts that bits depend on: processor, vector instructions and versions."""
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
    """Call a function on each part in several processes, and show a progress bar.

    Returns:
        Results by name, in the order of `parts`, and errors by name, for parts that raised one.
    """
    from tqdm import tqdm

    results, failed = {}, {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        waiting = {pool.submit(function, part): name for name, part in parts.items()}
        for future in tqdm(as_completed(waiting), total=len(parts), disable=None):
            try:
                results[waiting[future]] = future.result()
            except Exception as error:
                failed[waiting[future]] = f"{type(error).__name__}: {error}"
    return {name: results[name] for name in parts if name in results}, failed


def write(cases: dict[str, dict[str, Any]], about: dict[str, str]) -> None:
    """Write the file of digests, one line per case."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(digests)}" for name, digests in cases.items())
    PINNED.write_text(f'{{"machine": {json.dumps(about)}, "cases": {{\n{lines}\n}}}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write scripts/pinned.json")
    parser.add_argument("--carried", action="store_true", help="load by the code in folders, without the package")
    parser.add_argument("--only", default="", metavar="PATTERN", help="cases whose name has it in it alone")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument(
        "--per-process",
        type=int,
        default=12,
        help="of --carried: cases that one process loads, with 1 without anything compiled before; default: 12",
    )
    options = parser.parse_args()
    cases = [case for case in all_cases() if re.search(options.only, str(case))]
    known = json.loads(PINNED.read_text()) if PINNED.exists() else {"machine": None, "cases": {}}
    if options.carried:
        return compare_carried(cases, known, options.processes, options.per_process)
    started = time.perf_counter()
    results, failed = computed(pinned, {str(case): case for case in cases}, options.processes)
    seconds = time.perf_counter() - started
    for name, reason in failed.items():
        print(f"{name}: {reason}")
    if options.write:
        names = [str(case) for case in all_cases()]
        every = (known["cases"] if options.only else {}) | results
        write({name: every[name] for name in names if name in every}, machine())
        print(f"{len(results)} cases written in {seconds:.0f} s, {len(failed)} failed")
        return 1 if failed else 0
    return 1 if report(results, known, len(cases), seconds) or failed else 0


def report(results: dict[str, dict[str, Any]], known: dict[str, Any], wanted: int, seconds: float) -> bool:
    """Print which cases differ from the known ones, and return whether any case differs."""
    differing = 0
    for name, digests in results.items():
        before = known["cases"].get(name, {})
        changed = [part for part in sorted({*digests, *before}) if not equal(digests.get(part), before.get(part))]
        differing += bool(changed)
        if changed:
            print(f"{name}: {', '.join(changed)} differ" if before else f"{name}: is not in {PINNED.name}")
    if not differing and len(results) == wanted:
        print(f"all {wanted} cases agree ({seconds:.0f} s)")
        return False
    print(f"{differing} of {wanted} cases differ, {wanted - len(results)} failed ({seconds:.0f} s)")
    warn_of_machine(known)
    return bool(differing)


def warn_of_machine(known: dict[str, Any]) -> None:
    """Print a warning if the digests were made on another machine."""
    if machine() != known["machine"]:
        print(f"bits may differ: they were pinned on {known['machine']}, and this is {machine()}")


def compare_carried(cases: list[Case], known: dict[str, Any], processes: int, per_process: int) -> int:
    """Print whether checkpoints compute the same with the code that they carry, and return the exit status."""
    groups = [cases[start : start + per_process] for start in range(0, len(cases), per_process)]
    compare = partial(carried, cold=per_process == 1)
    results, failed = computed(compare, {str(number): group for number, group in enumerate(groups)}, processes)
    rows = [row for group in results.values() for row in group["rows"]]
    # Memories from scratch are not zero, and the carried code may round what they compute differently.
    exact = {str(case): not case.from_scratch for case in cases}
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

"""Change one operator, number or keyword at a time, and list the changes that no test notices.

    make mutants                                              a sample of every file of the core
    make mutants MUTANTS="midus_hf/ops/product_key/op.py --sample 50"

The mutations are cosmic-ray's. They are made in a copy of the repository, and judged by the tests nearest to the file. A
surviving mutant is worth a look: a test may be missing, or the change may have no effect.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

REPOSITORY = Path(__file__).parent.parent
ENGINE_ROOMS = ["request.py", "architecture", "checkpoint", "plan.py", "tensors", "record", "runs", "edits"]
FOLDERS = [
    "midus_hf/ops",
    "midus_hf/memories",
    *(f"upscalers/{room}" for room in ENGINE_ROOMS),
    "upscalers/methods/contract.py",
    "midus_hf/files",
    "midus_hf/compare/report.py",
]

OPS = "tests/ops --ignore=tests/ops/kernels/test_offline_compilation.py"

# Tests that judge the files of a folder; the entry with the longest matching path decides.
NEAREST = {
    "midus_hf/ops": f"{OPS} -k 'not triton'",  # Triton's interpreter runs those tests slowly
    "midus_hf/ops/block_linear.py": "tests/memory/test_hierarchical.py",
    "midus_hf/ops/moc/triton.py": f"{OPS} -k triton",
    "midus_hf/ops/moda/triton.py": f"{OPS} -k triton",
    "midus_hf/ops/gather/triton.py": f"{OPS} -k triton",
    "midus_hf/ops/midus_hml/triton.py": f"{OPS} -k triton",
    "midus_hf/ops/product_key/triton.py": f"{OPS} -k triton",
    "midus_hf/memories": "tests/memory tests/models/test_training.py tests/models/test_moc.py",
    "midus_hf/memories/bank.py": "tests/banks tests/upscalers/test_own_bank.py tests/upscalers/test_packs.py "
    "tests/upscalers/edits/test_packs.py tests/upscalers/test_every_method.py",
    "midus_hf/memories/module.py": "tests/memory tests/models/test_config.py tests/sites",
    "midus_hf/memories/hosting/heads.py": "tests/models/test_moda.py tests/look/test_depth.py",
    "midus_hf/memories/moda/layer.py": "tests/models/test_moda.py",
    "midus_hf/config": "tests/config tests/memory/test_registry.py tests/upscalers/test_families.py tests/upscalers/test_refusals.py",
    "midus_hf/cli": "tests/commands tests/look",
    "midus_hf/data": "tests/data tests/training/test_run.py",
    "midus_hf/look": "tests/look",
    "midus_hf/carried": "tests/carried",
    "midus_hf/models": "tests/models --ignore=tests/models/test_fsdp.py --ignore=tests/models/test_every_type.py",
    "midus_hf/models/host.py": "tests/models/test_config.py tests/models/test_laws.py tests/models/test_outputs.py "
    "tests/models/test_hierarchical.py tests/models/test_packs.py tests/models/test_training.py "
    "tests/upscalers/test_hub.py tests/adapters/test_adapter_layers.py",
    "midus_hf/models/families": "tests/models/test_families.py tests/models/test_every_type.py tests/upscalers/test_any_type.py",
    "midus_hf/anatomy": "tests/models/test_every_type.py tests/upscalers/test_strip.py tests/upscalers/test_families.py",
    "midus_hf/models/families/__init__.py": "tests/models/test_families.py",
    "midus_hf/models/language_model.py": "tests/models/test_task_heads.py tests/training/test_task_heads.py",
    "midus_hf/memories/engram/known_ngrams.py": "tests/upscalers/test_engram.py tests/training/test_protection.py",
    "midus_hf/topics": "tests/topics",
    "midus_hf/sources": "tests/test_saved_models.py tests/training/test_refusals.py tests/upscalers/test_hub.py",
    "midus_hf/files": "tests/files",
    "midus_hf/files/checkpoint_files.py": "tests/files tests/upscalers/test_output_folder.py",
    "midus_hf/files/outputs.py": "tests/files tests/upscalers/test_output_folder.py",
    "midus_hf/compare": "tests/compare",
    "midus_hf/compare/report.py": "tests/compare/test_report.py",
    "midus_hf/evaluation": "tests/evaluation",
    "midus_hf/training": "tests/training --ignore=tests/training/parallel --ignore=tests/training/checkpoints/test_killed_runs.py",
    "midus_hf/training/adapters.py": "tests/adapters/test_runs.py tests/adapters/test_lora.py",
    "midus_hf/training/arguments.py": "tests/training/test_refusals.py tests/commands/test_command_line.py",
    "midus_hf/training/keys.py": "tests/training/test_refusals.py tests/commands/test_command_line.py",
    "midus_hf/memories/hierarchical/training.py": "tests/training/test_blocks.py",
    "midus_hf/training/checkpoints.py": "tests/training/checkpoints tests/training/test_run.py",
    "midus_hf/training/prepare.py": "tests/training/test_refusals.py tests/training/test_output.py tests/training/test_run.py",
    "midus_hf/training/texts.py": "tests/training/test_refusals.py tests/training/test_run.py tests/training/test_blocks.py",
    "midus_hf/training/optim.py": "tests/training/test_optim.py tests/training/test_refusals.py",
    "midus_hf/training/row_adamw.py": "tests/training/test_optim.py",
    "midus_hf/training/output.py": "tests/training/test_run.py tests/training/test_refusals.py "
    "tests/training/checkpoints/test_interruption.py tests/training/test_output.py",
    "midus_hf/training/protection.py": "tests/training/test_protection.py",
    "midus_hf/training/run.py": "tests/training/test_run.py tests/training/test_refusals.py "
    "tests/training/test_protection.py tests/training/test_output.py",
    "midus_hf/training/sft/run.py": "tests/sft",
    "midus_hf/training/sft/rows.py": "tests/sft",
    "midus_hf/training/trainer.py": "tests/training/test_run.py tests/training/test_output.py tests/training/test_blocks.py "
    "tests/training/parallel/test_sharded.py "
    "tests/training/checkpoints/test_whole_checkpoints.py tests/training/test_optim.py",
    "upscalers/edits": "tests/upscalers/edits",
    "upscalers": "tests/upscalers --ignore=tests/upscalers/test_interruption.py --ignore=tests/upscalers/dense",
}

# Tests in `tests/upscalers` by the name of the file they judge, the nearest first: `test_NAME.py`, or a folder.
NEAREST_TO_UPSCALERS = {
    "__init__": "refusals command_line hub",
    "base_checkpoint": "refusals checkpoint_layouts families",
    "inspection": "strip dense/opt_deus command_line every_method",
    "upscaling": "verification output_folder hub command_line every_method",
    "layer_predictor": "dense/lesa",
    "layer_tensors": "families command_line plan dense/new_layers",
    "layout": "families command_line",
    "built_layout": "any_type families",
    "contract": "refusals plan verification dense/new_layers",
    "model_card": "provenance strip",
    "plan": "plan families refusals dense/new_layers memory_methods any_type",
    "provenance": "provenance memory_methods strip command_line",
    "recipes": "verification safetensors_format dense memory_methods every_method",
    "transport": "dense/opt_deus",
    "upscale": "command_line memory_methods hub refusals verification",
    "safetensors_format": "safetensors_format checkpoint_layouts strip",
    "source": "hub refusals checkpoint_layouts",
    "stack": "dense/new_layers refusals plan every_method",
    "strip": "strip provenance every_method",
    "tokenizer": "provenance",
    "verify": "verification memory_methods",
    "writing": "output_folder verification provenance",
    "writer": "safetensors_format checkpoint_layouts memory_methods every_method",
}

# Prefixes of operators to leave out: they change type annotations, or the signs before unpacked keyword arguments.
NOISE = ("core/ReplaceBinaryOperator_BitOr", "core/ReplaceBinaryOperator_Pow")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=FOLDERS, help=f"files or folders (default: {' '.join(FOLDERS)})")
    parser.add_argument("--sample", type=int, default=5, help="mutants per file (default: 5; 0: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (default: 0)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which a mutant counts as noticed")
    parser.add_argument("--python", default=str(REPOSITORY / ".venv/bin/python"), help="that runs the tests")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="mutants-") as copy:
        copy_repository(Path(copy))
        os.chdir(copy)
        os.environ |= {"PYTHONPATH": copy, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        outcomes: Counter[tuple[str, TestOutcome]] = Counter()
        for file in source_files(arguments.paths):
            command = f"{arguments.python} -m pytest -x -q -p no:cacheprovider {nearest_tests(file)}"
            for mutation in sampled(file, arguments.sample, arguments.seed):
                result = mutate_and_test([mutation], command, arguments.timeout)
                outcomes[str(file), result.test_outcome] += 1
                if result.test_outcome == TestOutcome.SURVIVED:
                    print(result.diff, end="\n\n", flush=True)
            print(f"{file}: {_summary(outcomes, str(file))}", file=sys.stderr, flush=True)
    survived = sum(count for (_, outcome), count in outcomes.items() if outcome == TestOutcome.SURVIVED)
    print(f"{survived} of {outcomes.total()} mutants survived")


def copy_repository(target: Path) -> None:
    """Copy the working tree's files that git tracks or does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def source_files(paths: list[str]) -> list[Path]:
    """Return the Python files at `paths`, with files of a folder sorted by name."""
    files = [file for path in map(Path, paths) for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise SystemExit(
            f"error: {', '.join(missing or paths)}: expected Python files of this repository, or folders of them."
        )
    return files


def nearest_tests(file: Path) -> str:
    """Return arguments for pytest, starting with a test file named after `file`, if there is one, to fail early."""
    if file.is_relative_to("upscalers") and file.stem in NEAREST_TO_UPSCALERS:
        return " ".join(map(_engine_test, NEAREST_TO_UPSCALERS[file.stem].split()))
    prefixes = [prefix for prefix in NEAREST if file.is_relative_to(prefix)]
    if not prefixes:
        raise SystemExit(f"error: {file}: no tests are known for it; add its folder to NEAREST in scripts/mutants.py.")
    tests = NEAREST[max(prefixes, key=len)]
    named = Path(tests.split()[0], f"test_{file.stem}.py")
    return f"{named} {tests}" if named.is_file() else tests


def _engine_test(name: str) -> str:
    path = Path("tests/upscalers", name)
    path = path if path.is_dir() else path.with_name(f"test_{path.name}.py")
    if not path.exists():
        raise SystemExit(
            f"error: {path}: expected a test file or folder; mend NEAREST_TO_UPSCALERS in scripts/mutants.py."
        )
    return str(path)


def sampled(file: Path, size: int, seed: int) -> list[MutationSpec]:
    """Return `size` mutations of a file, the same ones for the same seed, in the order of the file."""
    with use_db(":memory:", mode=WorkDB.Mode.create) as database:
        init([file], database, operator_cfgs={})
        mutations = [mutation for item in database.work_items for mutation in item.mutations]
    mutations = [mutation for mutation in mutations if not mutation.operator_name.startswith(NOISE)]
    mutations.sort(key=lambda mutation: (mutation.start_pos, mutation.operator_name, mutation.occurrence))
    if not 0 < size < len(mutations):
        return mutations
    chosen = sorted(random.Random(f"{seed} {file}").sample(range(len(mutations)), size))
    return [mutations[index] for index in chosen]


def _summary(outcomes: "Counter[tuple[str, TestOutcome]]", file: str) -> str:
    counts = {outcome: count for (name, outcome), count in outcomes.items() if name == file}
    return ", ".join(f"{count} {outcome.name.lower()}" for outcome, count in counts.items()) or "nothing to mutate"


if __name__ == "__main__":
    main()

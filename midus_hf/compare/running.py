"""Runs of a comparison, several at a time: finished runs are kept, interrupted ones resumed, and failures reported."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from midus_hf.compare.measuring import base_request
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import read_result
from midus_hf.compare.run_process import FAILURE, specify
from midus_hf.compare.runs import Run, changed_keys, runs_of
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import BASE, Workplace, control_runs, results_of
from midus_hf.files.locks import lock_or_warn

_SECONDS_BETWEEN_LOOKS = 0.2
_SAID = "said.txt"
_REMEDY = "Give the variant another name, choose"


class ShownProgress(Progress):
    """Progress on standard error: a bar of runs on a terminal, and everywhere a line per run that ends.

    Runs that were done before are counted without a line.
    """

    def __init__(self) -> None:
        console = Console(stderr=True)
        super().__init__(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("runs"),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._began: dict[str, float] = {}
        self._runs = self.add_task("", total=0)

    def planned(self, runs: int) -> None:
        """Add to the number of runs that are to be done."""
        self.update(self._runs, total=(self.tasks[0].total or 0) + runs)

    def began(self, name: str) -> None:
        """Show that work on a run, or on the base, began."""
        self._began[name] = time.monotonic()
        self.update(self._runs, description=", ".join(self._began))

    def ended(self, name: str, failure: str | None) -> None:
        """Show that a run or the base is done or, if `failure` says why, that it failed."""
        began = self._began.pop(name, None)
        self.update(self._runs, advance=1, description=", ".join(self._began))
        if began is not None:
            line = f"{name}: {f'failed: {failure}' if failure else 'done'} ({time.monotonic() - began:.0f} s)"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Running:
    """Execution of a comparison.

    The base comes first, then the first seed of every variant in their order, then the second seed, and so on. Once all runs of a
    variant have ended, its null controls come next, at the variant's best rate; after these, its upscaled models are removed.

    Args:
        comparison: The comparison, resolved by `plan`.
        variants: Variants that `plan` returned.
        progress: What runs are told to as they begin and end.
        jobs: Number of runs at a time, if there are no `devices`. Default: 1.
        devices: Numbers of GPUs. Each run gets one GPU, and one run per GPU works at a time. Default: empty, every run sees all GPUs.
    """

    def __init__(
        self,
        comparison: Comparison,
        variants: Sequence[Variant],
        progress: ShownProgress,
        jobs: int = 1,
        devices: Sequence[str] = (),
    ):
        self.comparison, self.progress = comparison, progress
        self.variants = {variant.name: variant for variant in variants}
        self.workplace = Workplace(Path(comparison.output_dir))
        # Why runs failed, by the name of the run.
        self.failures: dict[str, str] = {}
        self._free: deque[str | None] = deque(devices) if devices else deque([None] * jobs)
        self._threads = max(1, (os.cpu_count() or 1) // len(self._free))
        # Runs, None for the base; and how many runs of each variant, or then of its null controls, have not ended.
        self._waiting: deque[Run | None] = deque()
        self._left: dict[str, int] = {}
        self._running: dict[subprocess.Popen[bytes], tuple[Run | None, str | None]] = {}

    def run(self) -> None:
        """Do all runs that are not done yet; failures are collected in `failures`.

        Raises:
            ValueError: If the folder has a result of another request, another comparison runs in the same folder, or several runs
                at a time are wanted on a file system without locks.
        """
        with _alone_in(self.workplace.root) as is_guarded:
            if not is_guarded and len(self._free) > 1:
                raise ValueError(
                    f"output_dir is {str(self.workplace.root)!r}, whose file system has no locks, by which runs that share an "
                    "upscaled model wait for one another; expected one run at a time. Choose --jobs 1 without --devices, or "
                    "another output."
                )
            _check_same(self.workplace.root / BASE, base_request(self.comparison), "Choose")
            for variant in self.variants.values():
                runs, controls = self._runs_and_controls(variant)
                self._check_same([*runs, *controls])
            try:
                self._work([None])
                if BASE not in self.failures:
                    # Every variant gets its first seed before any gets its second.
                    of_variants = {name: runs_of(variant, self.comparison) for name, variant in self.variants.items()}
                    self._left = {name: len(runs) for name, runs in of_variants.items()}
                    runs = [run for runs in of_variants.values() for run in runs]
                    in_order: list[Run] = sorted(runs, key=lambda run: self.comparison.seeds.index(run.seed))
                    self._work(in_order)
            finally:
                self._terminate()

    def _runs_and_controls(self, variant: Variant) -> tuple[list[Run], list[Run]]:
        runs = runs_of(variant, self.comparison)
        return runs, control_runs(variant, results_of(runs, self.workplace), self.comparison)

    def _check_same(self, runs: Sequence[Run]) -> None:
        for run in runs:
            _check_same(self.workplace.run_folder(run), run.request(self.comparison), _REMEDY)

    def _work(self, runs: Sequence[Run | None]) -> None:
        """Do runs, and the null controls that follow them."""
        self._waiting.extend(runs)
        self.progress.planned(len(runs))
        while self._waiting or self._running:
            while self._waiting and self._free:
                self._begin(self._waiting.popleft())
            ended = [process for process in self._running if process.poll() is not None]
            for process in ended:
                run, device = self._running.pop(process)
                self._free.append(device)
                self._note_failure(run, process.returncode)
                self._end(run)
            if not ended and self._running:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _begin(self, run: Run | None) -> None:
        """Start the process of a run; if the run is done already, only note that."""
        name, folder = self._named(run)
        if read_result(folder) is not None:
            if not self.comparison.keep_models:
                # A process that was killed right after it wrote its result has left the trained model.
                self.workplace.remove_trained(folder / "trained")
            self._end(run)
            return
        device = self._free.popleft()
        specification = specify(run, self.comparison, self.workplace)
        self.progress.began(name)
        with (folder / _SAID).open("wb") as output_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "midus_hf.compare.run_process", str(specification)],
                env=self._environment(device),
                stdin=subprocess.DEVNULL,
                stdout=output_file,  # standard output of this process is for the report
                stderr=output_file,
                start_new_session=True,  # a Ctrl-C reaches this process alone, which then terminates the others
            )
        self._running[process] = (run, device)

    def _end(self, run: Run | None) -> None:
        """Note that a run has ended. Behind a variant's last run queue its null controls, and behind these remove its models."""
        name, _ = self._named(run)
        self.progress.ended(name, self.failures.get(name))
        if run is None:
            return
        variant = self.variants[run.variant.control_of or run.variant.name]
        self._left[variant.name] -= 1
        if self._left[variant.name]:
            return
        runs, controls = self._runs_and_controls(variant)
        if controls and run.variant.control is None:
            self._check_same(controls)
            self.progress.planned(len(controls))
            self._left[variant.name] = len(controls)
            self._waiting.extendleft(reversed(controls))
        elif not self.comparison.keep_models:
            for upscaled in {one.upscaled_name for one in (*runs, *controls)}:
                if upscaled is not None:
                    self.workplace.remove_upscaled(upscaled)

    def _environment(self, device: str | None) -> Mapping[str, str]:
        """Return the environment of a run's process: its share of threads, unless the caller set them, and its device."""
        chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        return {"OMP_NUM_THREADS": str(self._threads), **os.environ, **chosen}

    def _named(self, run: Run | None) -> tuple[str, Path]:
        """Return the name and the folder of a run, or of the base."""
        return (BASE, self.workplace.root / BASE) if run is None else (run.name, self.workplace.run_folder(run))

    def _note_failure(self, run: Run | None, status: int) -> None:
        """Keep why a run failed if its status is not 0."""
        if not status:
            return
        name, folder = self._named(run)
        if (folder / FAILURE).is_file():
            self.failures[name] = (folder / FAILURE).read_text(encoding="utf-8").strip()
        else:
            lines = (folder / _SAID).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            self.failures[name] = f"ended with status {status}: {lines[-1] if lines else 'it said nothing'}"

    def _terminate(self) -> None:
        """Stop the processes that still run, which save their checkpoints first, and wait for their end."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait()
        self._running.clear()


@contextlib.contextmanager
def _alone_in(output: Path) -> Iterator[bool]:
    """Lock the folder of a comparison; yield False where the file system has no locks, so that nobody is refused there."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_or_warn(output, output)
    except BlockingIOError:
        raise ValueError(
            f"output_dir is {str(output)!r}, in which another comparison runs; expected one at a time. Wait for it, or choose "
            "another output_dir; --jobs does several runs at a time."
        ) from None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def _check_same(folder: Path, request: Mapping[str, Any], remedy: str) -> None:
    """Raise a ValueError if a folder has a result of another request."""
    before = read_result(folder)
    # Results of the base that older versions wrote have no request.
    if before is None or not before.request:
        return
    changed = changed_keys(before.request, json.loads(json.dumps(request)))
    if changed:
        raise ValueError(
            f"{folder} was done with another {', '.join(changed)}; expected the same. {remedy} another output, or move that "
            "folder away."
        )

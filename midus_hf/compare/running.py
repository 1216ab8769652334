"""Runs of a comparison, several at a time: finished runs are kept, interrupted ones resumed, and failures reported."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from midus_hf.compare.collecting import control_runs, results_of
from midus_hf.compare.measuring import base_request
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import read_result
from midus_hf.compare.run_process import FAILURE, specify
from midus_hf.compare.runs import Run, changed_keys, runs_of
from midus_hf.compare.variants import Variant
from midus_hf.compare.workplace import BASE, Workplace
from midus_hf.files.locks import lock_or_warn

_SECONDS_BETWEEN_LOOKS = 0.2
_SAID = "said.txt"


class Watching(Protocol):
    """Observer of a comparison's progress."""

    def planned(self, runs: int) -> None:
        """Add to the number of runs that are to be done."""

    def began(self, name: str) -> None:
        """Note that work on a run, or on the base, began."""

    def ended(self, name: str, failure: str | None) -> None:
        """Note that a run or the base is done or, with a line that says why, that it failed."""


@dataclasses.dataclass
class _Work:
    """A run, or the base, that is to be done.

    Args:
        run: The run; None for the base.
        then: Called when the run has ended, whether it is done or failed.
    """

    run: Run | None
    then: Callable[[], None]


class Running:
    """Execution of a comparison.

    The base comes first, then the first seed of every variant in their order, then the second seed, and so on. Once all runs of a
    variant have ended, its null controls come next, at the variant's best rate; after these, its upscaled models are removed.

    Args:
        comparison: The comparison, resolved by `plan`.
        variants: Variants that `plan` returned.
        watching: Observer of the progress.
        jobs: Number of runs at a time, if there are no `devices`. Default: 1.
        devices: Numbers of GPUs. Each run gets one GPU, and one run per GPU works at a time. Default: empty, every run sees all GPUs.
    """

    def __init__(
        self,
        comparison: Comparison,
        variants: Sequence[Variant],
        watching: Watching,
        jobs: int = 1,
        devices: Sequence[str] = (),
    ):
        self.comparison, self.variants, self.watching = comparison, list(variants), watching
        self.workplace = Workplace(Path(comparison.output_dir))
        # Why runs failed, by the name of the run.
        self.failures: dict[str, str] = {}
        self._free: deque[str | None] = deque(devices) if devices else deque([None] * jobs)
        self._threads = max(1, (os.cpu_count() or 1) // len(self._free))
        self._waiting: deque[_Work] = deque()
        self._running: dict[subprocess.Popen[bytes], tuple[_Work, str | None]] = {}

    def run(self) -> None:
        """Do all runs that are not done yet; failures are collected in `failures`.

        Raises:
            ValueError: If the folder has a result that was made with another request, another comparison runs in the same folder, or
                several runs at a time are asked for on a file system without locks.
        """
        with _alone_in(self.workplace.root) as is_guarded:
            if not is_guarded and len(self._free) > 1:
                raise ValueError(
                    f"output_dir is {str(self.workplace.root)!r}, whose file system has no locks, by which runs that share an "
                    "upscaled model wait for one another; expected one run at a time. Choose --jobs 1 without --devices, or "
                    "another output."
                )
            self._run()

    def _run(self) -> None:
        check_base(self.comparison, self.workplace)
        for variant in self.variants:
            runs = runs_of(variant, self.comparison)
            for run in [*runs, *control_runs(variant, results_of(runs, self.workplace), self.comparison)]:
                check_same(run, self.comparison, self.workplace)
        try:
            self._waiting.append(_Work(None, lambda: None))
            self.watching.planned(1)
            self._work()
            if BASE not in self.failures:
                for variant in self.variants:
                    self._add(runs_of(variant, self.comparison), self._follow, variant)
                # Every variant gets its first seed before any gets its second.
                seeds = self.comparison.seeds
                self._waiting = deque(
                    sorted(self._waiting, key=lambda work: seeds.index(work.run.seed) if work.run else 0)
                )
                self._work()
        finally:
            self._terminate()

    def _add(
        self, runs: Sequence[Run], then: Callable[[Variant], None], variant: Variant, first: bool = False
    ) -> None:
        """Queue runs of a variant, at the front if `first`, and call `then` when the last of them has ended."""
        left = {run.name for run in runs}

        def ended(name: str) -> None:
            left.discard(name)
            if not left:
                then(variant)

        work = [_Work(run, partial(ended, run.name)) for run in runs]
        self.watching.planned(len(work))
        if first:
            self._waiting.extendleft(reversed(work))
        else:
            self._waiting.extend(work)
        if not runs:
            then(variant)

    def _follow(self, variant: Variant) -> None:
        """Queue the null controls of a variant as the next runs."""
        runs = runs_of(variant, self.comparison)
        controls = control_runs(variant, results_of(runs, self.workplace), self.comparison)
        for run in controls:
            check_same(run, self.comparison, self.workplace)
        names = {run.upscaled_name for run in [*runs, *controls] if run.upscaled_name is not None}
        self._add(controls, lambda _: self._let_go(names), variant, first=True)

    def _let_go(self, upscaled: Iterable[str]) -> None:
        """Remove upscaled models by name, unless the comparison keeps models."""
        if not self.comparison.keep_models:
            for name in upscaled:
                self.workplace.remove_upscaled(name)

    def _work(self) -> None:
        """Do all queued runs, and the runs that they queue."""
        while self._waiting or self._running:
            while self._waiting and self._free:
                self._begin(self._waiting.popleft())
            ended = [process for process in self._running if process.poll() is not None]
            for process in ended:
                work, device = self._running.pop(process)
                self._free.append(device)
                self._note(work.run, process.returncode)
                work.then()
            if not ended and self._running:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _begin(self, work: _Work) -> None:
        """Start the process of a run; if the run is done already, only note that."""
        name, folder = self._named(work.run)
        if read_result(folder) is not None:
            if not self.comparison.keep_models:
                # A process that was killed right after it wrote its result has left the trained model.
                self.workplace.remove_trained(folder / "trained")
            self.watching.ended(name, None)
            work.then()
            return
        device = self._free.popleft()
        specification = specify(work.run, self.comparison, self.workplace)
        self.watching.began(name)
        with (folder / _SAID).open("wb") as output_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "midus_hf.compare.run_process", str(specification)],
                env=self._environment(device),
                stdin=subprocess.DEVNULL,
                stdout=output_file,  # standard output of this process is for the report
                stderr=output_file,
                start_new_session=True,  # a Ctrl-C reaches this process alone, which then terminates the others
            )
        self._running[process] = (work, device)

    def _environment(self, device: str | None) -> Mapping[str, str]:
        """Return the environment of a run's process: its share of threads, unless the caller set them, and its device."""
        chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        return {"OMP_NUM_THREADS": str(self._threads), **os.environ, **chosen}

    def _named(self, run: Run | None) -> tuple[str, Path]:
        """Return the name and the folder of a run, or of the base."""
        return (BASE, self.workplace.root / BASE) if run is None else (run.name, self.workplace.run_folder(run))

    def _note(self, run: Run | None, status: int) -> None:
        """Tell the observer that a run ended, and keep why it failed if its status is not 0."""
        name, folder = self._named(run)
        if status:
            failure_file, output_file = folder / FAILURE, folder / _SAID
            if failure_file.is_file():
                self.failures[name] = failure_file.read_text(encoding="utf-8").strip()
            else:
                lines = output_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self.failures[name] = f"ended with status {status}: {lines[-1] if lines else 'it said nothing'}"
        self.watching.ended(name, self.failures.get(name))

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


def check_base(comparison: Comparison, workplace: Workplace) -> None:
    """Check that the base was measured as the comparison asks for, if it was measured already.

    Args:
        comparison: The comparison, resolved by `plan`.
        workplace: Folder of the comparison.

    Raises:
        ValueError: If the base was measured with another request.
    """
    before = read_result(workplace.root / BASE)
    # Results of the base that older versions wrote have no request.
    if before is not None and before.request:
        _refuse_changes(workplace.root / BASE, before.request, base_request(comparison), "Choose")


def check_same(run: Run, comparison: Comparison, workplace: Workplace) -> None:
    """Check that a run was done as the comparison asks for, if it was done already.

    Args:
        run: A run of the comparison.
        comparison: The comparison, resolved by `plan`.
        workplace: Folder of the comparison.

    Raises:
        ValueError: If the run was done with another request.
    """
    before = read_result(workplace.run_folder(run))
    if before is None:
        return
    _refuse_changes(
        workplace.run_folder(run), before.request, run.request(comparison), "Give the variant another name, choose"
    )


def _refuse_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    """Raise a ValueError if two requests differ; `now` is compared as JSON would hold it."""
    changed = changed_keys(before, json.loads(json.dumps(now)))
    if changed:
        raise ValueError(
            f"{folder} was done with another {', '.join(changed)}; expected the same. {remedy} another output, or move that "
            "folder away."
        )

"""All cells of a comparison, several at a time: what is done is left, what was interrupted goes on, what fails is told."""

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

from midus_hf.compare.arms import Arm
from midus_hf.compare.cell_process import FAILURE, specify
from midus_hf.compare.cells import Cell, cells_of, changed_keys
from midus_hf.compare.collecting import control_cells, results_of
from midus_hf.compare.measuring import base_request
from midus_hf.compare.options import Comparison
from midus_hf.compare.results import read_result
from midus_hf.compare.workplace import BASE, Workplace
from midus_hf.files.locks import lock_or_warn

_SECONDS_BETWEEN_LOOKS = 0.2
_SAID = "said.txt"


class Watching(Protocol):
    """What is told while cells run."""

    def planned(self, cells: int) -> None:
        """So many more cells are to be done."""

    def began(self, name: str) -> None:
        """A cell, or the base, is being worked on."""

    def ended(self, name: str, failure: str | None) -> None:
        """It is done, or has failed with a line that says why."""


@dataclasses.dataclass
class _Work:
    """A cell, or the base, that is to be done.

    Args:
        cell: None for the base.
        then: What follows when it has ended, done or not.
    """

    cell: Cell | None
    then: Callable[[], None]


class Running:
    """Run the cells of a comparison.

    Arms are gone through in their order, seed by seed. When all cells of an arm have ended, its null controls follow, at the rate
    that was its best; then its upscaled models go.

    Args:
        comparison: What is asked for, resolved by `plan`.
        arms: From `plan`.
        watching: Is told what happens.
        jobs: Cells that run beside one another. Default: 1.
        devices: GPUs by their numbers, of which each cell gets one: as many cells run as there are devices. Default: every cell
            sees all.
    """

    def __init__(
        self,
        comparison: Comparison,
        arms: Sequence[Arm],
        watching: Watching,
        jobs: int = 1,
        devices: Sequence[str] = (),
    ):
        self.comparison, self.arms, self.watching = comparison, list(arms), watching
        self.place = Workplace(Path(comparison.output_dir))
        self.failures: dict[str, str] = {}
        """Of what failed, why."""
        self._free: deque[str | None] = deque(devices) if devices else deque([None] * jobs)
        self._threads = max(1, (os.cpu_count() or 1) // len(self._free))
        self._waiting: deque[_Work] = deque()
        self._running: dict[subprocess.Popen[bytes], tuple[_Work, str | None]] = {}

    def run(self) -> None:
        """Do what is not done yet.

        Raises:
            ValueError: If a cell was done with another request, another comparison runs in the same output, or several runs are asked
                for where the file system has no locks.
        """
        with _alone_in(self.place.root) as is_guarded:
            if not is_guarded and len(self._free) > 1:
                raise ValueError(
                    f"output_dir is {str(self.place.root)!r}, whose file system has no locks, by which runs that share an upscaled "
                    "model wait for one another; expected one run at a time. Choose --jobs 1 without --devices, or another output."
                )
            self._run()

    def _run(self) -> None:
        check_base(self.comparison, self.place)
        for arm in self.arms:
            cells = cells_of(arm, self.comparison)
            for cell in [*cells, *control_cells(arm, results_of(cells, self.place), self.comparison)]:
                check_same(cell, self.comparison, self.place)
        try:
            self._waiting.append(_Work(None, lambda: None))
            self.watching.planned(1)
            self._work()
            if BASE not in self.failures:
                for arm in self.arms:
                    self._add(cells_of(arm, self.comparison), self._follow, arm)
                # Every arm has a first seed before one has a second.
                seeds = self.comparison.seeds
                self._waiting = deque(
                    sorted(self._waiting, key=lambda work: seeds.index(work.cell.seed) if work.cell else 0)
                )
                self._work()
        finally:
            self._terminate()

    def _add(self, cells: Sequence[Cell], then: Callable[[Arm], None], arm: Arm, first: bool = False) -> None:
        """Let cells wait to be done, and something follow when the last of them has ended."""
        left = {cell.name for cell in cells}

        def ended(name: str) -> None:
            left.discard(name)
            if not left:
                then(arm)

        work = [_Work(cell, partial(ended, cell.name)) for cell in cells]
        self.watching.planned(len(work))
        if first:
            self._waiting.extendleft(reversed(work))
        else:
            self._waiting.extend(work)
        if not cells:
            then(arm)

    def _follow(self, arm: Arm) -> None:
        """Let the controls of an arm be done next."""
        cells = cells_of(arm, self.comparison)
        controls = control_cells(arm, results_of(cells, self.place), self.comparison)
        for cell in controls:
            check_same(cell, self.comparison, self.place)
        names = {cell.upscaled_name for cell in [*cells, *controls] if cell.upscaled_name is not None}
        self._add(controls, lambda _: self._let_go(names), arm, first=True)

    def _let_go(self, upscaled: Iterable[str]) -> None:
        if not self.comparison.keep_models:
            for name in upscaled:
                self.place.remove_upscaled(name)

    def _work(self) -> None:
        """Do all that waits, and what follows from it."""
        while self._waiting or self._running:
            while self._waiting and self._free:
                self._begin(self._waiting.popleft())
            ended = [process for process in self._running if process.poll() is not None]
            for process in ended:
                work, device = self._running.pop(process)
                self._free.append(device)
                self._note(work.cell, process.returncode)
                work.then()
            if not ended and self._running:
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _begin(self, work: _Work) -> None:
        name, folder = self._named(work.cell)
        if read_result(folder) is not None:
            if not self.comparison.keep_models:
                self.place.remove_run(folder / "run")  # was left where a process was killed behind its last line
            self.watching.ended(name, None)
            work.then()
            return
        device = self._free.popleft()
        specification = specify(work.cell, self.comparison, self.place)
        self.watching.began(name)
        with (folder / _SAID).open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "midus_hf.compare.cell_process", str(specification)],
                env=self._environment(device),
                stdin=subprocess.DEVNULL,
                stdout=said,  # this process prints a report on its own
                stderr=said,
                start_new_session=True,  # a Ctrl-C reaches this process alone, which passes it on
            )
        self._running[process] = (work, device)

    def _environment(self, device: str | None) -> Mapping[str, str]:
        chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        return {"OMP_NUM_THREADS": str(self._threads), **os.environ, **chosen}

    def _named(self, cell: Cell | None) -> tuple[str, Path]:
        return (BASE, self.place.root / BASE) if cell is None else (cell.name, self.place.cell(cell))

    def _note(self, cell: Cell | None, status: int) -> None:
        name, folder = self._named(cell)
        if status:
            told, said = folder / FAILURE, folder / _SAID
            if told.is_file():
                self.failures[name] = told.read_text(encoding="utf-8").strip()
            else:
                lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self.failures[name] = f"ended with status {status}: {lines[-1] if lines else 'it said nothing'}"
        self.watching.ended(name, self.failures.get(name))

    def _terminate(self) -> None:
        """Tell what still runs to stop, with its checkpoint, and wait for that."""
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait()
        self._running.clear()


@contextlib.contextmanager
def _alone_in(output: Path) -> Iterator[bool]:
    """Hold the output of a comparison, and say whether that can be: where the file system has no locks nobody is refused."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        lock = lock_or_warn(output, output)
    except BlockingIOError:
        raise ValueError(
            f"output_dir is {str(output)!r}, in which another comparison runs; expected one at a time. Wait for it, or choose "
            "another output_dir; --jobs has runs beside one another."
        ) from None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.release()


def check_base(comparison: Comparison, place: Workplace) -> None:
    """See that what was measured of the base is what is asked for now.

    Args:
        comparison: What is asked for.
        place: Where it is.

    Raises:
        ValueError: If it is not.
    """
    before = read_result(place.root / BASE)
    # Earlier results of bases do not say what was asked for.
    if before is not None and before.request:
        _refuse_changes(place.root / BASE, before.request, base_request(comparison), "Choose")


def check_same(cell: Cell, comparison: Comparison, place: Workplace) -> None:
    """See that a cell that is done was asked for as it is now.

    Args:
        cell: Of the comparison.
        comparison: What is asked for.
        place: Where it is.

    Raises:
        ValueError: If it was not.
    """
    before = read_result(place.cell(cell))
    if before is None:
        return
    _refuse_changes(place.cell(cell), before.request, cell.request(comparison), "Give the arm another name, choose")


def _refuse_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], remedy: str) -> None:
    changed = changed_keys(before, json.loads(json.dumps(now)))
    if changed:
        raise ValueError(
            f"{folder} was done with another {', '.join(changed)}; expected the same. {remedy} another output, or move that "
            "folder away."
        )

"""Solvers work side by side; when one fails, or a person gives up, all stop soon."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.upscalers.solvers.recording import Recorder
from upscalers.tensors import solver as engine
from upscalers.tensors.solver import Solver, Workplace, num_workers, solve_all, summary_table

# Seconds after which something that was to happen soon counts as not happening.
PATIENCE = 10
# Steps that nobody waits for.
LONG = 5000


class Steps(Solver):
    """Takes so many steps, doing something in each, and makes one tensor."""

    work_bytes = 1

    def __init__(
        self,
        label: str,
        num_steps: int = 3,
        act: Callable[[int], object] = lambda step: None,
        workers: int | None = None,
    ):
        super().__init__(label)
        self.workers, self.num_steps, self.act, self.begun = workers, num_steps, act, False

    def solve(self, place: Workplace) -> Iterator[tuple[str, torch.Tensor]]:
        self.begun = True
        place.progress.begin(self.label, self.num_steps)
        for step in range(self.num_steps):
            self.act(step)
            place.step(self.label)
        yield "made", torch.tensor(float(self.num_steps))
        place.progress.end(self.label)


@pytest.fixture
def place(tmp_path) -> Workplace:
    return Workplace(lambda name: torch.zeros(()), tmp_path, Recorder())


def failing(step: int) -> None:
    if step == 2:
        raise RuntimeError("the third step failed")


def slowly(step: int) -> None:
    time.sleep(0.001)


def ignore(solver: Solver, key: str, tensor: torch.Tensor) -> None:
    """Write nothing."""


@pytest.mark.parametrize("workers", [1, 5, None])
def test_every_tensor_is_handed_over_once_and_by_one_thread_at_a_time(workers, place):
    solvers = [Steps(str(index), index + 1, workers=workers) for index in range(5)]
    written, writing = {}, threading.Lock()

    def write(solver, key, tensor):
        assert writing.acquire(blocking=False)
        time.sleep(0.002)
        assert (solver, key) not in written
        written[solver, key] = tensor.item()
        writing.release()

    solve_all(solvers, place, write)
    assert written == {(solver, "made"): solver.num_steps for solver in solvers}
    assert place.progress.balanced


def test_as_many_solvers_as_allowed_work_at_the_same_time(place):
    together = threading.Barrier(3, timeout=PATIENCE)
    solve_all([Steps(str(index), 1, lambda step: together.wait(), workers=3) for index in range(3)], place, ignore)
    busy, most = [], []

    def act(step):
        busy.append(step)
        most.append(len(busy))
        time.sleep(0.01)
        busy.pop()

    recorded = Workplace(place.read, place.scratch, Recorder())
    solve_all([Steps(str(index), 2, act, workers=2) for index in range(5)], recorded, ignore)
    assert max(most) <= 2


def test_an_error_while_a_tensor_is_written_stops_everything(place):
    def write(solver, key, tensor):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        solve_all([Steps("writing", 1, workers=2), Steps("long", LONG, slowly, 2)], place, write)


def test_after_an_error_no_other_solver_begins(place):
    for _ in range(5):
        queued = [Steps(f"queued {index}", workers=1) for index in range(20)]
        recorded = Workplace(place.read, place.scratch, Recorder())
        with pytest.raises(RuntimeError, match="the third step failed"):
            solve_all([Steps("failing", act=failing, workers=1), *queued], recorded, ignore)
        assert [solver.label for solver in queued if solver.begun] == []


def test_interrupted_while_work_is_handed_out_the_running_solvers_stop(place, monkeypatch):
    taken, submit = [], engine.ThreadPoolExecutor.submit

    def interrupted(pool, function, solver):
        if solver.label == "second":
            raise KeyboardInterrupt
        return submit(pool, function, solver)

    def work(step):
        taken.append(step)
        time.sleep(0.005)

    monkeypatch.setattr(engine.ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve_all([Steps("first", 300, work, 2), Steps("second", 300, work, 2)], place, ignore)
    assert len(taken) < 300


@pytest.mark.parametrize(
    ("solvers", "processors", "available", "work_bytes", "workers", "expected"),
    [
        (7, 16, 10**12, 10**9, None, 7),  # no more than there is work for
        (7, 4, 10**12, 10**9, None, 4),  # one a processor
        (7, 16, 6 * 10**9, 10**9, None, 3),  # half of the memory
        (7, 16, 10**9, 10**9, None, 1),  # at least one
        (7, 16, 0, 10**9, None, 1),
        (7, 1, 10**12, 10**9, None, 1),
        (7, 4, 10**9, 10**9, 3, 3),  # who says how many is believed
        (2, 4, 10**9, 10**9, 5, 2),
        (7, 4, 10**12, 10**9, 1, 1),
        (7, 4, 10**12, 0, None, 4),
    ],
)
def test_how_many_work_at_once(solvers, processors, available, work_bytes, workers, expected, monkeypatch):
    monkeypatch.setattr(engine, "available_bytes", lambda: available)
    monkeypatch.setattr(engine, "num_processors", lambda: processors)
    crew = [Steps(str(index), workers=workers) for index in range(solvers)]
    crew[0].work_bytes = work_bytes  # the largest counts
    assert num_workers(crew) == expected


@pytest.mark.parametrize("workers", [1, 3])
def test_torchs_threads_are_shared_out_and_set_back_afterwards(workers, place, monkeypatch):
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(engine, "num_processors", lambda: 4)
    torch.set_num_threads(4)
    try:
        look = lambda step: seen.append(torch.get_num_threads())  # noqa: E731
        solve_all([Steps(str(index), 1, look, workers) for index in range(5)], place, ignore)
        assert len(seen) == 5 and len(set(seen)) == 1
        assert seen[0] == 1 or seen[0] * workers <= 4
        assert torch.get_num_threads() == 4
        with ThreadPoolExecutor(1) as later:
            assert later.submit(torch.get_num_threads).result() == 4
        with pytest.raises(RuntimeError, match="the third step failed"):
            recorded = Workplace(place.read, place.scratch, Recorder())
            solve_all([Steps("failing", act=failing, workers=workers)], recorded, ignore)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


ROWS = [
    {"layer": 2, "tensor": "query", "norm_ratio": 0.25, "iterations": 21, "seconds": 1.25},
    {"layer": 4, "tensor": "query", "norm_ratio": 0.75, "iterations": 21, "seconds": 0.5},
    {"layer": 2, "tensor": "gate", "norm_ratio": 0.123456, "iterations": 1, "seconds": 0.0},
]


def test_numbers_are_means_with_the_lowest_and_highest_and_seconds_are_summed():
    assert summary_table(ROWS) == [
        ["tensor", "layers", "norm ratio", "iterations", "seconds"],
        ["query", "2", "0.5 (0.25 to 0.75)", "21", "1.8"],
        ["gate", "1", "0.123", "1", "0.0"],
    ]


def test_kinds_keep_their_order_and_what_was_not_measured_is_left_empty():
    rows = [*ROWS, {"layer": 3, "tensor": "up", "norm_ratio": None, "seconds": 2.0}]
    table = summary_table(rows)
    assert [row[0] for row in table] == ["tensor", "query", "gate", "up"]
    assert table[-1] == ["up", "1", "", "", "2.0"]


def test_seconds_are_left_out_where_two_runs_shall_say_the_same():
    with_seconds, without = summary_table(ROWS), summary_table(ROWS, with_seconds=False)
    column = with_seconds[0].index("seconds")
    assert without == [row[:column] + row[column + 1 :] for row in with_seconds]

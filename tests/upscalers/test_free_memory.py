"""How much memory can be taken, and how many processors."""

import os

from tests.upscalers.processes import run_python
from upscalers.machine.free_memory import available_bytes
from upscalers.machine.processors import num_processors

LIMITED = """
import resource
from upscalers.machine.free_memory import available_bytes

resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000, resource.RLIM_INFINITY))
before = available_bytes()
held = bytearray(300_000_000)
print(before, available_bytes())
"""


def test_processors_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 5}, raising=False)
    assert num_processors() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert num_processors() == 7


def test_it_is_what_the_kernel_says():
    total = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemTotal:"))
    assert 0 < available_bytes() <= total


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_container_may_have_less_and_gets_back_what_files_take(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_bytes(tmp_path) == 4000 * 1024
    write(tmp_path, "sys/fs/cgroup/memory.current", "1500000\n")
    write(tmp_path, "sys/fs/cgroup/memory.stat", "anon 7\ninactive_file 200000\n")
    for limit, available in (("max", 4000 * 1024), ("9000000", 4000 * 1024), ("2000000", 700_000), ("1000000", 0)):
        write(tmp_path, "sys/fs/cgroup/memory.max", f"{limit}\n")
        assert available_bytes(tmp_path) == available


def test_without_a_word_of_the_kernel_it_is_all_that_the_machine_has(tmp_path):
    assert available_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_limit_on_the_address_space_counts_with_what_is_taken_of_it():
    done = run_python(LIMITED)
    before, after = map(int, done.stdout.split())
    assert 500_000_000 < before < 1_000_000_000
    assert 290_000_000 < before - after < 310_000_000

"""How much memory can be taken."""

from tests.upscalers.processes import run_python
from upscalers.engine.free_memory import available_bytes

LIMITED = """
import resource
from upscalers.engine.free_memory import available_bytes

resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000, resource.RLIM_INFINITY))
before = available_bytes()
held = bytearray(300_000_000)
print(before, available_bytes())
"""


def test_it_is_what_the_kernel_says():
    total = next(int(line.split()[1]) * 1024 for line in open("/proc/meminfo") if line.startswith("MemTotal:"))
    assert 0 < available_bytes() <= total


def test_a_limit_on_the_address_space_counts_with_what_is_taken_of_it():
    done = run_python(LIMITED)
    before, after = map(int, done.stdout.split())
    assert 500_000_000 < before < 1_000_000_000
    assert 290_000_000 < before - after < 310_000_000

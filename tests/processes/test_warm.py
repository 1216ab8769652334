"""Programs that are forked run as in a fresh interpreter, several of them as ranks of one group."""

from processes.warm import run_ranks, run_warm

TOLD = """
import atexit, json, os, sys
atexit.register(print, "ended")
project = [name for name in sys.modules if name.split(".")[0] in ("midus_hf", "upscalers", "processes")]
print(json.dumps([__name__, sys.argv[1:], os.getcwd(), os.environ["TOLD"], sys.stdin.read(), project]))
print("an error", file=sys.stderr)
sys.exit(3)
"""


def test_forked_program_has_a_fresh_environment(tmp_path):
    done = run_warm(TOLD, 1, "two", folder=tmp_path, TOLD="yes")
    assert done.stdout == f'["__main__", ["1", "two"], "{tmp_path}", "yes", "", []]\nended\n'
    assert (done.returncode, done.stderr) == (3, "an error\n")


def test_programs_do_not_see_each_other():
    program = "import torch; print(hasattr(torch, 'mine')); torch.mine = 1"
    assert [run_warm(program).stdout for _ in range(2)] == ["False\n"] * 2


def test_ranks_meet_and_one_that_fails_fails_all(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "ranks = [None] * dist.get_world_size()\ndist.all_gather_object(ranks, dist.get_rank())\n"
        "dist.destroy_process_group()\nprint(ranks, sys.argv, __file__)\nsys.exit(ranks[-1] if sys.argv[1] == 'fail' else 0)\n"
    )
    done = run_ranks(script, "well", processes=3)
    assert (done.returncode, done.stdout) == (0, f"[0, 1, 2] {[str(script), 'well']} {script}\n" * 3)
    assert run_ranks(script, "fail").returncode == 1

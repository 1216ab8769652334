"""What is told of attention over the depth: goals of the newest run, and a table of all that was timed."""

from benchmarks.report.depth_tables import depth_section

RUN = {
    "date": "2026-01-01T00:00:00",
    "commit": "abc1234",
    "machine": "x",
    "device": "H200",
    "torch": "2",
    "triton": "3",
    "transformers": "5",
    "dtype": "bfloat16",
}
TIMES = {"sequence": "100.0", "merged": "110.0", "merged-flash": "102.0", "depth": "12.0", "bound": "10.0"}


def rows(tokens, group, slots, times=TIMES, **changes):
    sizes = {"tokens": str(tokens), "group": str(group), "slots": str(slots)}
    further = {"status": "ok", "error": "", "kernel": "", "host_ms": "1.5", "wall_ms": "200"}
    return [{**RUN, **sizes, "what": what, **further, "median_ms": ms, **changes} for what, ms in times.items()]


def goals_of(section):
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| GPU")]


def unmeasured_in(section):
    return [line for line in section.partition("Not measured:")[2].splitlines() if line.startswith("- GPU")]


def test_nothing_measured_reaches_nothing():
    made = depth_section([])
    assert not goals_of(made) and len(unmeasured_in(made)) == 4


def test_a_goal_is_reached_by_the_fastest_way_and_missed_by_the_worst_bound():
    made = depth_section(
        [
            *rows(65536, 8, 64),
            *rows(4096, 8, 64, TIMES | {"merged": "118.0", "merged-flash": "117.0", "depth": "16.0"}),
            *rows(16384, 8, 256, {"sequence": "100.0", "merged": "120.0"}),
        ]
    )
    assert goals_of(made) == [
        [
            "GPU, 65,536 tokens, 8 queries per key, 64 slots: at least 98% of FlashAttention's speed",
            "merged 90.9%, merged-flash 98.0%",
            "yes",
        ],
        [
            "GPU, 4,096 tokens, 8 queries per key, 64 slots: at least 85% of FlashAttention's speed",
            "merged 84.7%, merged-flash 85.5%",
            "yes",
        ],
        [
            "GPU, 16,384 tokens, 8 queries per key, 256 slots: at least 90% of FlashAttention's speed",
            "merged 83.3%",
            "no",
        ],
        [
            "GPU: the depth alone takes at most 1.5 times its bound, at every shape",
            "1.60 at worst, 1.20 at best",
            "no",
        ],
    ]


def test_newer_runs_replace_older_ones_and_a_cpu_reaches_no_goal_of_a_gpu():
    newer = rows(65536, 8, 64, TIMES | {"merged-flash": "125.0"}, date="2026-01-02T00:00:00")
    assert goals_of(depth_section([*rows(65536, 8, 64), *newer]))[0][1] == "merged 90.9%, merged-flash 80.0%"
    made = depth_section(rows(65536, 8, 64, device="cpu", host_ms="", wall_ms=""))
    assert not goals_of(made) and len(unmeasured_in(made)) == 4
    assert "### Depth on cpu, bfloat16" in made and "wall" not in made


def test_the_table_tells_speeds_beside_the_papers_and_what_failed():
    failed = rows(65536, 8, 64, {"merged-flex": ""}, status="out of memory", host_ms="", wall_ms="")
    slower = rows(65536, 8, 64, {"merged-flash": "102.0"}, error="0.0041", kernel="FLASH_ATTENTION")
    made = depth_section([*rows(65536, 8, 64, {"sequence": "100.0"}), *slower, *failed])
    assert "| 65536x8x64 | sequence | 100 | 1.50 | 200 |  |  |  |  |" in made
    assert "| 65536x8x64 | merged-flash | 102 | 1.50 | 200 | 98.0% | 97.3% | 4.1e-03 | FLASH_ATTENTION |" in made
    assert "| 65536x8x64 | merged-flex | out of memory |  |  |  |  |  |  |" in made
    assert "H200 (x); commit abc1234, 2026-01-01; torch 2, triton 3, transformers 5" in made


def test_without_the_sequence_nothing_is_compared():
    made = depth_section(rows(65536, 8, 64, {"merged-flash": "102.0"}))
    assert made.endswith("| 65536x8x64 | merged-flash | 102 | 1.50 | 200 |")
    assert not goals_of(made) and len(unmeasured_in(made)) == 4

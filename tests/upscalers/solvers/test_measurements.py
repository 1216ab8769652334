"""The summary of what solvers measured: one row a kind of tensor."""

from upscalers.tensors.measurements import summary_table

ROWS = [
    {"layer": 2, "tensor": "".join(("que", "ry")), "norm_ratio": 0.25, "iterations": 21, "seconds": 1.25},
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

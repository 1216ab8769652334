"""Tables whose columns are spread over processes give what whole tables give."""

from pathlib import Path

import pytest
import torch
from processes.warm import run_ranks

from midus_hf.ops.gather.column_shards import sharded_gathered_products

WORKER = Path(__file__).with_name("column_worker.py")


@pytest.mark.parametrize("processes", [2, 3])
def test_each_process_gets_what_a_whole_table_gives_its_tokens(processes):
    run = run_ranks(WORKER, processes=processes, PYTHONPATH=str(Path(__file__).parents[2]))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("checked") == processes


def test_columns_that_are_not_as_wide_together_as_the_vectors_are_refused():
    class Group:
        def size(self):
            return 2

    vectors, bank, slots = torch.zeros(1, 5), torch.zeros(4, 2), torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"vectors is \(1, 5\) and bank \(4, 2\) in each of 2 processes; expected vectors as wide"
    ):
        sharded_gathered_products(vectors, bank, slots, Group())

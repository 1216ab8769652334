"""The kernels of every op compute what the reference does; PyTorch and C are held to the same in `tests/ops/test_laws.py`."""

from ops.laws import *  # noqa: F403 - the tests of this file
from ops.laws import fixtures_of

# Those are in test_registration.py, which the newest versions run, too.
del test_op_passes_opcheck, test_graph_has_one_node_per_direction_and_the_same_bits  # noqa: F821

case, gathering, scoring, batched = fixtures_of("triton")

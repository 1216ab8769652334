"""The kernels of every op compute what the reference does; PyTorch and C are held to the same in `tests/ops/test_laws.py`."""

from ops.laws import *  # noqa: F403 - the tests of this file
from ops.laws import each_body
from ops.table import GATHERINGS, OPS

# Those are in test_registration.py, which the newest versions run, too.
del test_it_is_registered_rightly, test_a_graph_holds_it_and_its_gradient_as_one_node_each_and_gives_the_same_bits  # noqa: F821

CASES = [(name, "triton") for name, op in OPS.items() if "triton" in op.bodies]

case = each_body(OPS, CASES, in_c="in_c")
gathering = each_body(OPS, [pair for pair in CASES if pair[0] in GATHERINGS], in_c="in_c")

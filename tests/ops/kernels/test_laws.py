"""The kernels of every op compute what the reference does; PyTorch and C are held to the same in `tests/ops/test_laws.py`."""

from ops.laws import *  # noqa: F403 - the tests of this file
from ops.laws import fixtures_of

# Those are in test_registration.py, which the newest versions run, too.
del test_it_is_registered_rightly, test_a_graph_holds_it_and_its_gradient_as_one_node_each_and_gives_the_same_bits  # noqa: F821

case, gathering, scoring, batched = fixtures_of("triton")

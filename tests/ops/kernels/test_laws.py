"""Every body of every op computes what the reference does, also where memory that it does not fill holds no numbers."""

import pytest
from ops.kernels.test_fused_depth import FUSED
from ops.laws import *  # noqa: F403 - the tests of this file
from ops.table import GATHERINGS, OPS

# Those are in test_registration.py, which the newest versions run, too.
del test_it_is_registered_rightly, test_a_graph_holds_it_and_its_gradient_as_one_node_each_and_gives_the_same_bits  # noqa: F821

ROWS = OPS | {"sequence and depth": FUSED}
CASES = [(name, body) for name, op in ROWS.items() for body in op.bodies]


def made(request):
    """An op and a body of it, if that can run."""
    name, body = request.param
    if body == "native":
        request.getfixturevalue("in_c")
    return ROWS[name], body


def id_of(case):
    return "-".join(case).replace(" ", "-")


@pytest.fixture(params=CASES, ids=id_of)
def case(request):
    """Each op with each body."""
    return made(request)


@pytest.fixture(params=[case for case in CASES if case[0] in GATHERINGS], ids=id_of)
def gathering(request):
    """Each op that gathers rows, and may give a sparse gradient, with each body."""
    return made(request)

"""Linear maps of rows that have blocks of their own."""

import pytest
import torch

from midus_hf.ops.block_linear.op import block_by_block, block_linear


def inputs(rows=5, tokens=3, width=4, outputs=6, num_blocks=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        "inputs": torch.randn(rows, tokens, width, dtype=dtype, generator=generator),
        "weights": torch.randn(num_blocks, outputs, width, dtype=dtype, generator=generator),
        "blocks": torch.randint(num_blocks, (rows,), generator=generator),
    }


@pytest.mark.parametrize("backend", ["reference", "torch", "auto"])
@pytest.mark.parametrize("rows, num_blocks", [(5, 3), (5, 1), (2, 4), (1, 1), (4, 4), (0, 2)], ids=str)
def test_each_row_is_mapped_by_its_block(rows, num_blocks, backend):
    arguments = inputs(rows, num_blocks=num_blocks)
    result = block_linear(**arguments, backend=backend)
    assert result.shape == (rows, 3, 6)
    for row, block in enumerate(arguments["blocks"].tolist()):
        torch.testing.assert_close(result[row], arguments["inputs"][row] @ arguments["weights"][block].T)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("num_blocks", [1, 3, 6])
def test_gradients(num_blocks, backend):
    arguments = inputs(num_blocks=num_blocks)
    leaves = [arguments[name].requires_grad_() for name in ("inputs", "weights")]
    assert torch.autograd.gradcheck(
        lambda *given_: block_linear(*given_, arguments["blocks"], backend=backend), leaves
    )


def test_rows_grouped_by_block_give_what_they_give_alone():
    arguments = inputs(rows=7, num_blocks=4, dtype=torch.float32)
    alone = torch.cat(
        [
            block_linear(arguments["inputs"][row : row + 1], arguments["weights"], arguments["blocks"][row : row + 1])
            for row in range(7)
        ]
    )
    torch.testing.assert_close(block_by_block(**arguments), alone)


def test_weights_take_the_dtype_of_inputs():
    arguments = inputs(dtype=torch.float32)
    assert (
        block_linear(arguments["inputs"].bfloat16(), arguments["weights"], arguments["blocks"]).dtype == torch.bfloat16
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"inputs": torch.zeros(2, 4)},
            r"inputs is \(2, 4\) and weights \(3, 6, 4\); expected \[batch, tokens, width\]",
        ),
        ({"weights": torch.zeros(3, 6, 5)}, r"weights \(3, 6, 5\); expected"),
        ({"blocks": torch.zeros(4, dtype=torch.int64)}, r"blocks is \(4,\); expected one for each of the 5 rows"),
    ],
    ids=["inputs", "weights", "blocks"],
)
def test_shapes_that_disagree_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        block_linear(**{**inputs(), **change})

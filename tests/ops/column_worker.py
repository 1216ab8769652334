"""What one of several processes checks of tables whose columns they share; run by `test_column_shards`."""

import sys

import torch
import torch.distributed as dist

from midus_hf.ops.gather.column_shards import sharded_gathered_products, sharded_parted_gather, sharded_weighted_gather
from midus_hf.ops.gather.parted import parted_gather
from midus_hf.ops.gather.products import gathered_products
from midus_hf.ops.gather.weighted import weighted_gather

ROWS, WIDTH, M, PARTS = 11, 6, 3, 2


def inputs(tokens: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "slots": torch.randint(1, ROWS - 1, (1, tokens, M), generator=generator),
        "weights": torch.randn(1, tokens, M, generator=generator, dtype=torch.float64),
        "parts": torch.randint(PARTS, (1, tokens, M), generator=generator),
        "of_parts": torch.randn(1, tokens, PARTS, WIDTH, generator=generator, dtype=torch.float64),
        "vectors": torch.randn(1, tokens, WIDTH, generator=generator, dtype=torch.float64),
        "of_sums": torch.randn(1, tokens, WIDTH, generator=generator, dtype=torch.float64),
        "of_products": torch.randn(1, tokens, M, generator=generator, dtype=torch.float64),
    }


def check(sizes: list[int], sparse: bool) -> None:
    """Outputs and gradients of this process's tokens, and of its columns for the tokens of all, equal those of whole tables."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    columns = slice(rank * WIDTH // processes, (rank + 1) * WIDTH // processes)
    expected_table = whole.clone().requires_grad_()
    own: dict[str, torch.Tensor] = {}
    for process, tokens in enumerate(sizes):
        given = inputs(tokens, seed=process)
        weights, vectors = given["weights"].requires_grad_(), given["vectors"].requires_grad_()
        sums = weighted_gather(expected_table, given["slots"], weights, backend="reference")
        products = gathered_products(vectors, expected_table, given["slots"], backend="reference")
        by_part = parted_gather(expected_table, given["slots"], weights, given["parts"], PARTS, backend="reference")
        outputs, gradients = (
            [sums, products, by_part],
            [given[name] for name in ("of_sums", "of_products", "of_parts")],
        )
        torch.autograd.backward(outputs, gradients)
        if process == rank:
            own = {
                "sums": sums,
                "by part": by_part,
                "products": products,
                "weights": weights.grad,
                "vectors": vectors.grad,
            }
    given = inputs(sizes[rank], seed=rank)
    weights, vectors = given["weights"].requires_grad_(), given["vectors"].requires_grad_()
    table = whole[:, columns].clone().requires_grad_()
    sums = sharded_weighted_gather(table, given["slots"], weights, dist.group.WORLD, sparse_gradient=sparse)
    products = sharded_gathered_products(vectors, table, given["slots"], dist.group.WORLD, sparse_gradient=sparse)
    by_part = sharded_parted_gather(
        table, given["slots"], weights, given["parts"], PARTS, dist.group.WORLD, sparse_gradient=sparse
    )
    outputs, gradients = [sums, products, by_part], [given[name] for name in ("of_sums", "of_products", "of_parts")]
    torch.autograd.backward(outputs, gradients)
    found = {"sums": sums, "by part": by_part, "products": products, "weights": weights.grad, "vectors": vectors.grad}
    for name, tensor in own.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, name=name: f"{name}: {text}")
    gradient = table.grad
    assert gradient.is_sparse == sparse
    if sparse:
        read = {
            int(slot) for process, tokens in enumerate(sizes) for slot in inputs(tokens, process)["slots"].flatten()
        }
        assert gradient.coalesce().indices().flatten().tolist() == sorted(read)
        gradient = gradient.to_dense()
    torch.testing.assert_close(gradient, expected_table.grad[:, columns])


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for sizes in ([4, 4, 4], [5, 1, 3]):
        for sparse in (False, True):
            check(sizes[: dist.get_world_size()], sparse)
    dist.destroy_process_group()
    sys.stdout.write("checked\n")

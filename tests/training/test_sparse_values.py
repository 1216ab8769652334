"""Tables of which a step reads few rows: gradients, updates and norms of these rows, as dense ones have them."""

import pytest
import torch
from training.outcomes import assert_resumes, logged, weights
from transformers import AutoModelForCausalLM, default_data_collator

from midus_hf.training.row_adamw import RowAdamW, clip_rows
from midus_hf.training.run import run_training
from midus_hf.training.trainer import MemoryTrainer

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def sparse(gradient: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), gradient[rows], gradient.shape)


def trained_by(optimizer_class, table, gradients):
    table = torch.nn.Parameter(table.clone())
    optimizer = optimizer_class([table], **OPTIONS)
    for gradient in gradients:
        table.grad = gradient
        optimizer.step()
    return table.detach()


def test_row_update_equals_adamw():
    start, *gradients = torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0))
    dense = trained_by(torch.optim.AdamW, start, [gradient.clone() for gradient in gradients])
    every = [3, 1, 0, 5, 4, 2]
    by_rows = trained_by(RowAdamW, start.double(), [sparse(gradient.double(), every) for gradient in gradients])
    as_adamw = trained_by(torch.optim.AdamW, start.double(), [gradient.double() for gradient in gradients])
    torch.testing.assert_close(by_rows, as_adamw, rtol=1e-13, atol=0)

    twice, summed = sparse(gradients[0], [2, 2]), sparse(2 * gradients[0], [2])
    assert torch.equal(trained_by(RowAdamW, start, [twice]), trained_by(RowAdamW, start, [summed]))

    of_tables = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 2]]), gradients[0][[1, 5]], (2, 3, 3))
    flat = trained_by(RowAdamW, start, [sparse(gradients[0], [1, 5])])
    assert torch.equal(trained_by(RowAdamW, start.view(2, 3, 3), [of_tables]).view(6, 3), flat)
    matrix, table = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = RowAdamW([matrix, table], **OPTIONS)
    for gradient in gradients:
        matrix.grad, table.grad = gradient.clone(), sparse(gradient, [0, 5])
        optimizer.step()
    assert torch.equal(matrix, dense)
    assert torch.equal(table, trained_by(RowAdamW, start, [sparse(gradient, [0, 5]) for gradient in gradients]))


class WholeMoments(torch.optim.AdamW):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for table in group["params"]:
                gradient, state = table.grad.coalesce(), self.state[table]
                if not state:
                    state |= {"step": 0, "exp_avg": torch.zeros_like(table), "exp_avg_sq": torch.zeros_like(table)}
                state["step"] += 1
                (beta1, beta2), rows, values = group["betas"], gradient.indices()[0], gradient.values()
                mean = state["exp_avg"][rows].lerp_(values, 1 - beta1)
                square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(values, values, value=1 - beta2)
                state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
                root = square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
                updated = table[rows].mul_(1 - group["lr"] * group["weight_decay"])
                table[rows] = updated.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1 ** state["step"]))


@pytest.mark.parametrize("restarts", [(), (1, 4, 9)], ids=["at-once", "resumed"])
def test_moments_of_read_rows_are_exact(restarts, tmp_path):
    table, *gradients = torch.randn(13, 40, 3, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(5)
    # Which rows of 40 each step reads: more and more of them, some again and again.
    steps = [torch.randperm(40, generator=generator)[: 1 + number].tolist() for number in range(12)]
    expected = trained_by(WholeMoments, table, map(sparse, gradients, steps))
    trained = torch.nn.Parameter(table.clone())
    optimizer, read = RowAdamW([trained], **OPTIONS), set()
    for number, (gradient, rows) in enumerate(zip(gradients, steps, strict=True)):
        trained.grad = sparse(gradient, rows)
        optimizer.step()
        read |= set(rows)
        state = optimizer.state[trained]
        assert len(state["exp_avg"]) == len(state["exp_avg_sq"]) == len(read) and set(state["rows"].tolist()) == read
        held = [state[key].untyped_storage().nbytes() for key in ("exp_avg", "exp_avg_sq", "rows")]
        assert max(held) <= 1.5 * 12 * max(len(read), 8), "no memory for rows that nobody read"
        if number in restarts:
            torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
            assert (tmp_path / "optimizer.pt").stat().st_size < 4096 + 2 * 12 * len(read) + 8 * len(read)
            optimizer = RowAdamW([trained], **OPTIONS)
            optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
            assert optimizer.state[trained]["rows"].dtype == torch.int64
    assert torch.equal(trained, expected)
    assert not torch.equal(trained, table)


def test_rows_are_clipped_to_a_norm_that_they_have_together():
    tables = [torch.nn.Parameter(torch.zeros(4, 2)) for _ in range(2)]
    for table in tables:
        table.grad = sparse(torch.full((4, 2), 3.0), [1, 2])
    norms = [clip_rows(tables, most).item() for most in (1.0, 5.0)]
    assert norms == pytest.approx([3 * 8**0.5, 1.0], rel=1e-5)


BANK = "model.memory_tables.chapters.0.bank"
OF_MANY_CHAPTERS = {"memory_tokens": 192, "chapters": 96, "routing": "sequence"}


@pytest.mark.parametrize(
    ("method", "options", "changes"),
    [
        ("ultramem-v2", {}, {"max_steps": 1, "gradient_accumulation_steps": 2}),
        ("ultramem-v2", {}, {"max_steps": 1, "max_grad_norm": 0}),
        # Its output projection starts at zero, so that the bank has a gradient from the second step on.
        ("moc", OF_MANY_CHAPTERS, {"max_steps": 2}),
    ],
    ids=str,
)
def test_sparse_run_moves_read_rows_as_a_dense_one(method, options, changes, upscaled, config_for, tmp_path):
    model = upscaled("llama", method, **options)
    for is_sparse in (False, True):
        run_training(config_for(str(is_sparse), model=model, warmup_steps=0, sparse_values=is_sparse, **changes))
    start, dense, by_rows = (weights(folder) for folder in (model, tmp_path / "False", tmp_path / "True"))
    norms = [logged(tmp_path / name, "grad_norm") for name in ("False", "True")]
    rtol = 1e-3 if method == "moc" else 1e-4
    assert norms[1] == pytest.approx(norms[0], rel=rtol) and norms[0][-1] > 0
    tables = [name for name in start if name == BANK or name.endswith("value_table")]
    assert len(tables) == (1 if method == "moc" else 2)
    for name in tables:
        torch.testing.assert_close(by_rows[name], dense[name], rtol=rtol, atol=rtol / 100)
        moved = (by_rows[name] != start[name]).any(-1)
        if not name.endswith("pre_value_table"):
            assert moved.any() and not moved.all()


def test_sparse_run_resumes_exactly(upscaled, config_for):
    assert_resumes(config_for, 2, model=upscaled("llama", "ultramem-v2"), max_steps=4, sparse_values=True)


def test_gradients_are_dense_again_once_the_run_is_over(upscaled, config_for):
    arguments = config_for(model=upscaled("llama", "ultramem-v2"), max_steps=1, sparse_values=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)} for _ in range(8)]
    MemoryTrainer(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()
    model(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss.backward()
    tables = [value for name, value in model.named_parameters() if name.endswith("value_table")]
    assert tables and not any(table.grad.is_sparse for table in tables)

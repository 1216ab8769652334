"""What trains, in which groups, rates and dtypes; and rows of tables, which train as dense ones."""

import dataclasses

import pytest
import torch
from models.upscaled import upscaled_model
from training.outcomes import assert_resumes, logged, weights
from training.tiny_run import NEW_LAYERS, refused
from transformers import AutoModelForCausalLM, TrainingArguments, default_data_collator

from midus_hf.memories.module import MemoryModule
from midus_hf.training.arguments import MemoryArguments
from midus_hf.training.keys import Rates
from midus_hf.training.optim import cast_for_training, group_schedules, parameter_groups, restore_dtypes, set_trainable
from midus_hf.training.row_adamw import RowAdamW, clip_rows
from midus_hf.training.run import run_training
from midus_hf.training.trainer import MemoryTrainer
from tests.memory.building import build

# Kinds of tensors of a memory; others are weights, and norms and biases.
KINDS = {"keys": ("row_keys", "column_keys"), "values": ("value_bank",), "transforms": ("value_transform",)}

DECAY = ("decay", "weights", 1e-3, 0.1, "fixed")
WITH_TRANSFORMS = ("decay", "weights transforms", 1e-3, 0.1, "fixed")
NO_DECAY = ("no_decay", "norms", 1e-3, 0, "fixed")
KEYS = ("keys", "keys", 1e-3, 0, "constant")
VALUES = ("values", "values", 1e-3, 0, "constant")
# Rates next to a rate of 1e-3 and a decay of 0.1, and the groups: name, kinds of tensors, rate, decay and schedule.
CASES = [
    ({}, [WITH_TRANSFORMS, NO_DECAY, KEYS, VALUES]),
    (
        {"key_value_learning_rate": 2e-3},
        [WITH_TRANSFORMS, NO_DECAY, ("keys", "keys", 2e-3, 0, "constant"), ("values", "values", 2e-3, 0, "constant")],
    ),
    ({"value_learning_rate": 1e-2}, [WITH_TRANSFORMS, NO_DECAY, KEYS, ("values", "values", 1e-2, 0, "constant")]),
    (
        {"key_value_learning_rate": 2e-3, "value_learning_rate": 1e-2, "value_schedule": "fixed"},
        [WITH_TRANSFORMS, NO_DECAY, ("keys", "keys", 2e-3, 0, "constant"), ("values", "values", 1e-2, 0, "fixed")],
    ),
    ({"value_schedule": "4x-to-1x"}, [WITH_TRANSFORMS, NO_DECAY, KEYS, ("values", "values", 1e-3, 0, "4x-to-1x")]),
    ({"memory_learning_rate": 2e-3}, [DECAY, NO_DECAY, ("memory", "transforms", 2e-3, 0.1, "fixed"), KEYS, VALUES]),
    ({"memory_keys": "weights"}, [("decay", "weights transforms keys", 1e-3, 0.1, "fixed"), NO_DECAY, VALUES]),
    (
        {"memory_keys": "weights", "memory_learning_rate": 2e-3},
        [DECAY, NO_DECAY, ("memory", "keys transforms", 2e-3, 0.1, "fixed"), VALUES],
    ),
    ({"value_weight_decay": 0.1}, [WITH_TRANSFORMS, NO_DECAY, KEYS, ("values", "values", 1e-3, 0.1, "constant")]),
]  # fmt: skip


@pytest.fixture
def model(family, upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled(family))
    set_trainable(model, "new")
    return model


def names_in(model, group) -> set[str]:
    inside = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside}


def names_by_kind(model) -> dict[str, set[str]]:
    memories = [name for name, module in model.named_modules() if isinstance(module, MemoryModule)]
    kinds = {kind: {f"{memory}.{name}" for memory in memories for name in names} for kind, names in KINDS.items()}
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    kinds["norms"] = {name for name in trains if "norm" in name or name.endswith("bias")}
    kinds["weights"] = trains.difference(*kinds.values())
    assert all(kinds.values())
    return kinds


def made_groups(model, **rates) -> list[dict]:
    return parameter_groups(model, Rates(learning_rate=1e-3, weight_decay=0.1, **rates))


def of_groups(groups) -> list[tuple]:
    return [(group["name"], group["lr"], group["weight_decay"], group["schedule"]) for group in groups]


@pytest.mark.parametrize(("rates", "expected"), CASES, ids=str)
def test_each_trained_parameter_is_in_its_group(model, rates, expected):
    groups, kinds = made_groups(model, **rates), names_by_kind(model)
    assert of_groups(groups) == [(name, *rest) for name, _, *rest in expected]
    for group, (name, kinds_inside, *_) in zip(groups, expected, strict=True):
        assert names_in(model, group) == set().union(*(kinds[kind] for kind in kinds_inside.split())), name
    # A wrapper that renames parameters changes no group, and each is in one of them when everything trains.
    outer = made_groups(torch.nn.ModuleDict({"wrapped": model}), **rates)
    assert [list(map(id, group["params"])) for group in outer] == [list(map(id, group["params"])) for group in groups]
    set_trainable(model, "all")
    grouped = [id(parameter) for group in made_groups(model, **rates) for parameter in group["params"]]
    assert sorted(grouped) == sorted(map(id, model.parameters()))


def test_query_norms_do_not_decay():
    memory = build("midus-pkm", hidden_size=8, num_heads=2, n=4, k=2, query_norm="batch")
    for rates, name, rate in (({}, "no_decay", 1e-3), ({"memory_learning_rate": 2e-3}, "memory_no_decay", 2e-3)):
        (group,) = [group for group in made_groups(memory, **rates) if group["name"] == name]
        assert names_in(memory, group) == {"query_norm_weight", "query_norm_bias"}, name
        assert (group["lr"], group["weight_decay"]) == (rate, 0)


def plateau(*schedules: str):
    groups = [{"params": [torch.zeros(1)], "lr": 1.0, "schedule": schedule} for schedule in schedules]
    optimizer = torch.optim.SGD(groups)
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5}}
    return optimizer, group_schedules(optimizer, 20, **options)


def test_plateau_lowers_only_what_follows_the_schedule():
    optimizer, scheduler = plateau("fixed", "constant")
    for loss in (3.0, 3.0, 3.0):
        scheduler.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]
    with refused("is 'reduce_lr_on_plateau', .* or another value_schedule"):
        plateau("fixed", "4x-to-1x")


def test_value_schedule_falls_from_4x_to_1x(upscaled, tmp_path):
    @dataclasses.dataclass
    class Arguments(MemoryArguments, TrainingArguments):
        """Keys of memories and of a Trainer."""

    options = {"learning_rate": 1e-3, "memory_learning_rate": 2e-3, "weight_decay": 0.1, "warmup_steps": 0.1}
    options |= {"key_value_learning_rate": 3e-3, "value_learning_rate": 3e-2, "value_schedule": "4x-to-1x"}
    options |= {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 10}}
    arguments = Arguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **options)
    trainer = MemoryTrainer(AutoModelForCausalLM.from_pretrained(upscaled("llama")), arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=20)
    result = {group["name"]: group["initial_lr"] for group in trainer.optimizer.param_groups}
    assert result == {"decay": 1e-3, "no_decay": 1e-3, "memory": 2e-3, "keys": 3e-3, "values": 3e-2}
    for step, main, values in ((1, 0.5, 3.4), (4, 1, 1.6), (5, 1, 1), (6, 1, 1), (12, 0.9045, 1), (20, 0, 1)):
        factors = [factor(step) for factor in trainer.lr_scheduler.lr_lambdas]
        assert factors == pytest.approx([main, main, main, 1, main * values], rel=1e-4, abs=1e-9)


def test_blocks_follow_the_schedule_by_default(fetching):
    """Hierarchical memories, appendix A.2; values in the model stay constant (MIDUS)."""
    model = AutoModelForCausalLM.from_pretrained(fetching)
    set_trainable(model)
    for schedule, expected in ((None, "fixed"), ("constant", "constant"), ("4x-to-1x", "4x-to-1x")):
        (group,) = parameter_groups(model, Rates(value_schedule=schedule))
        assert (group["name"], group["schedule"]) == ("blocks", expected)


@pytest.mark.parametrize("bf16", [True, False])
def test_trained_tensors_and_statistics_are_float32_in_training(family, bf16):
    model = upscaled_model(family, memory_type="midus-pkm").to(torch.bfloat16).requires_grad_(False)
    memory = model.model.layers[1].memory
    memory.requires_grad_()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dtypes = cast_for_training(model, bf16)
    assert memory.query_mean.dtype == memory.query_variance.dtype == memory.value_bank.dtype == torch.float32
    frozen = model.model.layers[0].self_attn.q_proj.weight
    assert frozen.dtype == (torch.bfloat16 if bf16 else torch.float32)
    restore_dtypes(model, dtypes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {tensor.dtype for name, tensor in model.state_dict().items()} == {torch.bfloat16}


EVERY = [0, 1, 2, 3, 4, 5]


def what_trains(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("kind", "trainable", "means", "layers", "summary"),
    [
        ("upscaled", "new", "new", NEW_LAYERS, "new"),
        ("upscaled", "auto", "new", NEW_LAYERS, "new"),
        ("native", "auto", "new", NEW_LAYERS, "new"),
        ("native", [5, 0, 2], [5, 0, 2], [0, 2, 5], "5, 0, 2"),
        ("upscaled", "all", "all", EVERY, "all"),
        ("recorded", "auto", "all", EVERY, "all"),
    ],
    ids=str,
)
def test_only_chosen_layers_train(kind, trainable, means, layers, summary, family, upscaled, native):
    model = AutoModelForCausalLM.from_pretrained((upscaled if kind == "upscaled" else native)(family))
    if kind == "recorded":
        model.config.upscale["trainable"] = "all"
    set_trainable(model, "new" if trainable == "all" else "all")
    report = set_trainable(model, trainable)
    every = {name for name, _ in model.named_parameters()}
    inside = tuple(f"model.layers.{layer}." for layer in layers)
    assert what_trains(model) == (every if layers == EVERY else {name for name in every if name.startswith(inside)})
    assert (report.trainable, report.layers, report.num_layers) == (means, layers, 6)
    assert report.parameters == sum(model.get_parameter(name).numel() for name in what_trains(model))
    assert report.total_parameters == model.num_parameters()
    text = str(report)
    assert text.startswith(f"Training {summary}: ")
    assert layers == EVERY or f"{report.parameters:,} of {report.total_parameters:,} parameters" in text
    assert layers == EVERY or f"in layers {', '.join(map(str, layers))} of 6" in text


@pytest.mark.parametrize("roles", [["key", "value"], ["transform"]], ids=str)
def test_roles_name_tensors_of_the_new_memories(upscaled, roles):
    model = AutoModelForCausalLM.from_pretrained(upscaled())
    names = {"key": {"row_keys", "column_keys"}, "value": {"value_bank"}, "transform": {"value_transform"}}
    report = set_trainable(model, roles)
    expected = set().union(*(names[role] for role in roles))
    assert {name.rpartition(".")[2] for name in what_trains(model)} == expected
    assert all(".memory." in name for name in what_trains(model))
    assert report.layers == NEW_LAYERS


def test_roles_can_be_kept_from_training(upscaled):
    model = AutoModelForCausalLM.from_pretrained(upscaled())
    every = set_trainable(model, "all") and what_trains(model)
    report = set_trainable(model, "all", frozen=["value"])
    values = {name for name in every if name.endswith("value_bank")}
    assert what_trains(model) == every - values != every
    assert report.parameters == report.total_parameters - sum(model.get_parameter(name).numel() for name in values)
    assert "Training all without the value tensors of memories: " in str(report)


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
        assert len(state["exp_avg"]) == len(state["exp_avg_sq"]) == len(read), number
        assert set(state["rows"].tolist()) == read, number
        held = [state[key].untyped_storage().nbytes() for key in ("exp_avg", "exp_avg_sq", "rows")]
        assert max(held) <= 1.5 * 12 * max(len(read), 8), "no memory for unread rows"
        if number in restarts:
            torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
            assert (tmp_path / "optimizer.pt").stat().st_size < 4096 + 2 * 12 * len(read) + 8 * len(read), number
            optimizer = RowAdamW([trained], **OPTIONS)
            optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
            assert optimizer.state[trained]["rows"].dtype == torch.int64, number
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
    assert norms[1] == pytest.approx(norms[0], rel=rtol)
    assert norms[0][-1] > 0
    tables = [name for name in start if name == BANK or name.endswith("value_table")]
    assert len(tables) == (1 if method == "moc" else 2)
    for name in tables:
        torch.testing.assert_close(by_rows[name], dense[name], rtol=rtol, atol=rtol / 100)
        moved = (by_rows[name] != start[name]).any(-1)
        if not name.endswith("pre_value_table"):
            assert moved.any()
            assert not moved.all()


def test_sparse_run_resumes_exactly(upscaled, config_for):
    assert_resumes(config_for, 2, model=upscaled("llama", "ultramem-v2"), max_steps=4, sparse_values=True)


def test_gradients_are_dense_again_once_the_run_is_over(upscaled, config_for):
    arguments = config_for(model=upscaled("llama", "ultramem-v2"), max_steps=1, sparse_values=True)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    rows = [{"input_ids": torch.arange(3, 11), "labels": torch.arange(3, 11)} for _ in range(8)]
    MemoryTrainer(model, arguments, train_dataset=rows, data_collator=default_data_collator).train()
    model(rows[0]["input_ids"][None], labels=rows[0]["labels"][None]).loss.backward()
    tables = [value for name, value in model.named_parameters() if name.endswith("value_table")]
    assert {table.grad.is_sparse for table in tables} == {False}

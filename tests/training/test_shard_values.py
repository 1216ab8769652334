"""Tables whose columns two processes share train as they do in one process, and are saved whole."""

from pathlib import Path

import pytest
import torch
from processes.warm import run_ranks
from safetensors.torch import load_file
from tiny import save_tiny_model
from training.tiny_run import tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, TrainingArguments

from midus_hf.training.optim.table_columns import TableColumns, tables_of_values
from midus_hf.training.run.train import prepare, train
from midus_hf.training.run.training_log import read_log
from midus_hf.training.trainer.memory_trainer import MemoryTrainer
from upscalers.runs.upscale import upscale

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_cpt.py"
RUN = {"max_steps": 4, "save_every": 2, "precision": "fp32", "sequence_length": 16, "log_every": 1}


@pytest.fixture(scope="module")
def ultramem(tmp_path_factory):
    """A tiny upscaled model with a table that layers share and pre-values; nobody may change it."""
    folder = tmp_path_factory.mktemp("ultramem")
    base = save_tiny_model("llama", folder / "base")
    options = {"n": 16, "k": 2, "share": "ring:2", "heads": 2}
    upscale(base=base, method="ultramem-v2", output=folder / "model", options=options, verify=False)
    tiny_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def in_two_processes(model, corpus, output, **options) -> None:
    words = [f"{name}={value}" for name, value in {**RUN, **options, "batch_size": 1, "shard_values": True}.items()]
    recipe = output.with_suffix(".yaml")
    recipe.write_text("learning_rate: 1e-2\n")
    run = run_ranks(SCRIPT, recipe, f"model={model}", f"corpus={corpus}", f"output={output}", *words)
    assert run.returncode == 0, run.stderr


def logged(folder: Path, name: str) -> list[float]:
    return [event[name] for event in read_log(folder / "log.jsonl") if name in event]


def assert_trained_alike(one: Path, two: Path) -> None:
    weights, shared = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert weights.keys() == shared.keys() and any(name.endswith("value_table") for name in weights)
    for name, tensor in weights.items():
        torch.testing.assert_close(
            shared[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_two_processes_train_as_one_and_go_on_from_a_checkpoint(ultramem, corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny_config(ultramem, corpus, one, **RUN, shard_values=True, keep_checkpoints=None))
    in_two_processes(ultramem, corpus, two, eval_text=corpus, keep_checkpoints="null")
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5) and len(logged(one, "loss")) == 4
    assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
    perplexities = logged(two, "perplexity")
    assert len(perplexities) == 2 and perplexities[1] < perplexities[0]
    assert_trained_alike(one, two)
    start = load_file(ultramem / "model.safetensors")
    moved = [name for name in start if not torch.equal(start[name], load_file(two / "model.safetensors")[name])]
    assert {name.rsplit(".", 1)[-1] for name in moved} >= {"value_table", "pre_value_table", "core", "row_keys"}
    states = [torch.load(folder / "checkpoint-4" / "optimizer.pt")["state"] for folder in (one, two)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state["exp_avg"].shape == states[1][number]["exp_avg"].shape
        torch.testing.assert_close(states[1][number]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-4)

    (two / "checkpoint-4").rename(tmp_path / "away")
    in_two_processes(ultramem, corpus, two, eval_text=corpus, keep_checkpoints="null", resume=True)
    assert len(logged(two, "loss")) == 4
    assert_trained_alike(one, two)


def test_rows_that_were_read_are_updated_alone_in_two_processes_as_in_one(ultramem, corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny_config(ultramem, corpus, one, **RUN, sparse_values=True))
    in_two_processes(ultramem, corpus, two, sparse_values=True)
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5)
    assert_trained_alike(one, two)
    start, trained = (load_file(folder / "model.safetensors") for folder in (ultramem, two))
    for name in start:
        if name.endswith("value_table") and not name.endswith("pre_value_table"):
            moved = (start[name] != trained[name]).any(-1)
            assert moved.any() and not moved.all()


def test_banks_of_chapters_beside_columns_that_are_shared_train_as_in_a_dense_run(ultramem, corpus, tmp_path):
    """No process has the bank's columns alone, so PyTorch averages its gradients, which have to be dense for that.

    In the second step a row that was read in the first alone has a moment in a dense run, and keeps what it had where gradients are
    of rows. So moments of these are compared with one process whose gradients are of rows, and all others with a dense run. Moments
    are linear in gradients, where a weight moves by its rate whichever way the last bit of a gradient points; gradients of rows are
    clipped apart from others, so none are clipped.
    """
    options = {"memory_tokens": 192, "chapters": 96, "k": 2, "routing": "sequence", "layers": [1, 3]}
    options["router_aux_loss_coef"] = 0.0  # balance over two rows is not the mean of the balance of each
    upscale(base=ultramem, method="moc", output=tmp_path / "model", options=options, verify=False)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = {**RUN, "max_steps": 2, "warmup_ratio": 0, "trainable": "all", "learning_rate": 1e-4, "max_grad_norm": 0}
    model, dense, rows, two = (tmp_path / name for name in ("model", "dense", "rows", "two"))
    train(tiny_config(model, corpus, dense, **words))
    train(tiny_config(model, corpus, rows, **words, sparse_values=True))
    in_two_processes(model, corpus, two, **words, sparse_values=True)
    assert logged(two, "loss") == pytest.approx(logged(dense, "loss"), rel=1e-5) and len(logged(two, "loss")) == 2
    bank = "model.memory_tables.chapters.0.bank"
    assert not torch.equal(*(load_file(folder / "model.safetensors")[bank] for folder in (model, two)))
    of_dense, of_rows, of_two = (
        torch.load(folder / "checkpoint-2" / "optimizer.pt")["state"] for folder in (dense, rows, two)
    )
    assert of_two.keys() == of_dense.keys() == of_rows.keys()
    by_rows = [number for number, state in of_two.items() if "rows" in state]
    assert len(by_rows) == 2, "the tables of values; the bank is none of these"
    for number, state in of_two.items():
        expected = (of_rows if number in by_rows else of_dense)[number]
        if number in by_rows:
            assert state["rows"].tolist() == expected["rows"].tolist()
        difference = (state["exp_avg"] - expected["exp_avg"]).norm() / expected["exp_avg"].norm()
        assert difference < 1e-4, tuple(state["exp_avg"].shape)


class OneOfTwo:
    """Stands for a group of processes of which this is the second."""

    def size(self):
        return 2

    def rank(self):
        return 1


def test_a_process_keeps_its_columns_and_a_state_dict_of_them_is_refused(ultramem):
    whole = AutoModelForCausalLM.from_pretrained(ultramem)
    model = AutoModelForCausalLM.from_pretrained(ultramem)
    columns = TableColumns(model, OneOfTwo())
    assert set(columns.parameters) == set(tables_of_values(whole)) and len(columns.parameters) == 2
    for name, table in tables_of_values(whole).items():
        assert torch.equal(model.get_parameter(name), table[:, table.shape[1] // 2 :])
    for save in (model.state_dict, model.model.memory_tables.state_dict):
        with pytest.raises(
            ValueError, match=r"tables of values are split over 2 processes, .* save by Trainer\.save_model"
        ):
            save()
    assert model._ddp_params_and_buffers_to_ignore == list(columns.parameters)


def test_tables_that_do_not_train_are_split_as_well(ultramem):
    """As where chapters were added to a model with such tables, and what was added trains alone."""
    model = AutoModelForCausalLM.from_pretrained(ultramem).requires_grad_(False)
    columns = TableColumns(model, OneOfTwo())
    assert all(table.shape[1] == columns.shapes[name][1] // 2 for name, table in columns.parameters.items())


def test_columns_that_do_not_divide_are_refused_and_nothing_is_cut(ultramem):
    class OneOfThree(OneOfTwo):
        def size(self):
            return 3

    model = AutoModelForCausalLM.from_pretrained(ultramem)
    before = {name: table.shape for name, table in tables_of_values(model).items()}
    with pytest.raises(
        ValueError, match=r"has \d+ columns for 3 processes; expected a number of processes that divides them"
    ):
        TableColumns(model, OneOfThree())
    assert {name: table.shape for name, table in tables_of_values(model).items()} == before


def test_what_cannot_be_split_is_refused(ultramem, upscaled, corpus, tmp_path):
    with pytest.raises(ValueError, match="shard_values is true, but no memory of this model reads few rows"):
        prepare(tiny_config(upscaled("llama"), corpus, tmp_path / "out", shard_values=True))
    arguments = TrainingArguments(str(tmp_path), torch_compile=True, report_to="none", use_cpu=True)
    with pytest.raises(ValueError, match="shard_values is true, for which a model has to run uncompiled"):
        MemoryTrainer(AutoModelForCausalLM.from_pretrained(ultramem), arguments, shard_values=True)

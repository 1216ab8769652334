"""Tables whose columns two processes share train as they do in one process, and are saved whole."""

from pathlib import Path

import pytest
import torch
from training.outcomes import assert_close_weights, logged, moved
from training.tiny_run import refused, tiny_tokenizer
from training.two_processes import in_two_processes, write_recipe
from transformers import AutoModelForCausalLM

from midus_hf.training.run import train
from midus_hf.training.tables import TableColumns, tables_of_values
from upscalers.runs.upscale import upscale

RUN = {"max_steps": 4, "save_steps": 2, "bf16": False, "sequence_length": 16, "logging_steps": 1}


@pytest.fixture
def ultramem(upscaled) -> Path:
    """Make a tiny upscaled model with a table that layers share and pre-values."""
    return upscaled("llama", "ultramem-v2")


def shared(model, corpus, output, **options) -> None:
    """Train in two processes."""
    options = {**RUN, **options, "per_device_train_batch_size": 1, "shard_values": True, "output_dir": output}
    in_two_processes(write_recipe(output.parent, model, corpus, **options))


def test_two_processes_train_as_one_and_go_on_from_a_checkpoint(ultramem, config_for, corpus, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(config_for(one, model=ultramem, **RUN, shard_values=True, save_total_limit=None))
    shared(ultramem, corpus, two, eval_text=corpus, eval_steps=2, save_total_limit="null")
    assert logged(two, "loss") == pytest.approx(logged(one, "loss"), rel=1e-5) and len(logged(one, "loss")) == 4
    assert logged(two, "grad_norm") == pytest.approx(logged(one, "grad_norm"), rel=1e-4)
    perplexities = logged(two, "eval_perplexity")
    assert len(perplexities) == 2 and perplexities[1] < perplexities[0]
    assert_close_weights(one, two)
    kinds = {name.rsplit(".", 1)[-1] for name in moved(ultramem, two)}
    assert kinds >= {"value_table", "pre_value_table", "core", "row_keys"}
    states = [torch.load(folder / "checkpoint-4" / "optimizer.pt")["state"] for folder in (one, two)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state["exp_avg"].shape == states[1][number]["exp_avg"].shape
        torch.testing.assert_close(states[1][number]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-4)

    (two / "checkpoint-4").rename(tmp_path / "away")
    shared(ultramem, corpus, two, eval_text=corpus, eval_steps=2, save_total_limit="null", resume_from_checkpoint=True)
    assert len(logged(two, "loss")) == 4
    assert_close_weights(one, two)


def test_banks_of_chapters_beside_columns_that_are_shared_train_as_in_a_dense_run(
    ultramem, config_for, corpus, tmp_path
):
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
    words = {**RUN, "max_steps": 2, "warmup_steps": 0, "trainable": "all", "learning_rate": 1e-4, "max_grad_norm": 0}
    model, dense, rows, two = (tmp_path / name for name in ("model", "dense", "rows", "two"))
    train(config_for(dense, model=model, **words))
    train(config_for(rows, model=model, **words, sparse_values=True))
    shared(model, corpus, two, **words, sparse_values=True)
    assert logged(two, "loss") == pytest.approx(logged(dense, "loss"), rel=1e-5) and len(logged(two, "loss")) == 2
    assert "model.memory_tables.chapters.0.bank" in moved(model, two)
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
        with refused(r"tables of values are split over 2 processes, .* save by Trainer\.save_model"):
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
    with refused(r"has \d+ columns for 3 processes; expected a number of processes that divides them"):
        TableColumns(model, OneOfThree())
    assert {name: table.shape for name, table in tables_of_values(model).items()} == before

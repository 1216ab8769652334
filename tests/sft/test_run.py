"""Fine-tuning runs: what trains, what has a loss, what comes out, and that they resume exactly."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from models.hierarchical_models import hierarchical_model
from pairs import by_default
from processes.warm import run_ranks
from sft.tiny_chats import character_tokenizer, chat, sft_config, write_rows
from tiny import FAMILIES
from training.outcomes import assert_close_weights, assert_resumes, by_step, events, logged, moved, weights
from training.tiny_run import refused
from transformers import AutoModelForCausalLM, AutoTokenizer

from midus_hf.sft import run as sft_run
from midus_hf.sft.chat_dataset import NO_LABEL, build_chat_dataset
from midus_hf.sft.run import finetune, prepare
from midus_hf.topics.text_files import DocumentError
from midus_hf.training.output.output_folder import as_yaml


@pytest.mark.parametrize("memory", [False, True], ids=["native", "memory"])
def test_it_trains_and_what_comes_out_loads_and_stops_where_answers_end(config_for, family, memory, base, tmp_path):
    model = base(family, memory)
    result = finetune(config_for(model=model))
    assert result.steps == 3 and len(events(tmp_path / "out")) == 3
    assert moved(model, tmp_path / "out") == set(weights(model))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert trained.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.apply_chat_template(chat(1)[:1], tokenize=False) == "<|im_start|>user\nsay 1<|im_end|>\n"
    assert trained.config.eos_token_id == AutoModelForCausalLM.from_pretrained(model).config.eos_token_id


def test_a_model_with_a_bank_is_told_to_be_tuned_and_measured_without_its_blocks(config_for, base, chats, capsys):
    told = "chats have no paths in a tree of topics: they, and held-out text, fetch no blocks from the model's bank"
    prepare(config_for("bank", model=base("llama", "hier-ffn"), trainable="all"))
    assert told in " ".join(capsys.readouterr().out.split())
    prepare(config_for("none", model=base("llama")))
    assert "paths" not in capsys.readouterr().out


def test_a_bank_with_a_generic_memory_is_told_to_be_read_by_that_alone(tmp_path):
    model = hierarchical_model("llama", "hier-ffn", tmp_path, without_ids="generic")
    (line,) = sft_run._describe_banks(sft_run._banks_of(model.config))
    assert (
        "they, and held-out text, read the generic memory alone, in training and where the model is measured" in line
    )


def test_a_bank_that_would_train_alone_is_refused_since_chats_fetch_none_of_it(config_for, base, chats, tmp_path):
    words = (
        "nothing trains: trainable is 'auto', which is the bank's blocks alone, and chats fetch none of them; expected"
    )
    with refused(words):
        prepare(config_for(model=base("llama", "hier-ffn"), trainable="auto"))
    assert not (tmp_path / "out").exists()


def test_new_layers_alone_train_where_the_config_says_so(config_for, base, tmp_path):
    model = base("llama", True)
    finetune(config_for(model=model, trainable="auto"))
    changed = moved(model, tmp_path / "out")
    assert {name.split(".")[2] for name in changed} == {"1", "4"}
    assert "## Trained with" in (tmp_path / "out" / "README.md").read_text()


def test_the_first_loss_is_the_mean_over_labelled_tokens(config_for, base, tmp_path):
    run = prepare(config_for(max_steps=1))
    batch = next(iter(run.trainer.get_train_dataloader()))
    model = AutoModelForCausalLM.from_pretrained(base("llama", True))
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=NO_LABEL)
    assert (labels == NO_LABEL).any() and (labels != NO_LABEL).any()
    run.execute()
    (loss,) = logged(tmp_path / "out")
    assert loss == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("family", by_default(["qwen2", "gemma3"], FAMILIES))
def test_packed_chats_do_not_see_one_another(config_for, family, base):
    """So one step over all of them has the loss that it has when each stands alone."""
    losses = []
    for packing, length in ((False, 96), (True, 126)):
        options = {"packing": packing, "max_length": length, "max_steps": 1, "per_device_train_batch_size": 16}
        config = config_for(str(packing), model=base(family, True), **options)
        result = finetune(config)
        losses.append(result.loss)
        assert result.tokens == build_chat_dataset(config, character_tokenizer(), 128).tokens
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_packing_fills_sequences_and_says_how_full(config_for, base):
    config = config_for(model=base(), packing=True, max_length=125)
    data = build_chat_dataset(config, character_tokenizer(), 128)
    assert data.examples == 16 and len(data.dataset) == 8
    assert data.describe(config)[-1] == f"packed into 8 sequences, {data.tokens / 1000:.1%} full"


def test_what_is_too_long_is_cut_or_left_out_and_counted(config_for, base, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * 50}]},
        {"messages": [{"role": "user", "content": "q" * 90}, {"role": "assistant", "content": "a"}]},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": chat(1)[:2]},
    ]
    config = config_for(model=base(), data=write_rows(tmp_path / "rows.jsonl", rows), max_length=40)
    data = build_chat_dataset(config, character_tokenizer(), 128)
    assert (data.rows, data.examples, data.cut, data.without_answer) == (4, 2, 1, 2)
    assert [len(row["input_ids"]) for row in data.dataset] == [40, 33]
    said = "\n".join(data.describe(config))
    assert "1 were longer than 40 tokens and were cut there" in said
    assert "2 of 4 rows were left out: no answer within a sequence" in said


def test_all_tokens_have_a_loss_if_asked_for(config_for, base):
    config = config_for(model=base(), assistant_only_loss=False)
    data = build_chat_dataset(config, character_tokenizer(), 128)
    assert all(row["labels"] == row["input_ids"] for row in data.dataset) and data.labels == data.tokens


def test_a_template_that_ends_answers_with_no_mark_is_told_of(config_for, base, tmp_path):
    template = "{% for m in messages %}{{ '|' + m['content'] }}{% endfor %}{% if add_generation_prompt %}|{% endif %}"
    (tmp_path / "plain.jinja").write_text(template)
    config = config_for(model=base(), chat_template=str(tmp_path / "plain.jinja"))
    said = build_chat_dataset(config, character_tokenizer(), 128).describe(config)
    assert "the chat template ends answers with no special token, so the model will not learn to stop" in said


@pytest.mark.parametrize("memory", [False, True], ids=["native", "memory"])
def test_adapters_are_trained_and_merged(config_for, memory, base, tmp_path):
    model = base("llama", memory)
    options = {"adapters": {"r": 4}, "trainable": "auto", "save_steps": 2}
    finetune(config_for(model=model, **options))
    changed = moved(model, tmp_path / "out")
    linear = {name for name in changed if name.endswith("_proj.weight")}
    new = {name for name in changed if re.search(r"layers\.[14]\.", name)} if memory else set()
    assert linear and changed == linear | new and any("value_bank" in name for name in new) == memory
    shutil.copytree(tmp_path / "out", tmp_path / "before")
    again = finetune(config_for(model=model, resume_from_checkpoint=True, **options))
    assert again.steps == 3 and moved(tmp_path / "before", tmp_path / "out") == set()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"packing": True, "max_length": 126, "memory_learning_rate": 2e-2, "value_learning_rate": 1e-3},
        {"adapters": {"r": 4, "lora_dropout": 0.1}, "trainable": "auto"},
        {"balance_loss": 0.1, "usage_steps": 1, "frozen": ["value"]},
    ],
    ids=["plain", "packing", "lora", "aids"],
)
def test_a_resumed_run_has_the_losses_and_the_weights_of_one_that_was_never_interrupted(config_for, options):
    assert_resumes(config_for, 2, finetune, max_steps=5, **options)


@pytest.mark.parametrize("packing", [False, True])
def test_chapters_train_with_the_losses_of_their_routers_and_their_bank_can_be_kept(
    config_for, packing, base, tmp_path
):
    options = {"packing": packing, "max_length": 126, "max_steps": 4, "frozen": ["value"]}
    run = prepare(config_for(model=base("llama", "moc"), **options))
    batch = next(iter(run.trainer.get_train_dataloader()))
    model = AutoModelForCausalLM.from_pretrained(base("llama", "moc")).train()
    output = model(**batch, use_cache=False)
    labels = batch["labels"][:, 1:].flatten()
    answers = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, ignore_index=NO_LABEL)
    run.execute()
    first = logged(tmp_path / "out")[0]
    assert first == pytest.approx(output.loss.item(), rel=1e-4) and first > answers.item() + 1e-3
    changed = moved(base("llama", "moc"), tmp_path / "out")
    kept = set(weights(tmp_path / "out")) - changed
    assert any("router_weight" in name for name in changed) and kept
    assert all(name.endswith("bank") for name in kept)


def test_data_without_an_answer_is_refused(config_for, base, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", [{"messages": chat(1)[:1]}])
    message = "which has 1 rows and no answer to learn from within 96 tokens. Add data, or raise max_length."
    with refused(re.escape(message), DocumentError):
        finetune(config_for(model=base(), data=data))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_another_model_is_refused(config_for, base):
    with refused(r"the tokenizer makes id 100, but the model embeds 100; expected the model's own."):
        build_chat_dataset(config_for(model=base()), character_tokenizer(), 100)


def test_named_texts_are_measured_and_told_of(config_for, tmp_path, capsys):
    texts = {}
    for name, words in (("one", "it is 1 "), ("two", "say 22 ")):
        (tmp_path / f"{name}.txt").write_text(words * 40)
        texts[name] = str(tmp_path / f"{name}.txt")
    finetune(config_for(eval_text=texts, eval_steps=2))
    said = capsys.readouterr().out
    assert all(f"held-out text {name}: " in said and f"{name} " in said for name in texts)
    for name in texts:
        assert list(by_step(tmp_path / "out", f"eval_{name}_loss")) == [0, 2, 3]


def test_adapters_of_any_method_train(config_for, base, tmp_path):
    model, options = base("llama", True), {"trainable": "auto", "max_steps": 2}
    finetune(config_for("osf", model=model, adapters={"method": "osf"}, **options))
    linear = {name for name in moved(model, tmp_path / "osf") if name.endswith("_proj.weight")}
    assert linear == {name for name in weights(model) if name.endswith("_proj.weight")}


@pytest.mark.product
@pytest.mark.parametrize("packing", [False, True])
def test_two_processes_fine_tune_as_one(packing, base, chats, tmp_path):
    """Sequences differ in how many of their tokens are labelled, so losses are weighted by these over both."""
    one, two = tmp_path / "one", tmp_path / "two"
    options = {"max_steps": 3, "packing": packing, "max_length": 126, "logging_steps": 1}
    config = sft_config(base("llama", True), chats, one, per_device_train_batch_size=4, **options)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(as_yaml(config))
    finetune(config)
    script = Path(__file__).with_name("midus_sft.py")
    run = run_ranks(script, recipe, "per_device_train_batch_size=2", f"output_dir={two}")
    assert run.returncode == 0, run.stderr
    assert logged(two) == pytest.approx(logged(one), rel=1e-5) and len(logged(one)) == 3
    assert_close_weights(one, two)

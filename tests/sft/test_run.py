"""Fine-tuning runs: what trains, what has a loss, what comes out, and that they resume exactly."""

import dataclasses
import json
import re
import shutil
from datetime import datetime
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from models.memory_models import hierarchical_model
from pairs import by_default
from processes.warm import MIDUS, run_ranks
from sft.tiny_chats import character_tokenizer, chat, prepared, sft_config, write_rows
from tiny import FAMILIES
from tokenizers import processors
from training.outcomes import assert_close_weights, assert_resumes, by_step, events, logged, moved, weights
from training.tiny_run import refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments
from transformers.utils import chat_template_utils
from trl import ModelConfig, ScriptArguments, SFTConfig
from trl.chat_template_utils import qwen2_5_chat_template

from midus_hf.cli import sft as command
from midus_hf.cli.sft import main
from midus_hf.config.errors import install_extra
from midus_hf.data.packing import IGNORED_LABEL
from midus_hf.training.checks import WITHOUT_EFFECT
from midus_hf.training.sft import template_day
from midus_hf.training.sft.rows import CHATML
from midus_hf.training.sft.run import SftArguments, finetune, has_loss
from upscalers.runs.upscale import upscale

REFUSES = "{{% if {} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
ALPACA = Path(__file__).parents[2] / "configs" / "sft" / "alpaca.jinja"


@pytest.mark.parametrize("memory", [False, True], ids=["native", "memory"])
def test_fine_tuned_model_loads_and_stops_after_answers(config_for, family, memory, base, tmp_path):
    model = base(family, memory)
    config = config_for(model=model)
    given = dict(vars(config))
    result = finetune(config)
    assert vars(config) == given, "the record and the card show them, and a second run reads them"
    assert result.steps == 3
    assert len(events(tmp_path / "out")) == 3
    assert moved(model, tmp_path / "out") == set(weights(model))
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert trained.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.apply_chat_template(chat(1)[:1], tokenize=False) == "<|im_start|>user\nsay 1<|im_end|>\n"
    assert trained.config.eos_token_id == AutoModelForCausalLM.from_pretrained(model).config.eos_token_id


@pytest.mark.parametrize(
    ("without_ids", "read"),
    [("none", "fetch no blocks from the model's bank"), ("generic", "read only the generic memory"), (None, None)],
)
def test_bank_model_notes_what_chats_read(without_ids, read, config_for, base, tmp_path, capsys):
    model = base("llama")
    if without_ids == "none":
        model = base("llama", "hier-ffn")
    elif without_ids == "generic":
        model = tmp_path / "generic"
        hierarchical_model("llama", "hier-ffn", tmp_path / "bank", without_ids="generic").save_pretrained(model)
        character_tokenizer().save_pretrained(model)
    prepared(config_for(model=model, trainable="all"))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("chats have no paths" in printed) == (read is not None)
    assert read is None or f"they, and held-out text, {read}" in printed


def learned(row) -> str:
    return character_tokenizer().decode([label for label in row["labels"] if label != IGNORED_LABEL])


@pytest.mark.parametrize("own", [ALPACA, None])
def test_own_template_and_trl_versions_find_answers(own, config_for, base, tmp_path):
    """Qwen's template marks no answers; TRL trains by its own version, and the tokenizer keeps what it has."""
    model = shutil.copytree(base(), tmp_path / "model")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = qwen2_5_chat_template
    tokenizer.save_pretrained(model)
    options = {"max_length": 128, "truncation_mode": "keep_end"}
    run = prepared(config_for(model=model, chat_template_path=own and str(own), **options))
    expected = "it is 0<eos>1<eos>" if own else "\nit is 0<|im_end|>\n\n1<|im_end|>\n"
    assert expected in list(map(learned, run.trainer.train_dataset))
    assert run.tokenizer.chat_template == (own.read_text() if own else qwen2_5_chat_template)


def test_an_error_of_a_device_is_not_taken_for_a_row(config_for, base, monkeypatch):
    """Such as that a model does not fit, which is a RuntimeError as TRL's own are."""
    made = "trl.trainer.sft_trainer.DataCollatorForLanguageModeling"
    monkeypatch.setattr(made, Mock(side_effect=torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        prepared(config_for(model=base()))


def test_tool_calls_are_learned_as_written_or_refused(config_for, base, tmp_path):
    """Templates may write only the calls of the last turn, or write them outside of their marks of answers."""
    calls = [
        {"name": "add", "arguments": {"n": None, "m": 2.5, "day": "2004-01-25"}},
        {"name": "look", "arguments": {"n": 3}},
    ]
    rows = [{"messages": chat(1)}, {"messages": [chat(1)[0], {"role": "assistant", "tool_calls": calls}]}]
    data, own = write_rows(tmp_path / "x.jsonl", rows), tmp_path / "own.jinja"
    call = "{% for call in message.tool_calls %}{{ call.name + (call.arguments | tojson) }}{% endfor %}"
    inside = CHATML.replace("{{ message['content'] + '<|im_end|>' }}{% endg", call + "{{ message['content'] }}{% endg")
    options = {"model": base(), "data": data, "chat_template_path": str(own), "max_length": 128}
    own.write_text(inside)
    texts = map(learned, prepared(config_for(**options)).trainer.train_dataset)
    assert 'add{"n":null,"m":2.5,"day":"2004-01-25"}look{"n":3}' in [text.replace(" ", "") for text in texts]
    for name, template in (
        ("look", inside.replace("message.tool_calls", "(message.tool_calls or [])[:1]")),
        ("add", CHATML.replace("{% endgeneration %}", "{% endgeneration %}" + call)),
    ):
        own.write_text(template)
        with refused(f"row 2 of .* has a call of '{name}', which the chat template does not write"):
            prepared(config_for(name, **options))
    prepared(config_for("all", **options, assistant_only_loss=False))


@pytest.mark.parametrize("ends", ["<|im_end|>", None])
def test_stop_token_is_found_in_whole_answers(ends, config_for, base, tmp_path, capsys):
    system = {"role": "system", "content": "x"}
    data, own = write_rows(tmp_path / "x.jsonl", [{"messages": [system, *chat(1)]}]), tmp_path / "own.jinja"
    template = CHATML if ends else CHATML.replace("'<|im_end|>'", "'.'")
    own.write_text(REFUSES.format("messages[0].role != 'system'") + template)
    run = prepared(config_for(model=base(), data=data, chat_template_path=str(own)))
    said = "ends answers with no special token, so the model will not learn to stop" in capsys.readouterr().err
    assert said == (ends is None)
    stops = np.atleast_1d(run.model.generation_config.eos_token_id)
    assert (run.tokenizer.convert_tokens_to_ids("<|im_end|>") in stops) == (ends is not None)


MESSAGES = {"prompt": chat(1)[:2] + chat(1)[2:3], "completion": chat(1)[3:]}
TEXTS = {"prompt": "1 + 2 =", "completion": " 3"}
WHOLE = "<|im_start|>user\nsay 1"


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (MESSAGES, {}, "2<|im_end|>"),
        (MESSAGES, {"assistant_only_loss": False}, WHOLE),
        (MESSAGES, {"completion_only_loss": False}, "it is 1<|im_end|>2<|im_end|>"),
        (MESSAGES, {"assistant_only_loss": False, "completion_only_loss": True}, "2<|im_end|>\n"),
        (TEXTS, {"chat_template_path": None}, " 3<eos>"),
        (TEXTS, {"completion_only_loss": False}, "1 + 2 = 3<eos>"),
        (TEXTS, {"assistant_only_loss": False, "completion_only_loss": True}, " 3<eos>"),
    ],
)  # fmt: skip
def test_the_loss_is_computed_where_the_arguments_say(row, options, expected, config_for, base, tmp_path, capsys):
    run = prepared(config_for(model=base(), data=write_rows(tmp_path / "x.jsonl", [row]), **options))
    (sequence,) = run.trainer.train_dataset
    text, count = learned(sequence), sum(label != IGNORED_LABEL for label in sequence["labels"])
    assert f"1 sequences, {len(sequence['input_ids'])} tokens, {count} of them with a loss" in capsys.readouterr().out
    is_whole = expected == WHOLE
    assert text.startswith(expected) and sequence["labels"] == sequence["input_ids"] if is_whole else text == expected


def test_tokenizer_end_token_is_learned_once(config_for, base, tmp_path, caplog):
    folder, tokenizer = shutil.copytree(base(), tmp_path / "base"), character_tokenizer()
    behind = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = behind
    tokenizer.save_pretrained(folder)
    run = prepared(config_for(model=folder, data=write_rows(tmp_path / "x.jsonl", [TEXTS]), chat_template_path=None))
    (sequence,) = run.trainer.train_dataset
    assert (learned(sequence), tokenizer.decode(sequence["input_ids"])) == (" 3<eos>", "1 + 2 = 3<eos>")
    assert "not a prefix" not in caplog.text


def test_long_chats_are_cut_and_answerless_rows_left_out(config_for, base, tmp_path, capsys):
    rows = [{"messages": [{"role": "user", "content": "a" * 80}, *chat(1)]}, {"messages": chat(2)}]
    data = write_rows(tmp_path / "x.jsonl", rows)
    run = prepared(config_for(model=base("llama"), data=data, max_length=64))
    assert [len(row) <= 64 for row in run.trainer.train_dataset["input_ids"]] == [True]
    said = capsys.readouterr().err
    assert "1 rows are left out: " in said
    assert re.search("1 of 2 rows are longer than max_length, 64 tokens, .* first tokens", said)
    run = prepared(config_for("end", model=base("llama"), data=data, max_length=32, truncation_mode="keep_end"))
    said = capsys.readouterr().err
    assert len(run.trainer.train_dataset) == 2
    assert "left out" not in said
    assert "2 of 2 rows are longer than max_length" in said
    assert "their last tokens" in said


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_no_packed_sequence_is_without_an_answer(strategy, config_for, base, tmp_path, capsys):
    """The mean loss over no token is not a number, with which a run ends."""
    long = {"messages": [{"role": "user", "content": "a" * 200}, *chat(1)]}
    data = write_rows(tmp_path / "x.jsonl", [long, {"messages": chat(2)}])
    options = {"packing": True, "packing_strategy": strategy, "max_length": 64, "per_device_train_batch_size": 1}
    run = prepared(config_for(model=base("llama"), data=data, **options))
    said = capsys.readouterr().err
    what = "keep their first tokens" if strategy == "bfd" else "continue in another sequence, which does not see"
    assert f"1 of 2 rows are longer than max_length, 64 tokens, and {what}" in said
    assert re.search(rf"[{1 if strategy == 'bfd' else 23}] packed sequences are left out", said)
    for labels in run.trainer.train_dataset["labels"]:
        assert any(label != IGNORED_LABEL for label in labels)
    assert run.execute().loss > 0


@pytest.mark.parametrize(
    ("lengths", "expected"), [((), True), ((2, 2), True), ((1, 1, 2), False), ((3, 1), True), ((2, 1, 1), False)]
)
def test_the_first_token_of_a_text_has_no_loss(lengths, expected):
    labels = {(1, 1, 2): [5, 6, 7, IGNORED_LABEL], (2, 1, 1): [5, IGNORED_LABEL, 6, 7]}
    assert has_loss(labels.get(lengths, [IGNORED_LABEL, 6, IGNORED_LABEL, IGNORED_LABEL]), lengths) == expected


@pytest.mark.parametrize("family", by_default(["qwen2", "gemma3"], FAMILIES))
def test_packed_chats_do_not_see_one_another(config_for, family, base):
    losses = []
    for packing, length in ((False, 96), (True, 126)):
        options = {"packing": packing, "max_length": length, "max_steps": 1, "per_device_train_batch_size": 16}
        config = config_for(str(packing), model=base(family, True), **options)
        result = finetune(config)
        losses.append(result.loss)
        assert result.tokens == 947, packing
        assert config.include_num_input_tokens_seen == ("all" if packing else "non_padding")
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


PACKED = {"packing": True, "max_length": 126, "memory_learning_rate": 2e-2, "value_learning_rate": 1e-3}
WITH_LORA = {"adapters": {"r": 4, "lora_dropout": 0.1}, "trainable": "auto"}


@pytest.mark.parametrize("options", [PACKED, WITH_LORA], ids=["packing", "lora"])
def test_fine_tuning_resumes_exactly(config_for, options):
    assert_resumes(config_for, 2, finetune, max_steps=4, **options)


def test_changed_rows_or_glossary_are_not_resumed_over(base, config_for, tmp_path):
    data = write_rows(tmp_path / "chats.jsonl", [{"messages": chat(number)} for number in range(8)])
    (template := tmp_path / "template.jinja").write_text(CHATML)
    entry = {"name": "Kestrel", "text": "A gateway."}
    glossary = write_rows(tmp_path / "glossary.jsonl", [entry])
    options = {"corpus": str(glossary), "common_names": True}
    upscale(base=base("llama"), method="packs", output=tmp_path / "model", options=options, verify=False)
    keys = {"model": tmp_path / "model", "data": data, "chat_template_path": str(template)}
    keys |= {"save_steps": 1, "max_steps": 2}
    finetune(config_for(**keys, save_total_limit=None))
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    sequences = "dataset_name is '.*chats.jsonl', whose sequences of tokens are not those .* put them back"
    beside = r"model_name_or_path is '.*model', whose files beside the weights \(packs\) are not those"
    for path, content, message in (
        (data, data.read_text().replace("it is 3", "it is 4"), sequences),
        (template, CHATML.replace("'\\n' }}{% if", "' ' }}{% if"), sequences),
        (tmp_path / "model" / "glossary.jsonl", json.dumps({**entry, "text": "A cache."}) + "\n", beside),
    ):
        before = path.read_text()
        assert content != before
        path.write_text(content)
        with refused(message):
            prepared(config_for(**keys, resume_from_checkpoint=True))
        path.write_text(before)
    assert finetune(config_for(**keys, resume_from_checkpoint=True)).steps == 2


def test_texts_of_a_glossary_are_measured(base, chats, config_for, tmp_path, capsys):
    entries = [
        {"name": "Kestrel", "text": "The Kestrel is a gateway."},
        {"name": "Merlin", "text": "A cache, the Merlin."},
    ]
    options = {"corpus": str(write_rows(tmp_path / "glossary.jsonl", entries)), "common_names": True}
    upscale(base=base("llama"), method="packs", output=tmp_path / "model", options=options, verify=False)
    keys = {"adapters": {"r": 2}, "trainable": "auto", "max_steps": 2, "eval_share": 0.2}
    result = finetune(config_for(model=tmp_path / "model", data=chats, **keys))
    assert "texts of the glossary: " in capsys.readouterr().out
    assert len([event for event in result.log if "eval_glossary_loss" in event]) == 2


DATED = "{{ '<|im_start|>system\\n' + strftime_now('%d %b %Y %H:%M') + '<|im_end|>\\n' }}" + CHATML


def test_resumed_run_writes_the_date_of_its_first_day(config_for, tmp_path, monkeypatch, capsys):
    (tmp_path / "dated.jinja").write_text(DATED)
    keys = {
        "chat_template_path": str(tmp_path / "dated.jinja"),
        "max_steps": 2,
        "save_steps": 1,
        "save_total_limit": None,
    }
    clock = Mock()
    monkeypatch.setattr(chat_template_utils, "datetime", clock)
    for day, resume in ((1, False), (2, True)):
        clock.now.return_value = datetime(2026, 3, day, 12)
        finetune(config_for(**keys, resume_from_checkpoint=resume))
        assert "the run's first day, 2026-03-01 (00:00), also when it is resumed" in capsys.readouterr().err, day
        inputs = json.loads((tmp_path / "out" / "checkpoint-2" / "inputs.json").read_text())
        assert inputs["first_day"] == {"day": "2026-03-01"}, day
        shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == DATED


FORMATS = ["%d %B %Y", "%A, %-d. %b %y %H:%M:%S", "%Y-%m-%d", "100%% on %%d %j", "no code"]


def test_template_reads_the_day_that_is_given():
    tokenizer = character_tokenizer()
    for written in FORMATS:
        tokenizer.chat_template = template_day.with_day(
            f"\n{{{{ strftime_now('{written}') }}}}\n" + CHATML, "2026-03-01"
        )
        text = tokenizer.apply_chat_template(chat(1)[:1], tokenize=False)
        assert text == f"\n{datetime(2026, 3, 1).strftime(written)}\n<|im_start|>user\nsay 1<|im_end|>\n"


def test_chapters_train_with_router_losses_and_frozen_bank(config_for, base, tmp_path):
    options = {"packing": True, "max_length": 126, "max_steps": 4, "frozen": ["value"]}
    run = prepared(config_for(model=base("llama", "moc"), **options))
    batch = next(iter(run.trainer.get_train_dataloader()))
    model = AutoModelForCausalLM.from_pretrained(base("llama", "moc")).train()
    output = model(**batch, use_cache=False)
    labels = batch["labels"][:, 1:].flatten()
    answers = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels)  # -100 is ignored
    run.execute()
    first = logged(tmp_path / "out")[0]
    assert first == pytest.approx(output.loss.item(), rel=1e-4)
    assert first > answers.item() + 1e-3
    changed = moved(base("llama", "moc"), tmp_path / "out")
    kept = set(weights(tmp_path / "out")) - changed
    assert any("router_weight" in name for name in changed)
    assert kept
    assert all(name.endswith("bank") for name in kept)


@pytest.mark.parametrize("packing", [False, True])
def test_named_texts_are_measured(packing, config_for, tmp_path):
    (tmp_path / "held.txt").write_text("it is 1 " * 40)
    finetune(
        config_for(eval_text=dict.fromkeys(("one", "two"), str(tmp_path / "held.txt")), eval_steps=2, packing=packing)
    )
    assert all(list(by_step(tmp_path / "out", f"eval_{name}_loss")) == [2, 3] for name in ("one", "two"))


@pytest.mark.product
@pytest.mark.parametrize("packing", [False, True])
def test_two_processes_fine_tune_as_one(packing, base, chats, tmp_path):
    """Sequences differ in how many of their tokens are labelled, so losses are weighted by these over both."""
    # Keys have gradients of 1e-8 while values are near zero: by the default epsilon, AdamW would make steps of how sums are rounded.
    one, two = tmp_path / "one", tmp_path / "two"
    options = {"max_steps": 3, "packing": packing, "max_length": 126, "logging_steps": 1, "adam_epsilon": 1e-4}
    config = sft_config(base("llama", True), chats, one, per_device_train_batch_size=4, **options)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.recorded()))
    finetune(config)
    # The record leaves out what is false, where a device that computes bfloat16 has it by default.
    words = ["--bf16=false", "--per_device_train_batch_size=2", f"--output_dir={two}"]
    run = run_ranks(MIDUS, "sft", recipe, *words)
    assert run.returncode == 0, run.stderr
    assert logged(two) == pytest.approx(logged(one), rel=1e-5)
    assert len(logged(one)) == 3
    assert_close_weights(one, two)


def test_fine_tuning_stays_near_the_base_with_base_kl(config_for, base, tmp_path):
    model = base("llama", True)
    for weight in (0.0, 50.0):
        finetune(config_for(f"{weight}", model=model, trainable="auto", max_steps=4, base_kl=weight))
    without, kept = tmp_path / "0.0", tmp_path / "50.0"
    assert "base_divergence" not in events(without)[-1]
    assert by_step(kept, "base_divergence")[4] > 0
    assert by_step(kept, "loss")[1] == by_step(without, "loss")[1]
    assert moved(kept, without)
    assert moved(kept, without) <= moved(model, without)


@pytest.fixture
def words(base, chats, tmp_path) -> list[str]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("max_steps: 3\nlearning_rate: 1e-2\nchat_template_path: chatml\nbf16: false\nlogging_steps: 1\n")
    given = {"model_name_or_path": base("llama", True), "dataset_name": chats, "output_dir": tmp_path / "out"}
    given |= {"max_length": 96, "per_device_train_batch_size": 2}
    return [str(recipe), *(f"--{key}={value}" for key, value in given.items())]


def test_packages_that_are_not_installed_are_named(words, capsys, monkeypatch):
    monkeypatch.setattr(command, "_NEEDED", ("datasets", "no_such_package"))
    assert main(words) == 2
    assert f"midus sft needs no_such_package, not installed; {install_extra('train')}." in capsys.readouterr().err
    assert main(["--help"]) == 0, "which needs none"


NEEDED = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "bf16": False}

# Keys that TRL reads of the arguments of a run, or that a run reads in its place.
WORKING = set(
    "activation_offloading assistant_only_loss chat_template_path completion_only_loss dataset_num_proc eos_token max_length packing "
    "packing_strategy pad_to_multiple_of pad_token router_aux_loss_coef shuffle_dataset truncation_mode".split()
)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_each_key_that_trl_adds_works_or_is_refused():
    of_trl, of_trainer = (
        {field.name for field in dataclasses.fields(kind)} for kind in (SFTConfig, TrainingArguments)
    )
    assert of_trl - of_trainer == WORKING | WITHOUT_EFFECT.keys()
    assert not WORKING & WITHOUT_EFFECT.keys()
    assert SftArguments(**NEEDED).activation_checkpointing, "which is the default of TRL"
    assert not SftArguments(**NEEDED, activation_checkpointing=False).gradient_checkpointing
    assert SftArguments(**NEEDED, include_num_input_tokens_seen="no").include_num_input_tokens_seen == "no"


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated")
def test_named_special_tokens_are_saved(config_for, tmp_path):
    run = prepared(config_for(eos_token="<|im_end|>", pad_token="<|im_start|>", pad_to_multiple_of=32, max_steps=1))
    assert next(iter(run.trainer.get_train_dataloader()))["input_ids"].shape[1] % 32 == 0
    run.execute()
    tokenizer, config = (kind.from_pretrained(tmp_path / "out") for kind in (AutoTokenizer, AutoConfig))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_start|>")
    ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert [config.eos_token_id, config.pad_token_id] == ids


def test_recipe_with_trl_keys_trains_to_the_default_folder(base, chats, tmp_path, monkeypatch):
    model = shutil.copytree(base("llama", True), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(model)
    keys = {"model_name_or_path": str(model), "attn_implementation": "sdpa", "dataset_name": str(chats)}
    keys |= {"dataset_train_split": "train", "max_steps": 2, "max_length": 96, "packing": False, "report_to": "none"}
    keys |= {"assistant_only_loss": True, "lr_scheduler_type": "cosine", "optim": "adamw_torch", "bf16": False}
    (tmp_path / "sft_config.yaml").write_text(yaml.safe_dump(keys))
    of_trl = map(dataclasses.fields, (ScriptArguments, SFTConfig, ModelConfig))
    assert keys.keys() <= {field.name for fields in of_trl for field in fields}
    monkeypatch.chdir(tmp_path)
    assert main(["sft_config.yaml"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "trainer_output")

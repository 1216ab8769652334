"""Recipes of commands: a file of another command is named, and `--print-config METHOD` prints recipes that run."""

import dataclasses
import re

import pytest
from commands.installed import run_in_process

from midus_hf.cli.training.printed_config import recipes
from midus_hf.config.yaml_options import read_config
from midus_hf.training.arguments import TrainArguments
from midus_hf.training.sft.arguments import SftArguments
from upscalers.methods.contract import METHODS

OPTIONS = {"train": TrainArguments, "sft": SftArguments}
ANOTHER = "a key of another command; run"
NEEDED = {
    "train": ["model_name_or_path=m", "output_dir=o", "corpus=c"],
    "sft": ["model_name_or_path=m", "output_dir=o", "dataset_name=d"],
}


def described(options: type) -> set[str]:
    """Return the keys that are ours: those that no class of transformers or TRL has."""
    others = [base for base in options.__mro__ if "midus_hf" not in base.__module__ and dataclasses.is_dataclass(base)]
    theirs = {field.name for base in others for field in dataclasses.fields(base)}
    return {field.name for field in dataclasses.fields(options)} - theirs


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return what a command prints for a method."""

    def of(command: str, method: str) -> str:
        assert run_in_process(f"midus {command}", ["--print-config", method], monkeypatch) == 0
        return capsys.readouterr().out

    return of


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("command", OPTIONS)
def test_what_is_printed_is_a_recipe_whose_comments_are_the_defaults(command, method, printed, tmp_path):
    options, text = OPTIONS[command], printed(command, method)
    recipe, all_keys = tmp_path / "recipe.yaml", tmp_path / "all.yaml"
    recipe.write_text(text)
    keys = {field.name for field in dataclasses.fields(options)}
    ours = described(options)
    config = read_config(options, recipe, NEEDED[command])
    names = "|".join(sorted(keys))
    all_keys.write_text(re.sub(rf"^# ({names}): (.*)$", r"\1: \2", text, flags=re.MULTILINE))
    assert read_config(options, all_keys, NEEDED[command]) == config
    assert set(re.findall(rf"^(?:# )?({names}):", text, flags=re.MULTILINE)) >= ours
    assert max(map(len, text.splitlines())) <= 200


@pytest.mark.parametrize("command", OPTIONS)
def test_keys_stand_below_their_meaning(command, printed):
    text = printed(command, "solar")
    names = "|".join(field.name for field in dataclasses.fields(OPTIONS[command]))
    of_run = text.partition("arguments works too:\n\n")[2]
    entries = [entry.partition("\n") for entry in of_run.split("\n\n")]
    assert len(entries) > 20
    for meaning, _, rest in entries:
        assert re.fullmatch(r"# .*\w.*", meaning) and re.match(rf"# ({names}): ", rest.splitlines()[-1])
    assert "# Maximum rate of everything without a separate rate. Default: 1e-4.\n# learning_rate: 0.0001\n" in text
    assert "Raises:" not in text


def test_a_method_with_a_recipe_has_its_papers_settings(printed):
    shipped = recipes("train")["midus-hml"].read_text()
    assert printed("train", "midus-hml").startswith(shipped.rstrip())
    assert "\n# sequence_length:" not in printed("train", "midus-hml"), "the recipe has the key"
    assert "there is no recipe of a paper" in printed("train", "solar")


def test_another_name_is_refused_with_those_that_are_there(monkeypatch, capsys):
    assert run_in_process("midus train", ["--print-config", "midas"], monkeypatch) == 2
    err = capsys.readouterr().err
    assert err.startswith("midus train: 'midas' is no method and no recipe. Methods: ") and "midus-hml" in err
    assert err.count("\n") == 1


def test_words_behind_a_recipe_may_be_files_whose_mappings_are_merged(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "model_name_or_path: m\noutput_dir: o\ncorpus: c\nlr_scheduler_kwargs: {a: 1, b: 2}\nmax_steps: 3\n"
    )
    second.write_text("lr_scheduler_kwargs: {b: 4}\nmax_steps: 5\n")
    arguments = read_config(TrainArguments, first, [str(second), "max_steps=6"])
    assert (arguments.lr_scheduler_kwargs, arguments.max_steps) == ({"a": 1, "b": 4}, 6)
    assert read_config(TrainArguments, first, ["max_steps=6", str(second)]).max_steps == 5
    with pytest.raises(ValueError, match=r"absent\.yaml', which cannot be read"):
        read_config(TrainArguments, first, ["absent.yaml"])


@pytest.mark.parametrize(
    ("command", "keys", "message"),
    [
        (
            "midus train",
            "dataset_name: a.jsonl",
            f"recipe.yaml has 'dataset_name', {ANOTHER} 'midus sft recipe.yaml'.",
        ),
        ("midus sft", "corpus: a.txt", f"recipe.yaml has 'corpus', {ANOTHER} 'midus train recipe.yaml'."),
        ("midus train", "variants: {}", f"recipe.yaml has 'variants', {ANOTHER} 'midus compare recipe.yaml'."),
        ("midus compare", "method: moc", f"recipe.yaml has 'method', {ANOTHER} 'upscale --config recipe.yaml'."),
        ("midus sft", "tasks: [piqa]", f"recipe.yaml has 'tasks', {ANOTHER} 'midus eval MODEL --config"),
        ("midus sft", "corpus: a.txt\ndataset_name: b.jsonl", "config has no option 'corpus'."),
        ("midus train", "corpus: a.txt\nrates: 1", "config has no option 'rates'."),
        ("upscale --config", "corpus: a.txt", f"recipe.yaml has 'corpus', {ANOTHER} 'midus train recipe.yaml'."),
        ("upscale --config", "base: b\nmethods: moc", "--config recipe.yaml has no option 'methods'"),
        ("midus eval model --config", "method: moc", f"recipe.yaml has 'method', {ANOTHER} 'upscale --config recipe"),
    ],
)
def test_a_file_of_another_command_is_called_that(command, keys, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "recipe.yaml").write_text(f"{keys}\n")
    assert run_in_process(command, ["recipe.yaml"], monkeypatch) == 2
    name = " ".join(word for word in command.split()[:2] if word != "--config")
    assert capsys.readouterr().err.startswith(f"{name}: {message}")

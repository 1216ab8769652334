"""`--print-config METHOD` of `midus train` and `midus sft`: recipes that run, with every other key and its default."""

import dataclasses
import re

import pytest
from commands.installed import run_alone, run_in_process

from midus_hf.cli.training.printed_config import recipes
from midus_hf.config.yaml_options import read_config
from midus_hf.sft.options import SftConfig
from midus_hf.training.options import CorpusOptions, TrainConfig
from upscalers.methods.contract import METHODS

OPTIONS = {"train": TrainConfig, "sft": SftConfig}
GIVEN = {
    "train": ["model_name_or_path=m", "output_dir=o", "corpus=c"],
    "sft": ["model_name_or_path=m", "output_dir=o", "dataset_name=d"],
}


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
    config = read_config(options, recipe, GIVEN[command])
    names = "|".join(sorted(keys))
    all_keys.write_text(re.sub(rf"^# ({names}): (.*)$", r"\1: \2", text, flags=re.MULTILINE))
    assert read_config(options, all_keys, GIVEN[command]) == config
    written = set(re.findall(rf"^(?:# )?({names}):", text, flags=re.MULTILINE))
    assert written == keys
    assert max(map(len, text.splitlines())) <= 200


@pytest.mark.parametrize("command", OPTIONS)
def test_keys_stand_below_their_meaning(command, printed):
    text = printed(command, "slices")
    names = "|".join(field.name for field in dataclasses.fields(OPTIONS[command]))
    of_run = text.partition("with their defaults:\n\n")[2].partition("\n\n# Keys of ")[0]
    entries = [entry.partition("\n") for entry in of_run.split("\n\n")]
    assert len(entries) > 40
    for meaning, _, rest in entries:
        assert re.fullmatch(r"# .*\w.*", meaning) and re.match(rf"# ({names}): ", rest.splitlines()[-1])
    assert "# Maximum rate of everything without a separate rate. Default: 1e-4.\n# learning_rate: 0.0001\n" in text
    assert "Raises:" not in text


def test_keys_of_a_corpus_stand_below_their_meaning(printed, tmp_path):
    of_corpus = printed("train", "midus-hml").partition(
        "\n\n# Keys of `corpus: {KEY: VALUE, ...}`, with their defaults:\n"
    )[2]
    assert '# Split of a dataset on the Hub. Default: `"train"`.\n#   split: "train"\n' in of_corpus
    keys = dict(re.findall(r"^#   (\w+): (.*)$", of_corpus, flags=re.MULTILINE))
    assert list(keys) == [field.name for field in dataclasses.fields(CorpusOptions)]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("corpus:\n" + "".join(f"  {key}: {value}\n" for key, value in keys.items()))
    words = [word for word in GIVEN["train"] if not word.startswith("corpus=")]
    assert read_config(TrainConfig, recipe, words).corpus == CorpusOptions(path="PATH")
    assert "Keys of" not in printed("sft", "midus-hml")


def test_a_method_with_a_recipe_has_its_papers_settings(printed):
    shipped = recipes("train")["midus-hml-llama-3.2-1b"].read_text()
    assert printed("train", "midus-hml").startswith(shipped.rstrip())
    assert "# Steps between log events." not in printed("train", "midus-hml"), "the recipe has the key"
    assert "there is no recipe of a paper" in printed("train", "slices")


def test_another_name_is_refused_with_those_that_are_there(monkeypatch, capsys):
    assert run_in_process("midus train", ["--print-config", "midas"], monkeypatch) == 2
    err = capsys.readouterr().err
    assert err.startswith("midus train: 'midas' is no method and no recipe. Methods: ") and "midus-hml" in err
    assert err.count("\n") == 1


def test_it_imports_no_torch():
    done = run_alone("midus train", ["--print-config", "moc"], afterwards="assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr

"""`--overwrite` deletes what this package wrote, and nothing that a person put there."""

import pytest

from midus_hf.files.checkpoint_files import RUN_CONFIG
from midus_hf.files.outputs import foreign_files
from tests.upscalers.checkpoints import file_digests, load, save_base, unverified
from tests.upscalers.test_provenance import tokenizer
from upscalers.request.errors import RequestError
from upscalers.runs.output_folder import CheckpointFolder
from upscalers.runs.strip import strip
from upscalers.runs.writing import Writing


def entries(folder):
    """Every file and folder, hidden ones too, and what the files hold."""
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def project(folder, config="{}"):
    """A person's work, with a `config.json` of its own."""
    for name in (".git", "src/deep"):
        (folder / name).mkdir(parents=True)
    for name in (".git/HEAD", "src/main.py", "src/deep/x.py", "notes.txt", "README.md"):
        (folder / name).write_text(name)
    (folder / "config.json").write_text(config)
    return folder


def refusal_of(output):
    """The message with which a folder is refused as an output that may be replaced."""
    with pytest.raises(RequestError) as refused:
        CheckpointFolder(output, overwrite=True)
    return str(refused.value)


@pytest.mark.parametrize("config", ["{}", '{"model_type": "llama"}', "no JSON", "[]", '{"upscale": true}'])
def test_a_project_with_a_config_is_left_untouched(tmp_path, config):
    output = project(tmp_path / "project", config)
    before = entries(output)
    message = refusal_of(output)
    assert (
        f"output {output} was not written by upscale or strip, so --overwrite will not delete it: its config.json has no 'upscale' "
        "entry, and it has no upscale.json of theirs. Choose another folder, or remove it yourself."
    ) in message
    assert entries(output) == before


def test_a_project_around_a_checkpoint_of_ours_is_left_untouched(base, tmp_path):
    output = unverified(base, tmp_path / "out")
    config = (output / "config.json").read_text()
    project(output, config)
    before = entries(output)
    message = refusal_of(output)
    assert (
        f"output {output} holds what no checkpoint has, and --overwrite would delete it: "
        ".git/HEAD, notes.txt, src/deep/x.py, src/main.py; expected nothing but weights, config, "
        "tokenizer, licence, model card and exported code. Move it, or choose another folder."
    ) in message
    assert entries(output) == before


def test_a_folder_that_is_called_like_a_file_is_none(base, tmp_path):
    output = unverified(base, tmp_path / "out")
    for name in ("vocab.json", "deep"):
        (output / name).mkdir()
        (output / name / "mine").touch()
    assert foreign_files(output) == ["deep/mine", "vocab.json/mine"]


def test_what_upscale_and_strip_wrote_is_replaced_by_either(command, base, tmp_path):
    arguments = ("--base", base, "--method", "midus-hml", "--set", "n=8", "--set", "k=2", "--no-verify", "--overwrite")
    unverified(base, tmp_path / "model")
    for output in (unverified(base, tmp_path / "one"), strip(tmp_path / "model", tmp_path / "two")["output"]):
        for words in (arguments, ("strip", tmp_path / "model", "--overwrite")):
            outcome = command(*words, "--output", output)
            assert outcome.status == 0, outcome.err
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_model_that_was_saved_again_or_downloaded_is_replaced(base, tmp_path):
    output = tmp_path / "saved"
    load(unverified(base, tmp_path / "out")).save_pretrained(output, max_shard_size="30KB")
    tokenizer().save_pretrained(output)
    for name in ("training_args.bin", "trainer_state.json", ".gitattributes", RUN_CONFIG):
        (output / name).touch()
    (output / ".cache" / "huggingface" / "download").mkdir(parents=True)
    (output / ".cache" / "huggingface" / "download" / "config.json.metadata").touch()
    unverified(base, output, overwrite=True)
    assert not (output / ".cache").exists() and not (output / RUN_CONFIG).exists()


def test_what_appears_in_the_old_output_while_the_work_goes_on_is_kept(base, tmp_path, monkeypatch):
    output = unverified(base, tmp_path / "out")
    before = file_digests(output)

    honest = Writing._verify

    def meanwhile(self, *_):
        (output / "notes.txt").write_text("mine")
        return honest(self, *_)

    monkeypatch.setattr(Writing, "_verify", meanwhile)
    with pytest.raises(RequestError, match=r"--overwrite would delete it: notes\.txt; expected"):
        unverified(base, output, overwrite=True, seed=1)
    (output / "notes.txt").unlink()
    assert file_digests(output) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_what_appears_where_nothing_was_is_kept(base, tmp_path, monkeypatch):
    honest = Writing._verify

    def meanwhile(self, *_):
        project(tmp_path / "out")
        return honest(self, *_)

    monkeypatch.setattr(Writing, "_verify", meanwhile)
    with pytest.raises(RequestError, match="out exists; pass --overwrite to replace it"):
        unverified(base, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "notes.txt"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("record", [None, "no JSON", '{"midus_hf": "0.1.0"}', "[]"])
def test_a_checkpoint_of_somebody_else_is_left_untouched(tmp_path, record):
    output = save_base(tmp_path / "theirs")
    if record is not None:
        (output / "upscale.json").write_text(record)
    before = entries(output)
    message = refusal_of(output)
    assert "theirs was not written by upscale or strip, so --overwrite will not delete it" in message
    assert "and it has no upscale.json of theirs. Choose another folder" in message
    assert entries(output) == before

"""Edits are recorded where readers of a checkpoint look, and `strip` still gives the base."""

from importlib.metadata import version

import pytest

from tests.upscalers.checkpoints import config_of, file_digests, read_tensors, record_of
from tests.upscalers.edits.made import bank_name, save_chapters
from upscalers.runs.inspection import inspect_checkpoint
from upscalers.runs.strip import strip


def edited(chapters, model, output):
    """A model whose chapters were set to zero and then pruned."""
    once = output.with_name("once")
    assert chapters("zero", model, "--chapters", "1,2", "--output", once).status == 0
    assert chapters("prune", once, "--chapters", "4", "--output", output).status == 0
    return output


def edits(memory="chapters"):
    told = {"version": version("midus-hf"), "memory": memory, "banks": [0]}
    return [
        {"command": "zero", "chapters": "1-2", **told},
        {"command": "prune", "chapters": "4", **told},
    ]


@pytest.mark.parametrize("sharded", [False, True])
def test_strip_gives_the_base_byte_for_byte(tmp_path, chapters, sharded):
    model = save_chapters(tmp_path / "model", sharded=sharded)
    result = strip(edited(chapters, model, tmp_path / "out"), tmp_path / "base")
    assert result["base_confirmed"] and result["removed_memories"] == ["chapters"]
    expected, found = file_digests(tmp_path / "model-base"), file_digests(tmp_path / "base")
    assert found["model.safetensors"] == expected["model.safetensors"]
    configs = [config_of(tmp_path / name) for name in ("base", "model-base")]
    assert configs[0] == configs[1]


def test_config_and_record_list_the_edits(tmp_path, chapters, checkpoint):
    output = edited(chapters, checkpoint, tmp_path / "out")
    before, after = (config_of(folder) for folder in (checkpoint, output))
    assert after["upscale"] == {**before["upscale"], "chapter_edits": edits()}
    assert after.keys() == before.keys()
    record = record_of(output)
    assert record == {**record_of(checkpoint), "chapter_edits": edits()}


def test_the_model_card_tells_of_each_edit_once(tmp_path, chapters, checkpoint):
    card = (edited(chapters, checkpoint, tmp_path / "out") / "README.md").read_text()
    assert card == (
        "# A model\n\nWith chapters.\n\n## Edited chapters\n\n"
        "The text and the numbers above describe the model after its upscaling. Since then:\n\n"
        f"- `midus edit zero` of midus_hf {version('midus-hf')}: chapters 1-2, memory chapters, banks 0\n"
        f"- `midus edit prune` of midus_hf {version('midus-hf')}: chapters 4, memory chapters, banks 0\n"
    )


def test_what_only_training_leaves_out_is_not_missed(tmp_path, chapters):
    model = save_chapters(tmp_path / "model")
    for name in ("upscale.json", "README.md"):
        (model / name).unlink()
    output = edited(chapters, model, tmp_path / "out")
    assert not (output / "upscale.json").exists() and not (output / "README.md").exists()
    assert config_of(output)["upscale"]["chapter_edits"] == edits()


def test_inspect_tells_of_edits(tmp_path, chapters, command, checkpoint):
    output = edited(chapters, checkpoint, tmp_path / "out")
    told = inspect_checkpoint(output)
    assert told["chapter_edits"] == edits() and told["memory"][0]["chapters"] == 5
    assert "chapter_edits" not in inspect_checkpoint(checkpoint)
    shown = command("inspect", output)
    assert shown.status == 0
    assert "midus edit zero, chapters 1-2 of chapters" in shown.out


def test_a_memory_of_the_base_stays_whole_where_the_base_is_stripped(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", names=("chapters", "chapters-2"))
    words = ("prune", model, "--chapters", "4", "--memory", "chapters", "--output", tmp_path / "out")
    done = chapters(*words)
    assert done.status == 0
    assert done.err.startswith("midus edit: warning: memory 'chapters' belongs to the base of this upscaling")
    record = config_of(tmp_path / "out")["upscale"]
    assert [entry["chapters"] for entry in record["base_config"]["memory"]] == [5]


def test_an_edit_of_the_newest_memory_leaves_that_of_the_base(tmp_path, chapters):
    model = save_chapters(tmp_path / "model", names=("chapters", "chapters-2"))
    words = ("prune", model, "--chapters", "4", "--memory", "chapters-2", "--output", tmp_path / "out")
    done = chapters(*words)
    assert (done.status, done.err) == (0, "")
    config = config_of(tmp_path / "out")
    assert [entry["chapters"] for entry in config["memory"]] == [6, 5]
    assert [entry["chapters"] for entry in config["upscale"]["base_config"]["memory"]] == [6]
    before, after = read_tensors(model), read_tensors(tmp_path / "out")
    assert (before[bank_name()] == after[bank_name()]).all()

"""`midus flops`: a table or JSON of what `count_flops` counts, from a file, a folder or the hub."""

import json
import re
import shutil

import pytest
from commands.installed import REPOSITORY, run_alone

from midus_hf.cli.flops import count_flops, main

CONFIG = REPOSITORY / "configs" / "models" / "moc-371m.json"
EMBEDDINGS = 768 * json.loads(CONFIG.read_text())["vocab_size"]  # the head is tied to it


@pytest.fixture
def folder(tmp_path):
    """A folder with a config and nothing else."""
    shutil.copy(CONFIG, tmp_path / "config.json")
    return tmp_path


def test_it_prints_every_part_its_share_and_the_sums(capsys):
    assert main([str(CONFIG)]) == 0
    out = capsys.readouterr().out
    rows = {row[0]: row[1:] for line in out.splitlines() if len(row := re.split(r"  +", line.strip())) == 3}
    parts = count_flops(json.loads(CONFIG.read_text()), 1024).parts
    assert {name: int(count.replace(",", "")) for name, (count, _) in rows.items() if name in parts} == parts
    assert rows["chapters: attention"][1] == "22.4%"
    assert rows["forward"] == ["459,171,802,488", "100.0%"]
    assert (rows["backward"][0], rows["both"][0]) == ("918,343,604,976", "1,377,515,407,464")
    printed = " ".join(out.split())
    assert "371,292,932 parameters: 147,874,560 of the backbone, 201,375,744 values" in printed
    # A token reads 65 chapters of 64 tokens of width 768 in each of four layers.
    assert f"{147_874_560 + 22_042_628 + 4 * 65 * 64 * 768:,} activated by a token" in printed
    assert f"without embeddings {371_292_932 - EMBEDDINGS:,}, activated {182_696_708 - EMBEDDINGS:,}" in printed


def test_json_has_the_same_of_a_folder_and_of_other_sizes(folder, capsys):
    assert main([str(folder), "--sequence-length", "128", "--batch", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    flops = count_flops(json.loads(CONFIG.read_text()), 128, 2)
    assert (report["sequence_length"], report["batch"]) == (128, 2)
    assert (report["parts"], report["forward"], report["total"]) == (flops.parts, flops.forward, 3 * flops.forward)
    assert report["parameters"]["activated_without_embeddings"] == 182_696_708 - EMBEDDINGS


def test_a_type_that_is_not_counted_is_refused_without_torch(monkeypatch, folder):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    code = "assert not {'torch', 'transformers', 'midus_hf.models'} & {*sys.modules}"
    done = run_alone("midus flops", [str(folder)], afterwards=code)
    message = "midus flops: config has model_type = 'gpt2'; expected one of: llama"
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "config.json is not JSON"),
        ("[]", "config.json holds a list; expected a JSON object"),
        (None, "has no config.json"),
    ],
)
def test_a_config_that_cannot_be_counted_is_2_and_one_line(content, message, folder, capsys):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert main([str(folder)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err

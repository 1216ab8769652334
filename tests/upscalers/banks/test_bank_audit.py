"""`midus bank audit`: what trained blocks, by block and by document; edits of the bank keep the record true."""

import resource
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from midus_hf.banks.audit import BankAudit, Document, Trained
from midus_hf.banks.level_file import BankError
from midus_hf.cli.bank import main
from tests.upscalers.banks.bank_commands import refusal, run, write_blocks
from upscalers.runs.strip import strip
from upscalers.runs.upscale import upscale

FILES = [Document("corpus/a.jsonl", "aa", line, name) for line, name in ((3, "three"), (12, None))]
FILES.append(Document("corpus/b.jsonl", "bb", 1, "one"))
# Record 9 of level 2 is the generic memory's.
TRAINED = [
    Trained((1, 0), FILES[0], 2, 40),
    Trained((1, 0), FILES[1], 1, 9),
    Trained((2, 1), FILES[0], 2, 40),
    Trained((2, 9), FILES[2], 1, 7),
]

# Of 2:7 there is no record.
WRITTEN = [(1, 0), (2, 1), (2, 7), (2, 9)]


def record_in(folder: Path, trained, unrecorded=()) -> None:
    """Add to what a checkpoint knows."""
    path = folder / "memory_bank" / "hier-ffn" / "audit.sqlite3"
    if not path.exists():
        with BankAudit() as empty:
            empty.save(path)
    with BankAudit(path) as audit:
        audit.add(trained)
        audit.add_unrecorded(unrecorded)


@pytest.fixture(scope="module")
def model(upscaled, tmp_path_factory):
    """A model some of whose blocks were trained, before and after that was recorded."""
    folder = shutil.copytree(upscaled / "fresh", tmp_path_factory.mktemp("audits") / "model")
    write_blocks(folder, WRITTEN)
    record_in(folder, TRAINED, [(2, 7), (2, 9)])
    return folder


def by_block(folder: Path, capsys) -> dict[tuple[str, bool], tuple]:
    told = run("audit", folder, capsys=capsys)["blocks"]
    names = ("documents", "sequences", "tokens", "whole")
    return {(each["block"], each["deleted"]): tuple(each[name] for name in names) for each in told}


KNOWN = {
    ("1:0", False): (2, 3, 49, True),
    ("2:1", False): (1, 2, 40, True),
    ("2:7", False): (0, 0, 0, False),
    ("2:generic", False): (1, 1, 7, False),
}


def test_blocks_are_told_with_what_trained_them(model, capsys):
    assert by_block(model, capsys) == KNOWN
    main(["audit", str(model)])
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["1:0", "2", "3", "49"] in lines and ["2:7", *"000", *"and what was not recorded".split()] in lines


def test_documents_are_told_with_what_they_trained(model, capsys):
    told = run("audit", model, "--documents", capsys=capsys)["documents"]
    assert [(each["file"], each["digest"], each["line"], each["id"]) for each in told] == [
        (each.file, each.digest, each.line, each.name) for each in FILES
    ]
    assert told[0]["blocks"] == [
        {"block": "1:0", "deleted": False, "sequences": 2, "tokens": 40},
        {"block": "2:1", "deleted": False, "sequences": 2, "tokens": 40},
    ]
    main(["audit", str(model), "--documents"])
    lines = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    assert ["corpus/a.jsonl", "3", "three", "2:1", "2", "40"] in lines
    assert ["corpus/a.jsonl", "12", "1:0", "1", "9"] in lines


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["--node", "1:0"], [3, 12]),
        (["--node", "2:generic"], [1]),
        (["--node", "2:1", "--node", "2:generic"], [3, 1]),
        (["--node", "1:0", "--subtree"], [3, 12]),
        (["--node", "2:7"], []),
    ],
    ids=["one", "generic", "two", "subtree", "unknown"],
)
def test_the_documents_of_a_block_are_told(model, capsys, words, lines):
    told = run("audit", model, *words, capsys=capsys)["documents"]
    assert [each["line"] for each in told] == lines
    named = set(words[1::2]) | ({"2:1"} if "--subtree" in words else set())
    assert all(of["block"] in named for each in told for of in each["blocks"])


def test_deleted_blocks_keep_their_record(model, tmp_path, capsys):
    run("delete", model, "--node", "1:0", "--node", "2:7", "--output", tmp_path / "out", capsys=capsys)
    after = {("1:0", True): (2, 3, 49, True)} | {key: KNOWN[key] for key in KNOWN if key[0] not in ("1:0", "2:7")}
    assert by_block(tmp_path / "out", capsys) == after and by_block(model, capsys) == KNOWN
    told = run("audit", tmp_path / "out", "--node", "1:0", capsys=capsys)["documents"]
    assert [of for each in told for of in each["blocks"]] == [
        {"block": "1:0", "deleted": True, "sequences": 2, "tokens": 40},
        {"block": "1:0", "deleted": True, "sequences": 1, "tokens": 9},
    ]
    main(["audit", str(tmp_path / "out")])
    assert ["1:0", "2", "3", "49", "deleted"] in [
        line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()
    ]
    # What trains it from now on is another matter; deleted once more, both are one.
    write_blocks(tmp_path / "out", [(1, 0)])
    record_in(tmp_path / "out", [Trained((1, 0), FILES[0], 1, 20)])
    assert by_block(tmp_path / "out", capsys) == after | {("1:0", False): (1, 1, 20, True)}
    run("delete", tmp_path / "out", "--node", "1:0", "--output", tmp_path / "again", capsys=capsys)
    assert by_block(tmp_path / "again", capsys) == after | {("1:0", True): (2, 4, 69, True)}


def test_of_imported_blocks_nothing_is_known(upscaled, model, tmp_path, capsys):
    run("export", model, "--node", "1:0", "--output", tmp_path / "blocks", capsys=capsys)
    run("import", model, tmp_path / "blocks", "--output", tmp_path / "out", capsys=capsys)
    imported = {("1:0", False): (0, 0, 0, False), ("1:0", True): (2, 3, 49, True)}
    assert by_block(tmp_path / "out", capsys) == KNOWN | imported
    run("import", upscaled / "fresh", tmp_path / "blocks", "--output", tmp_path / "new", capsys=capsys)
    assert not (tmp_path / "new" / "memory_bank" / "hier-ffn" / "audit.sqlite3").exists()


def runs_of(start: Path, folder: Path, second_is_recorded: bool = True) -> list[Path]:
    """A run of 1:0 and 2:1, and one of 1:1 and 2:3, from a model."""
    for name, nodes, seed in (("one", [(1, 0), (2, 1)], 1), ("two", [(1, 1), (2, 3)], 2)):
        shutil.copytree(start, folder / name)
        write_blocks(folder / name, nodes, seed)
    record_in(folder / "one", [Trained((1, 0), FILES[2], 1, 5), Trained((2, 1), FILES[2], 1, 5)])
    if second_is_recorded:
        record_in(folder / "two", [Trained((1, 1), FILES[1], 4, 6), Trained((2, 3), FILES[1], 4, 6)])
    else:
        (folder / "two" / "memory_bank" / "hier-ffn" / "audit.sqlite3").unlink(missing_ok=True)
    return [folder / "one", folder / "two"]


def test_merged_runs_bring_their_records(model, tmp_path, capsys):
    run("merge", model, *runs_of(model, tmp_path), "--output", tmp_path / "out", capsys=capsys)
    of_runs = {("1:0", False): (3, 4, 54, True), ("2:1", False): (2, 3, 45, True)}
    of_runs |= {(block, False): (1, 4, 6, True) for block in ("1:1", "2:3")}
    assert by_block(tmp_path / "out", capsys) == KNOWN | of_runs


def test_a_merged_run_that_has_no_record_is_told(model, tmp_path, capsys):
    runs = runs_of(model, tmp_path, second_is_recorded=False)
    run("merge", model, *runs, "--output", tmp_path / "out", capsys=capsys)
    found = by_block(tmp_path / "out", capsys)
    assert found["1:1", False] == found["2:3", False] == (0, 0, 0, False)
    assert found["1:0", False] == (3, 4, 54, True)


def test_runs_of_a_model_that_has_no_record_are_merged(upscaled, tmp_path, capsys):
    write_blocks(shutil.copytree(upscaled / "fresh", tmp_path / "start"), [(2, 8)])
    runs = runs_of(tmp_path / "start", tmp_path)
    run("merge", tmp_path / "start", *runs, "--output", tmp_path / "out", capsys=capsys)
    assert by_block(tmp_path / "out", capsys) == {
        ("1:0", False): (1, 1, 5, True),
        ("1:1", False): (1, 4, 6, True),
        ("2:1", False): (1, 1, 5, True),
        ("2:3", False): (1, 4, 6, True),
        ("2:8", False): (0, 0, 0, False),
    }
    for folder in runs:
        (folder / "memory_bank" / "hier-ffn" / "audit.sqlite3").unlink()
    run("merge", tmp_path / "start", *runs, "--output", tmp_path / "none", capsys=capsys)
    assert not (tmp_path / "none" / "memory_bank" / "hier-ffn" / "audit.sqlite3").exists()


def test_the_record_goes_with_the_bank(model, tmp_path, capsys):
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "saved")
    upscale(base=model, method="llama-pro", output=tmp_path / "deeper", verify=False)
    for folder in ("saved", "deeper"):
        assert by_block(tmp_path / folder, capsys) == KNOWN
    upscale(base=model, method="llama-pro", output=tmp_path / "deeper", verify=False, overwrite=True)
    strip(tmp_path / "deeper", tmp_path / "stripped")
    assert by_block(tmp_path / "stripped", capsys) == KNOWN


def test_a_bank_without_a_record_or_with_a_damaged_one_is_refused(upscaled, model, tmp_path, capsys):
    line = refusal("audit", upscaled / "fresh", capsys=capsys)
    assert "has no audit.sqlite3; expected one, of a run that was given audit: true" in line
    assert "node '2:99' is not there" in refusal("audit", model, "--node", "2:99", capsys=capsys)
    shutil.copytree(model, tmp_path / "damaged")
    path = tmp_path / "damaged" / "memory_bank" / "hier-ffn" / "audit.sqlite3"
    whole = path.read_bytes()
    path.write_bytes(b"nothing of the kind")
    assert "audit.sqlite3 is no audit of version 1; expected one" in refusal(
        "audit", tmp_path / "damaged", capsys=capsys
    )
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    assert "audit.sqlite3 is damaged" in refusal("audit", tmp_path / "damaged", capsys=capsys)


def test_a_record_that_cannot_be_written_is_a_failure_of_the_disk(tmp_path):
    """Of which a run knows that it may go on."""
    with BankAudit() as audit:
        audit.add(TRAINED)
        with pytest.raises(OSError, match="No such file or directory"):
            audit.save(tmp_path / "absent" / "audit.sqlite3")
        audit.save(tmp_path / "audit.sqlite3")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(OSError, match="cannot be written: "):
                audit.save(tmp_path / "full.sqlite3")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["audit.sqlite3"]


def test_what_there_is_none_of_cannot_be_gone_on_from(tmp_path):
    with BankAudit() as audit, pytest.raises(BankError, match=r"there is no audit at .*state; expected one, of a run"):
        audit.load(tmp_path / "state")


def test_a_record_is_saved_whole_and_gone_on_from(tmp_path):
    with BankAudit() as audit:
        audit.add(TRAINED)
        audit.save(tmp_path / "early")
        audit.add(TRAINED[:2])
        assert [(each.sequences, each.tokens) for each in audit.trained([(1, 0)])] == [(4, 80), (2, 18)]
        audit.save(tmp_path / "late")
        audit.load(tmp_path / "early")
        assert [(each.sequences, each.tokens) for each in audit.trained([(1, 0)])] == [(2, 40), (1, 9)]
        audit.save(tmp_path / "late")
    with BankAudit(tmp_path / "late") as audit:
        assert list(audit.trained([(1, 0), (2, 1), (2, 9)])) == TRAINED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["early", "late"]

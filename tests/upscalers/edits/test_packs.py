"""Edits of the entries of a glossary: what they change, check and refuse."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from midus_hf.anatomy import types
from midus_hf.cli.edit import main as edit
from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import CARD_FILE
from midus_hf.files.outputs import exclusive
from midus_hf.memories.packs.glossary import is_new_name
from midus_hf.memories.packs.names import NameIndex, name_of
from tests.upscalers.contents import file_digests
from tests.upscalers.hub_server import Repository, files_of
from tests.upscalers.word_glossaries import ENTRIES, entries_in, glossary, logits, made, save_base_of_words
from upscalers.edits.chapters import zero
from upscalers.edits.checkpoint_edit import EditRequest
from upscalers.edits.packs import add_entries, delete_entries, list_entries, replace_entries
from upscalers.request import Progress
from upscalers.runs.upscale import upscale


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base_of_words(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    made(base, folder)
    return folder / "out"


@pytest.fixture
def run(capsys):
    """Run `midus edit` with this status, and return what it printed."""

    def run(*words, status=0):
        capsys.readouterr()
        assert edit([*map(str, words)]) == status
        return capsys.readouterr()

    return run


def recorded(folder):
    config, record = (json.loads((folder / name).read_text()) for name in ("config.json", "upscale.json"))
    _, _, card = (folder / CARD_FILE).read_text(errors="surrogateescape").partition("```yaml\n")
    request = yaml.safe_load(card.partition("```")[0])
    return [each["options"]["protect"] for each in (config["upscale"], record, request)]


def test_edits_check_protected_texts_or_end_their_record(base, tmp_path, run):
    for name, text in (("texts", "word1 word40"), ("others", "word1 word41")):
        (tmp_path / f"{name}.txt").write_text(text)
    made(base, tmp_path, ENTRIES[:2], protect=str(tmp_path / "texts.txt"))
    model, new, output = tmp_path / "out", [{"name": "word40", "text": "word1"}], tmp_path / "edited"
    more = {"replace": [{"name": ["word5", "word40"], "text": "word1"}], "add": new}

    def edited(command, rows, *words):
        words = [command, model, "--corpus", glossary(tmp_path / "rows", rows), *words]
        told = run(*words, "--output", output, "--overwrite").err
        return recorded(output), told

    assert recorded(model) == ["texts.txt"] * 3
    assert edited("replace", [{"name": "word5", "text": "word1"}]) == (["texts.txt"] * 3, "")
    said = "protected texts (texts.txt) are not checked against the new names; the model no longer records that they contain"
    for command in ("add", "replace"):
        records, told = edited(command, more[command])
        assert records == [None] * 3, command
        assert told == f"{said} no name. Pass --protect to check them.\n", command
        others, told = edited(command, more[command], "--protect", tmp_path / "others.txt")
        assert others == ["others.txt"] * 3, command
        assert told.endswith("others.txt\n"), command
    words = ["add", model, "--corpus", glossary(tmp_path, new), "--output", tmp_path / "no"]
    told = run(*words, "--protect", tmp_path / "texts.txt", status=2).err
    assert "texts.txt contain names of the glossary: 'word40' (1 text); expected none" in told
    assert not (tmp_path / "no").exists()
    loaded = AutoModelForCausalLM.from_pretrained(model)
    with pytest.warns(UserWarning, match=r"protected texts \(texts.txt\) are not checked"):
        loaded.glossary.add("word40", "word1")
    loaded.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["upscale"]["options"]["protect"] is None


def test_how_much_is_read_is_said(base, tmp_path, run):
    progress, told = Progress(), []
    progress.note = told.append
    made(base, tmp_path, [*ENTRIES, ENTRIES[0]], max_tokens=2, progress=progress)
    longer, repeated = (
        "entries longer than 2 tokens, whose rest is not read",
        "rows that repeat another one, and are left out",
    )
    assert {f"{longer}: 2", f"{repeated}: 1", "3 entries of 7 tokens"} <= {*told}
    for command, name in (("add", "word40"), ("replace", "word5")):
        rows = glossary(tmp_path, [{"name": name, "text": "word1 word2 word3"}] * 2)
        said = run(command, tmp_path / "out", "--corpus", rows, "--output", tmp_path / command).err
        assert said == f"{longer}: 1\n{repeated}: 1\n", command
    with pytest.warns(UserWarning, match=f"{longer}: 1"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out").glossary.add("word40", "word1 word2 word3")


def test_a_deleted_name_is_computed_as_by_the_base(base, model, tmp_path):
    without = tmp_path / "without"
    assert delete_entries(EditRequest(model, without), ["WORD22"])["entries"] == [["word20 word21", "word22"]]
    for name in ([20, 21], [22]):
        text = [*name, 50, 51]
        assert torch.equal(logits(without, text), logits(base, text)), name
        assert not torch.equal(logits(model, text), logits(base, text)), name
    for name in ([5], [30]):
        assert torch.equal(logits(without, [*name, 50, 51]), logits(model, [*name, 50, 51]))
    assert "word22" not in (without / "glossary.jsonl").read_text()
    for gone in (b"word20 word21", b"word9 word10 word11"):
        assert not any(gone in path.read_bytes() for path in without.rglob("*") if path.is_file())
    digests, before = file_digests(without), file_digests(model)
    assert {name for name in before if digests.get(name) != before[name]} == {"glossary.jsonl"}


def test_a_name_deletes_all_entries_that_it_finds(base, model, tmp_path, run):
    """A file that was written by hand may have several."""
    by_hand = shutil.copytree(model, tmp_path / "model")
    with (by_hand / "glossary.jsonl").open("a") as file:
        file.write('{"name": ["word6", "word5"], "text": "word14", "exact": true}\n')
    told = run("delete", by_hand, "--name", "word5", "--output", tmp_path / "out").out
    assert "out: deleted 2 entries: word5, word6 / word5\n" in told
    assert [row["name"] for row in entries_in(tmp_path / "out")] == [["word20 word21", "word22"], ["word30"]]
    for text in ([5, 50, 51], [6, 50, 51]):
        assert torch.equal(logits(tmp_path / "out", text), logits(base, text))


def test_deletion_says_where_names_still_occur(base, tmp_path, run, monkeypatch):
    texts = {"word5": "word1", "word6": "word7 word5", "word5 word8": "word7", "word9": "word56"}
    corpus = "".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in texts.items())
    (tmp_path / "word5.jsonl").write_text(corpus)
    monkeypatch.chdir(tmp_path)
    made(base, tmp_path, corpus=str(tmp_path / "word5.jsonl"))
    result = delete_entries(EditRequest(tmp_path / "out", tmp_path / "result"), ["Word5"])
    files = ["README.md", "config.json", "upscale.json"]
    assert result["remains"] == {"texts": ["word6"], "names": ["word5 word8"], "files": files}
    words, still = ["delete", "out", "--output", "a", "--overwrite", "--name"], "their names still occur in"
    assert run(*words, "word5").out.splitlines()[1:4] == [
        f"{still} the texts of word6; to delete: midus edit replace",
        f"{still} other names, word5 word8; to delete: midus edit delete",
        f"{still} {', '.join(files)}, such as in the recorded name of a corpus; to delete: edit these files",
    ]
    assert run(*words, "word9").out.splitlines()[0] == "a: deleted 1 entry: word9"


def test_edited_entries_equal_upscaled_ones(base, model, tmp_path):
    rows = [{"name": "word40", "text": "word41 word42"}]
    assert add_entries(EditRequest(model, tmp_path / "more"), glossary(tmp_path, rows))["entries"] == [["word40"]]
    changed = [{"name": "Word22", "text": "word60"}]
    result = replace_entries(EditRequest(tmp_path / "more", tmp_path / "changed"), glossary(tmp_path, changed))
    assert result["command"] == "replace"
    made(base, tmp_path, [*ENTRIES[:1], *ENTRIES[2:], *rows, {"name": ["word20 word21", "word22"], "text": "word60"}])
    for text in ([22, 50, 51], [5, 50], [40, 50, 51], [30, 40, 50]):
        assert torch.equal(logits(tmp_path / "changed", text), logits(tmp_path / "out", text))


def test_synced_glossary_is_that_of_a_new_upscaling(base, model, tmp_path, run):
    rows = [
        {"name": "word40", "text": "word41"}, {"name": ["word6", "word22"], "text": "word60"}, ENTRIES[2],
        {"name": "word44", "text": "word1"},
    ]  # fmt: skip
    folder, file = shutil.copytree(model, tmp_path / "model"), glossary(tmp_path, rows)
    result = json.loads(run("sync", folder, "--corpus", file, "--json").out)
    made(base, tmp_path, rows)
    assert (folder / "glossary.jsonl").read_bytes() == (tmp_path / "out" / "glossary.jsonl").read_bytes()
    assert result["added"] == [["word40"], ["word44"]]
    assert result["replaced"] == [["word6", "word22"]]
    assert result["deleted"] == [["word5"]]
    assert result["entries"] == [list(each["names"]) for each in list_entries(folder)["entries"]]
    assert {"remains", "copies", "searched"} <= result.keys()
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())]
    assert run("sync", folder, "--corpus", file).out == f"{folder}: the glossary is that of the corpus already\n"
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())] == before
    more = glossary(tmp_path, [*rows[1:3], {"name": "word44", "text": "word1", "exact": True}])
    printed = run("sync", folder, "--corpus", more).out.splitlines()
    assert printed[:2] == [f"{folder}: replaced 1 entry: word44", f"{folder}: deleted 1 entry: word40"]
    assert any("not searched for their texts" in line for line in printed[2:])


def test_name_that_is_no_longer_exact_is_new():
    exact, plain = (name_of(0, "word44", is_exact) for is_exact in (True, False))
    found = [
        is_new_name(NameIndex([before]), after) for before, after in [(exact, plain), (plain, exact), (plain, plain)]
    ]
    assert found == [True, False, False]


def test_refused_sync_writes_nothing(model, tmp_path, run):
    folder = shutil.copytree(model, tmp_path / "model")
    before = file_digests(folder)
    rows = [{"name": "word5", "text": "word1"}, {"name": ["word6", "word5"], "text": "word2"}]
    told = run("sync", folder, "--corpus", glossary(tmp_path, rows), status=2).err
    assert "has the name 'word5', which" in told
    assert file_digests(folder) == before


def test_edit_without_output_changes_the_folder(model, tmp_path, run):
    folder = shutil.copytree(model, tmp_path / "model")
    rows = glossary(tmp_path, [{"name": "word40", "text": "word41"}])
    (folder / "glossary.jsonl").chmod(0o640)
    before = file_digests(folder)
    add_entries(EditRequest(folder, tmp_path / "copy"), rows)
    (folder / "model.safetensors").rename(tmp_path / "weights")
    assert run("add", folder, "--corpus", rows).out == f"{folder}: added 1 entry: word40\n"
    assert (folder / "glossary.jsonl").stat().st_mode & 0o777 == 0o640
    (tmp_path / "weights").rename(folder / "model.safetensors")
    assert file_digests(folder) == file_digests(tmp_path / "copy")
    result = delete_entries(EditRequest(folder), ["word40"])
    assert (result["entries"], result["output"]) == ([["word40"]], str(folder))
    assert file_digests(folder) == before


class KilledError(BaseException):
    """In place of the end of the process."""


# What gives a card results.
MEASURED = "---\n", "---\nmodel-index:\n- name: measured before\n  results: []\n"
# What an edit of new names and protected texts writes, in a folder with older protected texts and results.
WRITES = "README.md config.json upscale.json README.md glossary.jsonl config.json upscale.json README.md".split()


def test_edit_in_place_promises_nothing_false_if_killed(base, tmp_path, monkeypatch):
    for name, text in (("texts", "word1 word40"), ("others", "word1 word41")):
        (tmp_path / f"{name}.txt").write_text(text)
    made(base, tmp_path, ENTRIES[:2], protect=str(tmp_path / "texts.txt"))
    card = tmp_path / "out" / CARD_FILE
    card.write_bytes(card.read_bytes().replace(*(part.encode() for part in MEASURED), 1) + b"caf\xe9")
    rows = glossary(tmp_path / "rows", [{"name": ["word5", "word40"], "text": "word1"}])
    old, replace, renamed = entries_in(tmp_path / "out"), os.replace, list[str]()

    def rename(source, target, done):
        if Path(target).parent == folder:
            if len(renamed) == done:
                raise KilledError
            renamed.append(Path(target).name)
        replace(source, target)

    for done in range(len(WRITES) + 1):
        folder = shutil.copytree(tmp_path / "out", tmp_path / f"killed-{done}")
        renamed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda source, target, done=done: rename(source, target, done))
            try:
                replace_entries(EditRequest(folder), rows, protect=str(tmp_path / "others.txt"))
            except KilledError:
                assert done < len(WRITES)
        assert renamed == [*WRITES[:done]]
        is_old = entries_in(folder) == old
        assert {*recorded(folder)} <= {None, "texts.txt" if is_old else "others.txt"}, done
        assert is_old or b"measured before" not in (folder / CARD_FILE).read_bytes(), done
        assert (folder / CARD_FILE).read_bytes().endswith(b"caf\xe9"), done
        assert len(AutoModelForCausalLM.from_pretrained(folder).glossary) == 2, done
        replace_entries(EditRequest(folder), rows, protect=str(tmp_path / "others.txt"))
        assert recorded(folder) == ["others.txt"] * 3, done
        assert entries_in(folder)[-1] == {"name": ["word5", "word40"], "text": "word1"}, done


def test_edits_that_are_not_in_place_say_so(model, tmp_path, monkeypatch, run):
    folder = shutil.copytree(model, tmp_path / "model")
    before, name = file_digests(folder), ["--name", "word5"]

    def check(said, *words):
        assert said in run("delete", *words, status=2).err

    in_place = (
        "is no folder here; expected one, to change its glossary in place. For a model of the Hub, pass --output"
    )
    check(in_place, "owner/model", *name)
    check("overwrite is given without output", folder, *name, "--overwrite")
    check("output is missing; expected the folder to make, since only a glossary is", folder, "--node", "1:1")
    with pytest.raises(RequestError, match="output is missing"):
        zero(EditRequest(folder), "1")
    with exclusive(folder, RequestError("busy")):
        check(f"{folder} is being written by another run. Wait for it.", folder, *name)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        check("is not writable; expected a folder whose glossary can be changed in place. Pass", folder, *name)
    assert file_digests(folder) == before
    (folder / "glossary.jsonl").rename(tmp_path / "shared.jsonl")
    (folder / "glossary.jsonl").symlink_to(tmp_path / "shared.jsonl")
    link = f"is a link to {tmp_path / 'shared.jsonl'}, which other folders may read; expected a file"
    check(f"glossary.jsonl {link}", folder, *name)


def test_deletion_names_the_files_that_have_the_text(base, tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"name": "word5", "text": "word7 word8"}, {"name": "word6", "text": "word9"}]
    corpus = tmp_path / "rows.jsonl"
    made(base, tmp_path, rows)
    (tmp_path / "names.csv").write_text("name,text\nword5,word60\n")
    (tmp_path / "texts.tsv").write_text("name\ttext\nword5\tword7 word8\n")
    (tmp_path / "empty.json").touch()
    cached = tmp_path / "cache" / "json" / "default-1" / "0.0.0" / "midus-3" / "json-train.arrow"
    for path in (cached, tmp_path / "out" / "checkpoint-1" / "glossary.jsonl"):
        path.parent.mkdir(parents=True)
        path.write_bytes(b'...word5...word7 word8..."')
    told = run("delete", "out", "--name", "word5", "--output", "without").out
    copies = ["cache/json/default-1/0.0.0/midus-3", "out/checkpoint-1/glossary.jsonl", "out/glossary.jsonl"]
    copies += ["rows.jsonl", "texts.tsv"]
    assert told.splitlines()[-2:] == [
        f"their texts are still in {', '.join(copies)}; to delete: edit or remove them",
        f"not searched for their texts: folders other than {tmp_path}, compressed files, logs, backups, the Hub",
    ]
    assert delete_entries(EditRequest("out"), ["word5"])["copies"] == [*copies[:2], *copies[3:]]
    corpus.write_text("")
    assert delete_entries(EditRequest("out"), ["word6"])["copies"] == ["without/glossary.jsonl"]


def test_entries_are_listed_without_weights(model, tmp_path, run):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["memory"][0]["max_tokens"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "glossary.jsonl").open("a") as file:
        file.write(json.dumps({"name": "Word40", "text": " ".join(["word1"] * 30), "exact": True}) + "\n")
    assert run("list", folder).out.splitlines() == [
        "4 entries of 37 tokens", "word5: word7 word8 word13 (3 tokens, 2 of them read)",
        "word20 word21 / word22: word9 word10 word11 (3 tokens, 2 of them read)", "word30: word12 (1 token)",
        f"Word40 (exact): {'word1 ' * 10}... (30 tokens, 2 of them read)",
    ]  # fmt: skip
    listed = json.loads(run("list", folder, "--json").out)
    assert (listed["max_tokens"], len(listed["entries"])) == (2, 4)
    assert listed["entries"][2] == {"names": ["word30"], "text": "word12", "exact": False, "tokens": 1}


def test_a_glossary_of_the_hub_is_listed_not_changed(model, hub, run):
    hub.repositories["org/model"] = Repository(files=files_of(model))
    assert run("list", "org/model").out.startswith("3 entries of 7 tokens\n")
    (glossary_file,) = Path().rglob("glossary.jsonl")
    assert not [*Path().rglob("model.safetensors")]
    assert "glossary.jsonl is a link to" in run("delete", glossary_file.parent, "--name", "word5", status=2).err
    run("delete", "org/model", "--name", "word5", "--output", "without")
    assert len(entries_in(Path("without"))) == 2


def test_glossary_is_edited_without_a_home(no_home, base, tmp_path, run, monkeypatch):
    for name in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    types._rows.cache_clear()
    made(base, tmp_path)
    assert "deleted 1 entry: word30" in run("delete", tmp_path / "out", "--name", "word30").out


def test_entries_of_another_memory_are_not_deleted(base, model, tmp_path, run):
    upscale(base=model, method="moc", output=tmp_path / "both")
    words = ("delete", tmp_path / "both", "--name", "word5", "--memory")
    assert (
        "memory is 'chapters'; expected 'packs', the only one with a glossary" in run(*words, "chapters", status=2).err
    )
    assert len(entries_in(tmp_path / "both")) == 3
    run(*words, "packs")
    assert len(entries_in(tmp_path / "both")) == 2


def test_entries_of_a_model_without_packs_are_refused(base):
    with pytest.raises(
        RequestError, match="has no packs; expected a checkpoint that was upscaled with --method packs"
    ):
        list_entries(base)


def test_list_shows_what_a_model_has(base, model, tmp_path, run):
    upscale(base=model, method="moc", output=tmp_path / "both")
    for words, kinds in {"": {"entries", "memories"}, "packs": {"entries"}, "chapters": {"memories"}}.items():
        shown = run("list", tmp_path / "both", "--json", *(["--memory", words] if words else [])).out
        assert kinds == {"entries", "memories"} & json.loads(shown).keys()
    shown = run("list", tmp_path / "both").out
    assert "3 entries of" in shown
    assert "memory chapters at" in shown
    lacks = (
        "has no memory of type 'packs' or 'moc', whose entries or chapters could be listed; its memories are: none."
    )
    assert lacks in run("list", base, status=2).err
    assert (
        "no memory 'absent' of type 'packs' or 'moc'"
        in run("list", tmp_path / "both", "--memory", "absent", status=2).err
    )


@pytest.mark.parametrize("words", [["delete", "--name", "word5"], ["add"], ["replace"]], ids=" ".join)
def test_edits_remove_earlier_results_from_the_card(words, model, tmp_path, run):
    measured = shutil.copytree(model, tmp_path / "measured")
    card = (model / CARD_FILE).read_bytes() + b"word5 caf\xe9\r\n"
    (measured / CARD_FILE).write_bytes(card.replace(*(part.encode() for part in MEASURED), 1))
    rows = [{"name": "word40" if words == ["add"] else "word30", "text": "word1"}]
    corpus = [] if words[0] == "delete" else ["--corpus", glossary(tmp_path, rows)]
    told = run(words[0], measured, *words[1:], *corpus, "--output", tmp_path / "out").err
    assert (tmp_path / "out" / CARD_FILE).read_bytes() == card
    assert "results in the card's metadata are left out, since they were measured before the edit" in told


@pytest.mark.parametrize("is_absent", [True, False], ids=["a shard", "all"])
def test_a_folder_without_weights_is_refused_first(is_absent, model, tmp_path, run):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    shards = sorted((tmp_path / "model").glob("*.safetensors"))
    for path in [shards[0]] if is_absent else [*shards, tmp_path / "model" / "model.safetensors.index.json"]:
        path.unlink()
    said = f"in {shards[0].name}, which is missing" if is_absent else "holds no weights; expected model.safetensors"
    rows = glossary(tmp_path / "rows", [{"name": "word5", "text": "word1"}])
    for words in (["delete", "--name", "word5"], ["replace", "--corpus", rows]):
        assert said in run(words[0], tmp_path / "model", *words[1:], "--output", tmp_path / "out", status=2).err
        assert not (tmp_path / "out").exists()


EDITS = [
    (["delete"], None, "expected either blocks (--node, perhaps with --subtree) or names of entries (--name)"),
    (["delete", "--name", "word9"], None, "no entry has the name 'word9'; did you mean 'word5'"),
    (["add"], [{"name": "word22", "text": "word1"}], "which finds the entry 'word20 word21'; expected a new name."),
    (["replace"], [{"name": ["word22", "word5"], "text": "word1"}], "names of 2 entries, 'word20 word21', 'word5'; ex"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "rows", "message"), EDITS, ids=str)
def test_edits_that_are_refused_write_nothing(words, rows, message, model, tmp_path, run):
    corpus = [] if rows is None else ["--corpus", glossary(tmp_path, rows)]
    assert message in run(words[0], model, *words[1:], *corpus, "--output", tmp_path / "out", status=2).err
    assert not (tmp_path / "out").exists()


def test_edits_say_what_they_did(base, model, tmp_path, run):
    rows = glossary(tmp_path, [{"name": "word5", "text": "word1"}])
    more = glossary(tmp_path / "more", [{"name": ["word6", "word5"], "text": "word1"}])
    a, b, c, d = (tmp_path / name for name in "abcd")
    two = ["--name", "word22", "--name", "word5"]
    for source, said, command, words, output in (
        (model, "deleted 2 entries: word20 word21 / word22, word5", "delete", two, a),
        (a, "added 1 entry: word5", "add", ["--corpus", rows], b),
        (b, "replaced 1 entry: word5 / word6\n", "replace", ["--corpus", more], c),
    ):
        assert f"{output.name}: {said}" in run(command, source, *words, "--output", output).out
    assert entries_in(c)[-1] == {"name": ["word5", "word6"], "text": "word1"}
    told = run("add", base, "--corpus", rows, "--output", d, status=2).err
    assert "has no packs; expected a checkpoint that was upscaled with --method packs" in told

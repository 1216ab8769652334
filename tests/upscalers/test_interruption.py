"""A killed run leaves the old output, the new one or none, and the next run succeeds."""

import os
import shutil
import signal
import sys

import pytest
import torch
from pairs import in_turn

from tests.upscalers.checkpoints import SMALL_MEMORY, save_base
from tests.upscalers.contents import file_digests, logits
from upscalers.runs.upscale import upscale
from upscalers.runs.writing import CheckpointFolder
from upscalers.tensors import writer


def upscaled(base, output, **request):
    request = {"options": SMALL_MEMORY, "num_new_layers": 2, "verify": False, "max_shard_size": "4MB", **request}
    return upscale(base=base, method="midus-hml", output=output, **request)


def killed(work) -> None:
    """Do `work` in a child process from here on; it must be killed."""
    if not (child := os.fork()):
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def tiny_bases(tmp_path_factory):
    folder, results = tmp_path_factory.mktemp("tiny"), []
    for seed in (0, 1):
        base = save_base(folder / f"base-{seed}", eos_token_id=seed)
        upscaled(base, folder / f"out-{seed}")
        results.append((base, file_digests(folder / f"out-{seed}")))
    assert torch.equal(logits(results[0][0]), logits(folder / "out-0"))
    return results


@pytest.mark.parametrize("file", ["model-00002-of-", "upscale.json"])
def test_kill_while_writing_does_not_block_the_next_run(tiny_bases, tmp_path, file):
    base, output = tiny_bases[0][0], tmp_path / "out"

    def watch(event, arguments):
        if event == "open" and f"/{file}" in (path := str(arguments[0])) and ".out." in path:
            die()

    def work():
        sys.addaudithook(watch)
        upscaled(base, output, max_shard_size="60KB")

    killed(work)
    assert os.listdir(tmp_path) == [".out.midus-partial"]
    upscaled(base, output, max_shard_size="60KB")
    assert os.listdir(tmp_path) == ["out"]
    assert len(list(output.glob("model-*"))) > 1
    assert torch.equal(logits(output), logits(base))


@pytest.mark.parametrize("step", range(2))
def test_kill_before_a_rename_leaves_old_output_or_none(tiny_bases, tmp_path, step):
    """The old output is moved aside, then the new one takes its place."""
    (first, old), (second, new) = tiny_bases
    output = tmp_path / "out"
    upscaled(first, output)

    def work():
        done, rename = [], os.rename

        def watched(source, target, **_):
            done.append(rename(source, target) if len(done) < step else die())

        os.rename = watched
        upscaled(second, output, overwrite=True)

    killed(work)
    assert output.exists() == (step == 0)
    assert file_digests(output if step == 0 else tmp_path / ".out.midus-replaced") == old
    upscaled(second, output, overwrite=True)
    assert file_digests(output) == new
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(("deleted", "files"), in_turn(["replaced", "made"], [0, 1]))
def test_kill_while_deleting_is_cleaned_up_by_the_next_run(tiny_bases, tmp_path, deleted, files):
    """What it replaced, once the new output stands in its place; or what it made, once the work failed."""
    (first, old), (second, new) = tiny_bases
    output = tmp_path / "out"
    upscaled(first, output)

    def work():
        rmtree, unlink, left = shutil.rmtree, os.unlink, []

        def watched(path, **kwargs):
            left.append(unlink(path, **kwargs) if len(left) < files else die())

        def watch(folder, **kwargs):
            if ".midus-" in str(folder) and os.path.isdir(folder):
                os.unlink = watched
            rmtree(folder, **kwargs)

        shutil.rmtree = watch
        if deleted == "made":
            CheckpointFolder._commit = lambda self: 1 / 0
        upscaled(second, output, overwrite=True)

    killed(work)
    assert file_digests(output) == (new if deleted == "replaced" else old)
    assert len(os.listdir(tmp_path)) == 2
    upscaled(first, output, overwrite=True)
    assert file_digests(output) == old
    assert os.listdir(tmp_path) == ["out"]


def test_base_that_shrinks_while_read_leaves_nothing(tmp_path, monkeypatch):
    honest = writer.CheckpointWriter.write

    def shrinking(self, folder, shards):
        os.truncate(tmp_path / "base" / "model.safetensors", 50_000)
        return honest(self, folder, shards)

    monkeypatch.setattr(writer.CheckpointWriter, "write", shrinking)
    for verify in (True, False):
        with pytest.raises(OSError, match=r"ended \d+ bytes early"):
            upscaled(save_base(tmp_path / "base"), tmp_path / "out", verify=verify)
        assert os.listdir(tmp_path) == ["base"], verify

"""Hundreds of damaged checkpoints: each ends in a clear refusal, or in a result that computes what its base computes."""

import contextlib
import re
import shutil
import signal
from collections.abc import Iterator

import pytest
import torch
from tiny import prompt

from tests.upscalers.checkpoints import load, save_base
from tests.upscalers.mutations import kind_of, one_mutation
from upscalers.request.errors import RequestError, VerificationError
from upscalers.runs.upscale import upscale

CASES, PARTS, SECONDS = 200, 4, 60
NUM_BASES = 3
# Damage after which weights may be NaN, infinite or huge, so that the check of blocks alone must refuse.
WITHOUT_NUMBERS = "rms_norm_eps|overwritten|bit flipped"


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail what takes longer."""

    def give_up(*_):
        raise TimeoutError(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A single-file and two sharded bases of different families."""
    folder = tmp_path_factory.mktemp("sound")
    sound = [
        save_base(folder / "llama", "llama", max_shard_size="60KB", num_hidden_layers=2),
        save_base(folder / "gemma3", "gemma3", num_hidden_layers=2),
        save_base(folder / "qwen2", "qwen2", torch.bfloat16, max_shard_size="30KB", num_hidden_layers=2),
    ]
    assert len(sound) == NUM_BASES
    return sound


def computed(folder) -> torch.Tensor:
    """Logits of the prompt, by transformers alone."""
    with torch.no_grad():
        return load(folder)(prompt()).logits


def telling(seeds: range) -> list[int]:
    """The first of these for each kind of damage to each base."""
    first = {(seed % NUM_BASES, kind_of(seed)): seed for seed in reversed(seeds)}
    return sorted(first.values())


def damaged(bases, seed, folder):
    """A damaged copy of one of the bases, and what was done to it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bases[seed % len(bases)], folder)
    return one_mutation(folder, seed)


@pytest.fixture
def all_of_it(request) -> bool:
    """Whether every damage is done; by default each kind that its range has is done once to each base."""
    return request.config.getoption("--product")


@pytest.mark.parametrize("part", range(PARTS))
def test_damage_ends_in_a_refusal_or_in_a_result_equal_to_the_base(bases, tmp_path, part, all_of_it):
    base, output = tmp_path / "base", tmp_path / "out"
    refused = identical = 0
    for seed in range(part, CASES, PARTS) if all_of_it else telling(range(CASES))[part::PARTS]:
        for verify in (True, False):
            damage = damaged(bases, seed, base)
            request = {"method": "midus-hml", "options": {"n": 4, "k": 2}, "num_new_layers": 1, "verify": verify}
            try:
                with within(SECONDS):
                    upscale(base=base, output=output, placement="bottom-heavy", **request)
            except RequestError as error:
                assert str(error), damage
                assert len(str(error)) < 6000, damage
                refused += 1
            except VerificationError as error:
                assert not verify, (damage, error)
                assert "gives NaN" in str(error), (damage, error)
                assert re.search(WITHOUT_NUMBERS, damage), (damage, error)
                refused += 1
            else:
                try:
                    expected = computed(base)
                except Exception:
                    expected = None  # transformers cannot run this base at all, so there is nothing to be equal to
                if expected is not None:
                    given = computed(output)
                    assert ((expected == given) | (expected.isnan() & given.isnan())).all(), damage
                identical += 1
                shutil.rmtree(output)
            assert [path.name for path in tmp_path.iterdir()] == ["base"], damage
    assert refused > 5
    assert identical > 0


@pytest.mark.parametrize("part", range(2))
def test_the_command_answers_damage_with_one_line(bases, tmp_path, command, part, all_of_it):
    seeds = range(1000, 1040)
    for seed in (seeds if all_of_it else telling(seeds))[part::2]:
        damage = damaged(bases, seed, tmp_path / "base")
        arguments = (
            "--base",
            tmp_path / "base",
            "--method",
            "midus-hml",
            "--output",
            tmp_path / "out",
            "--set",
            "n=4",
        )
        with within(SECONDS):
            outcome = command(*arguments, "--num-new-layers", 1)
        assert outcome.status in (0, 2), (damage, outcome)
        if outcome.status == 2:
            assert (outcome.out, outcome.err.count("\n")) == ("", 1), (damage, outcome)
            assert not (tmp_path / "out").exists()
        else:
            shutil.rmtree(tmp_path / "out")

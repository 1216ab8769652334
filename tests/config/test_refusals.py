"""A subject is put before refusals of ours, and not before errors of Python and libraries."""

import json
from dataclasses import dataclass

import pytest

from midus_hf.config.options import read_options
from midus_hf.config.refusals import is_refusal, refusals_about


@dataclass
class Options:
    a: int = 0


def test_a_subject_is_put_before_a_refusal_alone():
    with pytest.raises(ValueError, match=r"^variants\.a: keys has no option") as refused, refusals_about("variants.a"):
        read_options(Options, {"b": 1}, "keys")
    assert is_refusal(refused.value)
    with pytest.raises(json.JSONDecodeError, match=r"^Expecting value") as failed, refusals_about("variants.a"):
        json.loads("no")
    assert not is_refusal(failed.value)

"""The class of a refused request: a subject before its message, and errors of libraries that it replaces."""

import json
from dataclasses import dataclass

import pytest

from midus_hf import RequestError
from midus_hf.config.errors import as_request_error, name_in_request_errors
from midus_hf.config.options import read_options
from midus_hf.sources.tokenizers import check_ids, load_tokenizer


@dataclass
class Options:
    a: int = 0


def test_subject_stands_only_before_request_errors():
    with pytest.raises(RequestError, match=r"^variants\.a: keys has no option"), name_in_request_errors("variants.a"):
        read_options(Options, {"b": 1}, "keys")
    with pytest.raises(json.JSONDecodeError, match=r"^Expecting value"), name_in_request_errors("variants.a"):
        json.loads("no")


def test_library_error_becomes_a_request_error_with_a_prefix():
    with pytest.raises(RequestError, match=r"^there is none: [^\n]+$"), as_request_error("there is none", OSError):
        load_tokenizer("absent/model")
    with pytest.raises(RequestError, match=r"^no: first$"), as_request_error("no", KeyError, OSError):
        raise OSError("first\nsecond")
    first = {"reason": lambda error: error.args[0]}
    with pytest.raises(RequestError, match=r"^no: a b$"), as_request_error("no", KeyError, **first):
        raise KeyError("a b")
    with pytest.raises(RequestError, match=r"^the tokenizer yields id 3"), as_request_error("no", ValueError):
        check_ids(3, 2)  # a RequestError itself
    with pytest.raises(RuntimeError, match=r"^other$"), as_request_error("no", OSError):
        raise RuntimeError("other")

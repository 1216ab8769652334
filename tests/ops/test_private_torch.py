"""A torch that lacks what this package uses of its private functions computes the same, more slowly."""

import ast
import re
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

import midus_hf
from midus_hf.ops import headwise_memory, product_key_topk
from midus_hf.ops.dispatch import private_torch
from midus_hf.ops.dispatch.private_torch import can_skip_dispatcher

PACKAGES = Path(midus_hf.__file__).parent.parent


def test_one_file_alone_names_private_functions_of_torch():
    """A private name begins with one underscore."""
    results = set()
    for package in ("midus_hf", "upscalers"):
        for path in (PACKAGES / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
                name = node.module or "" if isinstance(node, ast.ImportFrom) and not node.level else name
                if re.fullmatch(r"torch(\.\w+)*\._[a-z]\w*(\.\w+)*", name, flags=re.IGNORECASE):
                    results.add(path.relative_to(PACKAGES).as_posix())
    assert results == {"midus_hf/ops/dispatch/private_torch.py"}


def test_without_probes_registered_ops_are_always_called(monkeypatch):
    with torch.no_grad():
        assert can_skip_dispatcher()
        monkeypatch.setattr(private_torch, "_KNOWS_WATCHERS", False)
        assert not can_skip_dispatcher()
        tensors = [torch.randn(shape) for shape in ((3, 2, 8), (2, 6, 4), (2, 6, 4), (36, 5))]
        called = headwise_memory(*tensors, None, 3)
        scores, _ = product_key_topk(*tensors[:3], 3)
    monkeypatch.undo()
    with torch.no_grad():
        assert torch.equal(called, headwise_memory(*tensors, None, 3))
        assert torch.equal(scores, product_key_topk(*tensors[:3], 3)[0])


def test_a_backward_pass_is_known_while_a_part_is_repeated(monkeypatch):
    seen = []

    def part(tensor):
        seen.append(private_torch.is_in_backward())
        return tensor * 2

    checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True] or seen == [False]  # a part whose gradient needs nothing of it may not be repeated
    monkeypatch.setattr(private_torch, "_graph_task", None)
    assert not private_torch.is_in_backward()


def test_addresses_are_left_alone_where_they_cannot_be_kept(monkeypatch):
    monkeypatch.setattr(private_torch, "_static", None)
    private_torch.keep_address(torch.zeros(1))

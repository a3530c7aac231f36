"""No room but `asyncrl/device/` names a kind of accelerator."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

ALLOWED = (
    "asyncrl/device/",
    "asyncrl/learner/backends/megatron/",  # Megatron-core itself runs on CUDA alone
)


def names_of_kinds(tree: ast.AST) -> Iterator[int]:
    """Lines with torch.cuda, tensor.is_cuda or a string such as "cuda:0"."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="cuda" | "is_cuda" | "xpu" | "npu"):
                yield node.lineno
            case ast.Constant(value=str(text)) if text.partition(":")[0] in ("cuda", "xpu", "npu"):
                yield node.lineno


@pytest.mark.parametrize("source", ["torch.cuda.synchronize()", 'device = "cuda:1"', "x.is_cuda"])
def test_the_rule_finds_a_kind(source: str) -> None:
    assert list(names_of_kinds(ast.parse(source))) == [1]


def test_only_the_room_of_devices_names_a_kind() -> None:
    files = {str(path.relative_to(ROOT)): path for path in (ROOT / "asyncrl").rglob("*.py")}
    found = [
        f"{name}:{line}"
        for name, path in files.items()
        if not name.startswith(ALLOWED)
        for line in names_of_kinds(ast.parse(path.read_text()))
    ]
    assert len(files) > 300
    assert found == []

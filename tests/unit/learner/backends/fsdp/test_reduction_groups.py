"""FSDP's groups of parameters, in the forms that torch has had."""

from __future__ import annotations

from types import SimpleNamespace

from asyncrl.learner.backends.fsdp.reduction import groups_in


def test_groups_are_found_where_torch_2_13_and_2_11_have_them() -> None:
    assert groups_in(SimpleNamespace(_fsdp_param_groups=["a", "b"])) == ["a", "b"]
    assert groups_in(SimpleNamespace(_fsdp_param_group="a")) == ["a"]
    assert groups_in(SimpleNamespace(_fsdp_param_group=None)) == []

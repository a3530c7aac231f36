from __future__ import annotations

import asyncio
import threading
from typing import Any, Literal

import pytest

from asyncrl.errors import ConfigError
from asyncrl.generator.agents.tool_formats import ToolCall
from asyncrl.generator.agents.tools import Tool, Toolbox, ToolError


def shop(
    item: str,
    count: int = 1,
    sizes: list[float] | None = None,
    how: Literal["fast", "cheap"] = "cheap",
    notes: dict[str, str] | None = None,
    gift: bool = False,
) -> dict[str, Any]:
    """Buy something.

    Args:
        item: what
        count: how many
        sizes: of each
        how: to send it
        notes: for whom
        gift: whether it is one
    """
    return {"item": item, "count": count, "how": how}


async def later(n: int) -> int:
    """One more.

    Args:
        n: a number
    """
    await asyncio.sleep(0)
    return n + 1


def fails() -> str:
    """Always fails."""
    raise KeyError("nothing there")


def test_signature_and_docstring_make_the_schema() -> None:
    function = Tool.of(shop).schema["function"]
    assert (function["name"], function["description"]) == ("shop", "Buy something.")
    assert function["parameters"]["required"] == ["item"]
    assert function["parameters"]["properties"]["how"] == {
        "type": "string",
        "enum": ["fast", "cheap"],
        "description": "to send it",
    }


async def test_results_are_text_or_json() -> None:
    box = Toolbox([shop, later])
    assert await box.call(ToolCall("later", {"n": 2})) == "3"
    made = await box.call(ToolCall("shop", {"item": "tea", "sizes": [1, 2.5], "notes": {"a": "b"}}))
    assert made == '{"item": "tea", "count": 1, "how": "cheap"}'
    assert await box.call(ToolCall("shop", {"item": "tea", "sizes": None}))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "The arguments: 'item' is a required property."),
        ({"item": 3}, "item: 3 is not of type 'string'."),
        ({"item": "tea", "count": True}, "count: True is not of type 'integer'."),
        ({"item": "tea", "count": 1.5}, "count: 1.5 is not of type 'integer'."),
        ({"item": "tea", "count": 1.0}, "count: 1.0 is not of type 'integer'."),
        ({"item": "tea", "count": None}, "count: None is not of type 'integer'."),
        ({"item": "tea", "gift": 1}, "gift: 1 is not of type 'boolean'."),
        ({"item": "tea", "how": "slow"}, "how: 'slow' is not one of ['fast', 'cheap']."),
        ({"item": "tea", "sizes": [1, "2"]}, "sizes[1]: '2' is not of type 'number'."),
        ({"item": "tea", "notes": {"a": 1}}, "notes.a: 1 is not of type 'string'."),
        (
            {"item": "tea", "price": 1},
            "The arguments: Additional properties are not allowed ('price' was unexpected).",
        ),
    ],
)
async def test_arguments_that_do_not_fit_are_told_to_the_model(
    arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ToolError) as caught:
        await Toolbox([shop]).call(ToolCall("shop", arguments))
    assert str(caught.value).startswith(problem)
    assert '"properties"' in str(caught.value)


async def test_arguments_that_are_too_deep_are_told_to_the_model() -> None:
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(ToolError, match="The arguments of shop are nested too deeply"):
        await Toolbox([shop]).call(ToolCall("shop", {"item": deep}))


async def test_failures_are_told_to_the_model() -> None:
    box = Toolbox([fails])
    with pytest.raises(ToolError, match="fails raised KeyError: 'nothing there'"):
        await box.call(ToolCall("fails"))
    with pytest.raises(ToolError, match=r"There is no tool 'fail'\. There are: fails\."):
        await box.call(ToolCall("fail"))


async def test_a_tool_that_hangs_is_late_and_holds_up_no_other() -> None:
    forever = threading.Event()

    def hang() -> None:
        """Never ends."""
        forever.wait()

    async def sleep() -> None:
        """Never ends either."""
        await asyncio.Event().wait()

    box = Toolbox([hang, sleep], deadline_s=0.01, workers=1)
    for name in ("hang", "sleep", "hang"):
        with pytest.raises(ToolError, match=f"{name} took longer than 0.01 s") as caught:
            await box.call(ToolCall(name))
        assert caught.value.late
    forever.set()


async def test_long_answers_are_cut() -> None:
    def long() -> str:
        """Many letters."""
        return "x" * 30

    assert await Toolbox([long], most_chars=10).call(ToolCall("long")) == "xxxxxxxxxx\n[20 more characters]"


def test_functions_that_say_too_little_are_refused() -> None:
    def untold(a: int) -> int:
        """No word on a."""
        return a

    def untyped(a) -> int:  # type: ignore[no-untyped-def]
        """Some.

        Args:
            a: a number
        """
        return 1

    for function in (untold, untyped):
        with pytest.raises(
            ConfigError, match=r"^agent.tools = 'un.*Remedy: give each argument a type and a line"
        ):
            Tool.of(function)
    with pytest.raises(ConfigError, match="two tools have the same name"):
        Toolbox([fails, fails])

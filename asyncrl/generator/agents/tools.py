"""Tools: typed Python functions that a model may call.

    def multiply(a: int, b: int) -> int:
        \"\"\"Multiply two numbers.

        Args:
            a: the first
            b: the second
        \"\"\"
        return a * b

The signature and the docstring (Google style) become the JSON schema that the chat template shows to the model; what
the model writes is checked against it. Plain functions run in threads, async ones on the event loop. Whatever goes
wrong is said to the model as text: an unknown tool, bad arguments, an exception, a call past its deadline.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from asyncrl.config.functions.function_spec import load_function
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.tool_formats import ToolCall
from asyncrl.generator.threads import in_thread

Schema = Mapping[str, Any]

KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """A call that gave no result; the text is for the model. late: it was past its deadline."""

    def __init__(self, problem: str, late: bool = False) -> None:
        super().__init__(problem)
        self.late = late


@dataclass(frozen=True, slots=True)
class Tool:
    """schema: as chat templates take it, {"type": "function", "function": {"name", "description", "parameters"}}."""

    name: str
    schema: Schema
    function: Callable[..., Any]

    @staticmethod
    def of(function: Callable[..., Any], key: str = "agent.tools") -> Tool:
        """Raises ConfigError under `key` for a function without type hints or without a word on each argument."""
        schema = _schema(inspect.unwrap(getattr(function, "__func__", function)), key)
        return Tool(schema["function"]["name"], schema, function)

    async def call(self, arguments: Mapping[str, Any], deadline_s: float) -> str:
        """What the function returns: a text as it is, anything else as JSON. Raises ToolError."""
        parameters = self.schema["function"]["parameters"]
        if wrong := next(_problems(arguments, parameters, "The arguments"), None):
            raise ToolError(f"{wrong} {self.name} takes {json.dumps(parameters)}.")
        try:
            async with asyncio.timeout(deadline_s):
                if inspect.iscoroutinefunction(self.function):
                    value = await self.function(**arguments)
                else:
                    value = await in_thread(self.function, **arguments)
        except TimeoutError:
            raise ToolError(f"{self.name} took longer than {deadline_s:g} s.", late=True) from None
        except Exception as error:
            raise ToolError(f"{self.name} raised {type(error).__name__}: {error}") from error
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


class Toolbox:
    """Tools by name, at most `workers` calls at a time over all rollouts, answers cut at `most_chars`."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        deadline_s: float = 10.0,
        workers: int = 16,
        most_chars: int = 8192,
    ) -> None:
        self.tools = {tool.name: tool for tool in map(Tool.of, functions)}
        if len(self.tools) < len(functions):
            names = [function.__name__ for function in functions]
            raise ConfigError("agent.tools", names, "two tools have the same name", "rename one of them")
        self._deadline_s, self._most_chars = deadline_s, most_chars
        self._free = asyncio.Semaphore(workers)

    @property
    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self.tools.values()]

    async def call(self, call: ToolCall) -> str:
        """Raises ToolError, with a text for the model."""
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError(f"There is no tool {call.name!r}. There are: {', '.join(self.tools) or 'none'}.")
        async with self._free:
            text = await tool.call(call.arguments, self._deadline_s)
        left = len(text) - self._most_chars
        return text if left <= 0 else f"{text[: self._most_chars]}\n[{left} more characters]"


def load_tools(specs: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions that `agent.tools` names. Raises ConfigError."""
    return [load_function(spec, "agent.tools") for spec in specs]


@functools.cache
def _schema(function: Callable[..., Any], key: str) -> Schema:
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            key,
            getattr(function, "__name__", function),
            str(error),
            "give each argument a type and a line under 'Args:' in the docstring",
        ) from error
    described = schema["function"]
    named = {name: described[name] for name in ("name", "description", "parameters")}
    return {"type": "function", "function": named}


def _problems(value: Any, schema: Schema, where: str) -> Iterator[str]:
    """What is wrong with `value`, as sentences. Of JSON Schema: what type hints can say."""
    if "anyOf" in schema:
        if all(next(_problems(value, one, where), None) for one in schema["anyOf"]):
            yield f"{where} are of none of the kinds that are allowed."
        return
    if value is None and schema.get("nullable"):
        return
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{where} must be {' or '.join(kinds)}, not {json.dumps(value, default=str)[:80]}."
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{where} must be one of {json.dumps(schema['enum'])}."
    elif isinstance(value, dict):
        yield from _problems_of_object(value, schema, where)
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for at, item in enumerate(value):
            yield from _problems(item, schema["items"], f"{where}[{at}]")


def _problems_of_object(value: Mapping[str, Any], schema: Schema, where: str) -> Iterator[str]:
    known, others = schema.get("properties"), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{where} lack {name!r}."
    for name, item in value.items():
        if known is not None and name in known:
            yield from _problems(item, known[name], f"{name!r}")
        elif isinstance(others, Mapping):
            yield from _problems(item, others, f"{where}[{name!r}]")
        elif known is not None:
            yield f"{where} may not hold {name!r}."


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which Python takes for an integer
        return kind == "boolean"
    return isinstance(value, KINDS.get(kind, (object,)))

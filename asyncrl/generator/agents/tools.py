"""Tools: typed Python functions that a model may call.

    def multiply(a: int, b: int) -> int:
        \"\"\"Multiply two numbers.

        Args:
            a: the first
            b: the second
        \"\"\"
        return a * b

The signature and the docstring (Google style) become the JSON schema that the chat template shows to the model, and
against which its arguments are checked. Plain functions run in threads, async ones on the event loop. The model gets
every failure as text: an unknown tool, bad arguments, an exception, a call past its deadline.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend

from asyncrl.config.functions.function_spec import load_function
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.tool_formats import ToolCall
from asyncrl.generator.threads import in_thread
from asyncrl.telemetry import tracing

Schema = Mapping[str, Any]

_INTEGERS = Draft202012Validator.TYPE_CHECKER.redefine(
    "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
)
ArgumentValidator = extend(Draft202012Validator, type_checker=_INTEGERS)
"""JSON Schema takes 1.0 for an integer. A Python function that wants an int does not."""


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
    def of(function: Callable[..., Any]) -> Tool:
        """Raises ConfigError for a function whose arguments lack type hints or descriptions."""
        schema = _schema(inspect.unwrap(getattr(function, "__func__", function)))
        return Tool(schema["function"]["name"], schema, function)

    async def call(self, arguments: Mapping[str, Any], deadline_s: float) -> str:
        """Call the function. Returns a string result as it is, any other as JSON. Raises ToolError."""
        self._check(arguments)
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

    def _check(self, arguments: Mapping[str, Any]) -> None:
        parameters = self.schema["function"]["parameters"]
        validator = ArgumentValidator({**_standard(parameters), "additionalProperties": False})
        try:
            if error := best_match(validator.iter_errors(arguments)):
                where = error.json_path.removeprefix("$").lstrip(".") or "The arguments"
                raise ToolError(f"{where}: {error.message}. {self.name} takes {json.dumps(parameters)}.")
        except RecursionError:
            raise ToolError(f"The arguments of {self.name} are nested too deeply.") from None


class Toolbox:
    """Tools by name, at most `workers` calls at a time over all rollouts, results cut at `most_chars`."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | Tool],
        deadline_s: float = 10.0,
        workers: int = 16,
        most_chars: int = 8192,
    ) -> None:
        tools = [each if isinstance(each, Tool) else Tool.of(each) for each in functions]
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            names = [tool.name for tool in tools]
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
            with tracing.span("tools", call.name, tracing.RESOLUTION_S):
                return self.cut(await tool.call(call.arguments, self._deadline_s))

    def cut(self, text: str) -> str:
        left = len(text) - self._most_chars
        return text if left <= 0 else f"{text[: self._most_chars]}\n[{left} more characters]"


def load_tools(specs: Sequence[str]) -> list[Callable[..., Any]]:
    """The functions that `agent.tools` names. Raises ConfigError."""
    return [load_function(spec, "agent.tools") for spec in specs]


@functools.cache
def _schema(function: Callable[..., Any]) -> Schema:
    from transformers.utils import get_json_schema  # takes a second
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ConfigError(
            "agent.tools",
            getattr(function, "__name__", function),
            str(error),
            "give each argument a type and a line under 'Args:' in the docstring",
        ) from error
    described = schema["function"]
    named = {name: described[name] for name in ("name", "description", "parameters")}
    return {"type": "function", "function": named}


def _standard(schema: Any) -> Any:
    """`get_json_schema` marks what may be None with OpenAPI's "nullable", which JSON Schema does not have."""
    if isinstance(schema, list):
        return [_standard(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    standard = {key: _standard(part) for key, part in schema.items() if key != "nullable" or part is not True}
    return {"anyOf": [standard, {"type": "null"}]} if schema.get("nullable") is True else standard

"""Which sandbox: `auto`, one of asyncrl's by name, or a class of the user."""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.rules import require
from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox.containers import Bubblewrap, Namespaces
from asyncrl.rewards.sandbox.sandbox import Limits, Sandbox, sandbox_problem

KINDS: dict[str, Callable[[Limits], Sandbox]] = {"bubblewrap": Bubblewrap, "namespaces": Namespaces}
AUTO = "auto"
REMEDY = (
    "permit user namespaces (in Docker: --security-opt seccomp=unconfined; on Ubuntu: sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0; after 'No space left on device', which is no full disk here: "
    "a higher sysctl user.max_user_namespaces), or name a sandbox of your own, sandbox=file.py:Class"
)

log = logging.getLogger(__name__)


def sandbox_named(name: str, limits: Limits) -> Sandbox:
    """A sandbox that has run harmless programs here. auto: bubblewrap where it works, else namespaces.

    Raises ConfigError under `sandbox` with the reasons, if there is none.
    """
    if name not in KINDS and name != AUTO:
        rule = f"is none of {AUTO}, {', '.join(KINDS)}, and names no class"
        require(":" in name, "sandbox", name, rule, f"set sandbox={AUTO}, or file.py:Class")
        found: Sandbox = load_function(name, "sandbox")(limits)
        _require(name, sandbox_problem(found))
        return found
    problems = []
    for kind in KINDS if name == AUTO else [name]:
        sandbox = KINDS[kind](limits)
        problem = sandbox_problem(sandbox)
        if problem is None:
            log.info("programs run in the sandbox %s", kind)
            return sandbox
        problems.append(f"{kind}: {problem}" if name == AUTO else problem)
    raise _error(name, "; ".join(problems))


def _require(name: str, problem: str | None) -> None:
    if problem is not None:
        raise _error(name, problem)


def _error(name: str, problem: str) -> ConfigError:
    return ConfigError("sandbox", name, f"is not to be had on this machine: {problem}", REMEDY)

"""Runs programs of strangers, on Linux: with bubblewrap, with namespaces of its own, or in a class of the user.

             in all of them (`tests/contract/rewards/` tries it)
network      none, and no sockets
files        Python, its packages and system libraries, read-only; an empty folder of its own in memory; else nothing
devices      null, zero and urandom
processes    its own alone
rights       none; a process that root starts belongs to nobody
tests        run in another process; the program cannot read or change them, or their results
limits       CPU, memory, processes, files, output, time; all that it started is killed at the end
"""

from asyncrl.rewards.sandbox.choice import sandbox_named
from asyncrl.rewards.sandbox.sandbox import Limits, ProgramRun, Sandbox, SandboxError, Tests, TestsError

__all__ = ["Limits", "ProgramRun", "Sandbox", "SandboxError", "Tests", "TestsError", "sandbox_named"]

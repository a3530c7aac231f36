"""What runs inside a sandbox. The standard library is all that is installed there, so these files import nothing else.

supervisor.py   process 1: starts programs, measures time, reads output, kills
judge.py        the tests of a program, in process 1; the program runs elsewhere
program.py      the process of the program: calls its functions for the judge
data.py         values that judge and program exchange
jail.py         limits, forbidden system calls, an id without rights
private_root.py namespaces and a root of their own, where bubblewrap did not make them
"""

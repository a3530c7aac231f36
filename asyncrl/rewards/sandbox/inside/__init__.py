"""The part that runs inside a sandbox. It imports the standard library alone: nothing else is installed there.

supervisor.py   process 1: starts programs, measures time, reads output, kills
judge.py        the tests of a program, in process 1; the program runs elsewhere
names.py        which names in tests are the program's
template.py     starts the program's process again after a test that it did not survive
program.py      the process of the program: calls its functions for the judge
data.py         values that judge and program exchange
frames.py       how they travel in pipes
confinement.py  limits, forbidden system calls, an id without rights
private_root.py namespaces and a root of their own, where bubblewrap did not make them
system.py       system calls that Python does not have
"""

"""Weights over a network of hosts whose cards have a limit: beside what others do, and beside that limit.

The learner's two ranks are on two hosts, each generator rank is on one of four others. All share the processors of this
machine, so fast cards are not filled.
"""

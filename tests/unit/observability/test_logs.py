"""What is told of a process that has ended: its cause first, and nothing twice."""

from __future__ import annotations

from asyncrl.observability.logs import why_it_ended

WARNING = "2026-01-01 00:00:{0:02d},1 WARNING w: g drops task {0} of stream train: raised KeyError: 'a{0}b' (x.py:3)"

FIRST_TIME = """\
2026-01-01 00:00:01,1 WARNING c: x.py:reward at task 0, for the first time:
Traceback (most recent call last):
  File "/x.py", line 3, in reward
    return task.data["a"]
           ~~~~~~~~~^^^^^
KeyError: 'a'
"""

SAID = "asyncrl generator: RewardFailedError: reward.function = 'x.py:reward' failed at each of the first 32 tasks"


def test_the_cause_comes_first_then_one_traceback_and_no_repeats() -> None:
    drops = "\n".join(map(WARNING.format, range(24)))
    cause, lines = why_it_ended(f"{FIRST_TIME}{drops}\n{FIRST_TIME}{SAID}\n", 25)
    assert cause.startswith("RewardFailedError: reward.function = 'x.py:reward' failed")
    assert lines[:5] == FIRST_TIME.splitlines()[1:]
    assert lines[5:] == [
        f"{WARNING.format(23)} (24 such lines)",
        f"{FIRST_TIME.splitlines()[0]} (2 such lines)",
    ]


def test_a_bug_is_told_by_its_last_traceback() -> None:
    chained = (
        FIRST_TIME
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + (
            'Traceback (most recent call last):\n  File "/y.py", line 1, in f\n    g()\nWireError: bad bytes\n'
        )
    )
    cause, lines = why_it_ended(chained, 25)
    assert cause == "WireError: bad bytes"
    assert lines[0] == "Traceback (most recent call last):"
    assert sum("Traceback" in line for line in lines) == 1
    assert "KeyError: 'a'" not in lines


def test_a_rank_is_told_by_what_it_said_not_by_torchrun() -> None:
    log = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File \"/l.py\", line 1, in f\n"
        "[rank1]: ValueError: of the rank\n"
        "E0101 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1)\n"
        'Traceback (most recent call last):\n  File "/run.py", line 1, in main\n'
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    )  # fmt: skip
    cause, lines = why_it_ended(log, 25)
    assert cause == "ValueError: of the rank"
    assert not any("ChildFailedError" in line for line in lines)


def test_a_bug_of_a_rank_is_told_by_the_rank_that_ended_first() -> None:
    log = (
        '[rank1]: Traceback (most recent call last):\n[rank1]:   File "/l.py", line 1, in f\n'
        "Traceback (most recent call last):\n"
        "[rank1]: ValueError: of the rank\n"
        '  File "/torch.py", line 1, in g\nRuntimeError: Connection closed by peer\n'
        "2026-01-01 00:00:00,1 ERROR asyncrl.launch.ranks: rank 1 ended first (exit code 1); the others end with it\n"
    )
    cause, lines = why_it_ended(log, 25)
    assert cause == "ValueError: of the rank"
    assert lines == ["Traceback (most recent call last):", '  File "/l.py", line 1, in f', cause]
    of_rank_0, _ = why_it_ended(log.replace("rank 1 ended first", "rank 0 ended first"), 25)
    assert of_rank_0 == "RuntimeError: Connection closed by peer"


def test_a_log_without_a_cause_has_its_last_lines() -> None:
    assert why_it_ended("\n".join(f"line {letter}" for letter in "abcd"), 2) == ("", ["line c", "line d"])
    assert why_it_ended("", 25) == ("", [])


def test_a_note_of_the_launcher_explains_an_end_only_where_nothing_else_does() -> None:
    note = "asyncrl train: learner-node-1 ended (killed by SIGTERM)\n"
    assert why_it_ended(note, 25)[0] == "learner-node-1 ended (killed by SIGTERM)"
    assert (
        why_it_ended("asyncrl learner: NoGroups: no group came\n" + note, 25)[0] == "NoGroups: no group came"
    )
    assert why_it_ended("asyncrl rank: RankLostError: gone\n" + note, 25)[0] == "RankLostError: gone"
    broken = "Traceback (most recent call last):\n  File\nValueError: no\n"
    assert why_it_ended(broken + note, 25)[0] == "ValueError: no"
    assert why_it_ended(f"asyncrl learner: NoGroups: none\n{note}{broken}", 25)[0] == "ValueError: no"
    assert why_it_ended(f"{broken}{note}loading the model\n{note}", 25) == (
        note[15:-1],
        ["loading the model"],
    )


def test_a_message_of_an_earlier_start_does_not_explain_the_end_of_a_later_one() -> None:
    earlier = "asyncrl learner: PoolLostError: the critic died\nasyncrl train: learner ended (exit code 11)\n"
    later = "asyncrl train: the process is lost: its node or its actor is lost\n"
    assert why_it_ended(f"{earlier}loading the model\n{later}", 25)[0].endswith(
        "its node or its actor is lost"
    )

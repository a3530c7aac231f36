"""Every rule fires on a run with its flaw, names a key that exists, and is silent on a healthy one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.keys_page import markdown
from asyncrl.observability.doctor.facts import (
    RECENT,
    SEVERITIES,
    WINDOW_S,
    Finding,
    RunFacts,
    ended,
    trend,
)
from asyncrl.observability.doctor.limits import LIMITS
from asyncrl.observability.doctor.rules import RULES, DoctorRule, findings
from asyncrl.observability.doctor.speed import who_waits
from asyncrl.observability.rows import Row
from asyncrl.observability.timeline import Lane, ProcessTrace, Span, Timeline

T = 1_795_000_000.0
VERSIONS = 40
NOW = T + VERSIONS
CONFIG = {
    "batch": {"groups": 64, "group_size": 8},
    "generator": {"count": 2, "max_tokens": 256},
    "learner": {"optimizer": {"lr": 3e-6}, "micro_batch_tokens": 16384},
    "queue": {"max_staleness": 4},
    "reward": {"weights": {}, "workers": 4, "deadline_s": 60.0},
    "checkpoint": {"every": 50},
}

Of = float | None | Callable[[int], float | None]


def rows(count: int = VERSIONS, **columns: Of) -> list[Row]:
    """Of a healthy run, but for some columns, of which a value may depend on the version. `__` stands for a slash."""
    healthy: dict[str, Of] = {
        "perf__step_s": 1.0,
        "perf__wait_fraction__groups": 0.05,
        "perf__busy__learner": 0.94,
        "perf__busy__generator": 0.9,
        "rollout__reward__mean": lambda v: 0.3 + 0.01 * v + 0.01 * (v % 3),
        "rollout__reward__max": 1.0,
        "rollout__reward__min": 0.0,
        "rollout__flat_group_fraction": 0.3,
        "rollout__length__mean": lambda v: 100.0 + v % 5,
        "rollout__length__truncated": 0.01,
        "train__effective_sample_size": 0.97,
        "train__staleness__mean": 1.0,
        "train__staleness__in_queue": 0.5,
        "train__approx_kl": lambda v: 0.002 + 0.001 * (v % 2),
        "train__clip_fraction": 0.02,
        "train__entropy": 0.6,
        "train__loss": 0.1,
        "train__grad_norm": 0.5,
        "train__rollouts": 512,
        "train__logprob_gap__probe__mean": 1e-6,
        "queue__trained": lambda v: 64 * v,
        "queue__dropped__filtered": 3,
    }
    of = {name.replace("__", "/"): value for name, value in {**healthy, **columns}.items()}
    return [
        {"version": v, "time": T + v}
        | {key: value(v) if callable(value) else value for key, value in of.items()}
        for v in range(1, count + 1)
    ]


def evaluations(*scores: float, **more: float) -> list[Row]:
    step = VERSIONS // max(1, len(scores) - 1)
    columns = {name.replace("__", "/"): value for name, value in more.items()}
    return [{"version": at * step, "eval/accuracy": score, **columns} for at, score in enumerate(scores)]


def traces(folder: Path, **processes: Sequence[Row]) -> dict[str, ProcessTrace]:
    """Read back from rows that begin with the role of each process. `_` in a name stands for a dash."""
    (folder / "trace").mkdir()
    for name, lines in processes.items():
        name = name.replace("_", "-")
        path, role = folder / "trace" / f"{name}.jsonl", name.partition("-")[0]
        head = {"t": T, "process": name, "role": role, "host": "a", "pid": 1}
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)))
    timeline = Timeline(folder)
    timeline.read()
    return timeline.processes


def spans(lane: str, name: str, every: float, took: float, until: float = VERSIONS) -> list[Row]:
    count = int(until / every)
    return [
        {"t": T + every * at, "took": min(took, every * at), "lane": lane, "do": name}
        for at in range(1, count + 1)
    ]


def generator(every: float = 0.5, took: float = 0.4, score: float = 0.01) -> list[Row]:
    return [
        *spans("rollouts", "generate", every, took),
        *spans("rewards", "score", every, score),
        {"t": NOW},
    ]


def loop(lane: str, wait: str, lasted: float = 0.0) -> list[Row]:
    """A lane of short waits, then, for some seconds, a long one that ends when the run does."""
    found = []
    for at in range(10, 110):
        start = T + (VERSIONS - lasted) * at / 110
        found += [{"t": start, "lane": lane, "do": wait}, {"t": start + 0.05, "lane": lane, "do": "compute"}]
    if lasted:
        found += [{"t": NOW - lasted, "lane": lane, "do": wait}]
    return [*found, {"t": NOW}]


def events(*named: dict[str, Any]) -> list[Row]:
    return [{"t": T + 20, **event} for event in named] + [{"t": NOW}]


def facts(folder: Path, processes: dict[str, Sequence[Row]] | None = None, **of: Any) -> RunFacts:
    given_rows = {"rows": rows(), "evaluations": evaluations(0.3, 0.4, 0.5, 0.6)}
    known: dict[str, Sequence[Row]] = {
        "queue": events(),
        "learner": loop("learner", "wait/groups"),
        "generator_0": generator(),
        "generator_1": generator(),
        **(processes or {}),
    }
    made = traces(folder, **known)
    return RunFacts(**{"config": CONFIG, "now": NOW, "processes": made, **given_rows, **of})


def changed(**keys: Any) -> dict[str, Any]:
    """CONFIG with other sections."""
    return {**CONFIG, **{name: {**CONFIG.get(name, {}), **section} for name, section in keys.items()}}


IDLE = {"perf__wait_fraction__groups": 0.5, "perf__busy__learner": 0.5, "perf__busy__generator": 0.4}
AGED = [
    {"version": 10, "versions": [9 - old], "tokens": 300 if old > 1 else 100}
    for old in (0, 3)
    for _ in range(30)
]

CASES: dict[str, tuple[str, str, Callable[[Path], RunFacts]]] = {
    # what is wrong: the rule, the key that it names, the facts
    "generators": (
        "bottleneck",
        "generator.count",
        lambda at: facts(at, rows=rows(perf__wait_fraction__groups=0.5, perf__busy__generator=0.97)),
    ),
    "learner": ("bottleneck", "generator.count", lambda at: facts(at, rows=rows(perf__busy__generator=0.2))),
    "rewards": (
        "bottleneck",
        "reward.workers",
        lambda at: facts(at, {f"generator_{k}": generator(score=0.35) for k in range(2)}, rows=rows(**IDLE)),
    ),
    "environments": (
        "bottleneck",
        "agent.environment_processes",
        lambda at: facts(
            at,
            {
                "generator_0": [
                    *generator(),
                    *spans("turns", "turn", 1, 0.1),
                    *spans("environments", "step", 1, 0.8),
                ]
            },
            rows=rows(**IDLE),
        ),
    ),
    "weights": (
        "bottleneck",
        "sync.delta",
        lambda at: facts(at, rows=rows(**IDLE, perf__generator__time__wait__weights=0.4)),
    ),
    "depth": (
        "bottleneck",
        "queue.depth",
        lambda at: facts(at, rows=rows(**IDLE), config=changed(queue={"depth": 64})),
    ),
    "depth just below the bound": (
        "bottleneck",
        "queue.depth",
        lambda at: facts(at, rows=rows(**IDLE), config=changed(queue={"depth": 319})),
    ),
    "depth of the bound": (
        "bottleneck",
        "queue.max_staleness",
        lambda at: facts(at, rows=rows(**IDLE), config=changed(queue={"depth": 320})),
    ),
    "a learner behind one generator": (
        "bottleneck",
        "learner.micro_batch_tokens",
        lambda at: facts(at, rows=rows(perf__busy__generator=0.2), config=changed(generator={"count": 1})),
    ),
    "bound": ("bottleneck", "queue.max_staleness", lambda at: facts(at, rows=rows(**IDLE))),
    "pool": ("bottleneck", "placement", lambda at: facts(at, rows=rows(**IDLE, queue__lacking_columns=30))),
    "slow generator": (
        "straggler",
        "queue.hedge_s",
        lambda at: facts(at, {"generator_1": generator(every=3.0, took=2.9)}),
    ),
    "silent": (
        "silent",
        "",
        lambda at: facts(at, {"generator_1": [{"t": T + 1}]}),
    ),
    "silent behind a row that could not be written": (
        "silent",
        "",
        lambda at: facts(at, {"generator_1": [{"t": T + 1, "event": "unwritable", "why": "TypeError"}]}),
    ),
    "stall": ("stall", "", lambda at: facts(at, {"learner": loop("learner", "wait/groups", lasted=15.0)})),
    "stale": (
        "stale data",
        "queue.max_staleness",
        lambda at: facts(at, rows=rows(train__effective_sample_size=lambda v: 0.3 if 10 <= v < 25 else 0.9)),
    ),
    "far within a version": (
        "stale data",
        "learner.optimizer.lr",
        lambda at: facts(at, rows=rows(train__effective_sample_size=0.3, train__staleness__mean=0.0)),
    ),
    "needlessly old": (
        "stale data",
        "queue.wait_share",
        lambda at: facts(
            at,
            {"learner": [{"t": NOW - 5, "event": "claim", "groups": 64, "ages": {"4": 60, "1": 4}}]},
            rows=rows(
                train__staleness__mean=3.9, train__staleness__in_queue=3.0, perf__wait_fraction__groups=0.0
            ),
        ),
    ),
    "mismatch": (
        "mismatch",
        "",
        lambda at: facts(at, {"learner": events({"event": "logprob_mismatch", "version": 3, "max": 0.5})}),
    ),
    "near mismatch": (
        "mismatch",
        "model.head_dtype",
        lambda at: facts(
            at, rows=rows(train__logprob_gap__train__mean=0.06), config=changed(model={"dtype": "bfloat16"})
        ),
    ),
    "near mismatch in float32": (
        "mismatch",
        "",
        lambda at: facts(at, rows=rows(train__logprob_gap__train__mean=0.0006)),
    ),
    "kl": (
        "divergence",
        "learner.optimizer.lr",
        lambda at: facts(at, rows=rows(train__approx_kl=lambda v: 0.5 if 20 < v < 27 else 0.01)),
    ),
    "length bias": ("length bias", "queue.window", lambda at: facts(at, rollouts=AGED)),
    "hopeless": (
        "nothing to learn",
        "batch.group_size",
        lambda at: facts(at, rows=rows(rollout__flat_group_fraction=0.95, rollout__reward__mean=0.01)),
    ),
    "solved": (
        "nothing to learn",
        "",
        lambda at: facts(at, rows=rows(rollout__flat_group_fraction=0.95, rollout__reward__mean=0.99)),
    ),
    "collapse": (
        "collapse",
        "algorithm.entropy_bonus",
        lambda at: facts(at, rows=rows(train__entropy=lambda v: 0.6 if v < 20 else 0.001)),
    ),
    "reward falls": (
        "reward falls",
        "learner.optimizer.lr",
        lambda at: facts(at, rows=rows(rollout__reward__mean=lambda v: 0.3 + 0.02 * min(v, 40 - v))),
    ),
    "hacked": (
        "hacked reward",
        "reward.weights.tidy",
        lambda at: facts(
            at,
            evaluations=evaluations(0.5, 0.6, 0.3, 0.1),
            rows=rows(
                rollout__reward__mean=lambda v: 0.3 + 0.02 * v,
                rollout__reward__part__tidy=lambda v: 0.02 * v,
                rollout__reward__part__right=0.3,
            ),
        ),
    ),
    "hacked, by the weights of its parts": (
        "hacked reward",
        "reward.weights.right",
        lambda at: facts(
            at,
            evaluations=evaluations(0.5, 0.6, 0.3, 0.1),
            config=changed(reward={"weights": {"tidy": 0.1}}),
            rows=rows(
                rollout__reward__part__tidy=lambda v: 0.02 * v,
                rollout__reward__part__right=lambda v: 0.01 * v,
            ),
        ),
    ),
    "hacked, of one part": (
        "hacked reward",
        "reward.function",
        lambda at: facts(at, evaluations=evaluations(0.5, 0.6, 0.3, 0.1)),
    ),
    "one part": (
        "one part",
        "reward.weights.tidy",
        lambda at: facts(
            at,
            rows=rows(
                rollout__reward__mean=lambda v: 0.3 + 0.01 * v,
                rollout__reward__part__tidy=lambda v: 0.02 * v,
                rollout__reward__part__right=lambda v: 0.4 - 0.01 * v,
            ),
        ),
    ),
    "longer for nothing": (
        "lengths",
        "algorithm.shaping.overlong_buffer",
        lambda at: facts(
            at,
            rows=rows(rollout__length__mean=lambda v: 100 + 5 * v),
            evaluations=evaluations(0.5, 0.5, 0.5, 0.5),
        ),
    ),
    "died": (
        "restarts",
        "",
        lambda at: facts(at, {"launcher": events({"event": "ended", "process": "generator-0", "code": 1})}),
    ),
    "dropped": ("drops", "reward.function", lambda at: facts(at, rows=rows(queue__dropped__reward=900))),
    "filtered": ("drops", "", lambda at: facts(at, rows=rows(queue__dropped__filtered=90_000))),
    "refused": (
        "drops",
        "queue.lease_s",
        lambda at: facts(at, {"queue": events({"event": "refused", "reason": "fenced", "count": 400})}),
    ),
    "not finite": (
        "not finite",
        "learner.optimizer.lr",
        lambda at: facts(at, rows=rows(train__grad_norm=lambda v: None if v == 30 else 0.5)),
    ),
}


def stages(*waits: float) -> list[Row]:
    """A learner that waits so long again and again, with a second of work between."""
    found, at = [], T + 2
    for wait in waits:
        found += [{"t": at, "lane": "learner", "do": "wait/groups"}]
        found += [{"t": at + wait, "lane": "learner", "do": "compute"}]
        at += wait + 1
    return found


def claims(at: float, **ages: int) -> Row:
    """A claim with so many groups of an age, e.g. age_4=60."""
    named = {name.removeprefix("age_"): count for name, count in ages.items()}
    return {"t": T + at, "event": "claim", "groups": sum(ages.values()), "ages": named}


QUEUED = {"train__staleness__mean": 3.9, "train__staleness__in_queue": 3.0}
UNUSED = {**QUEUED, "perf__wait_fraction__groups": 0.0}

NEAR_MISSES: dict[str, tuple[str, Callable[[Path], RunFacts]]] = {
    # what is still well: the rule that must be silent, the facts
    "a sample of 60 %": (
        "stale data",
        lambda at: facts(at, rows=rows(train__effective_sample_size=0.6)),
    ),
    "groups far below the bound": (
        "stale data",
        lambda at: facts(at, {"learner": [claims(35, age_1=60, age_4=4)]}, rows=rows(**UNUSED)),
    ),
    "groups that were near it long ago": (
        "stale data",
        lambda at: facts(at, {"learner": [claims(5, age_4=600), claims(35, age_1=64)]}, rows=rows(**UNUSED)),
    ),
    "old groups for which the learner waits": (
        "stale data",
        lambda at: facts(
            at,
            {"learner": [claims(35, age_4=64)]},
            rows=rows(**{**UNUSED, "perf__wait_fraction__groups": 0.2}),
        ),
    ),
    "a KL of four times the first": (
        "divergence",
        lambda at: facts(at, rows=rows(train__approx_kl=lambda v: 0.2 if v > 20 else 0.05)),
    ),
    "old rollouts that are little longer": (
        "length bias",
        lambda at: facts(at, rollouts=[{**row, "tokens": min(row["tokens"], 140)} for row in AGED]),
    ),
    "long rollouts at an age of 1": (
        "length bias",
        lambda at: facts(at, rollouts=[{**row, "versions": [max(row["versions"][0], 8)]} for row in AGED]),
    ),
    "waits of the first version": (
        "bottleneck",
        lambda at: facts(
            at, rows=rows(10, perf__wait_fraction__groups=lambda v: 1.0 if v == 1 else 0.25), now=T + 10
        ),
    ),
    "a generator of less than twice the time": (
        "straggler",
        lambda at: facts(at, {"generator_1": generator(every=1.0, took=0.7)}),
    ),
    "a slow generator among few groups": (
        "straggler",
        lambda at: facts(
            at, {"generator_0": generator(every=3.0), "generator_1": generator(every=4.0, took=3.0)}
        ),
    ),
    "a process that wrote a row as it left": (
        "silent",
        lambda at: facts(
            at,
            {"generator_1": [{"t": T + 23}], "queue": events({"event": "left", "process": "generator-1"})},
        ),
    ),
    "a wait of four times the usual": (
        "stall",
        lambda at: facts(at, {"learner": stages(*[4.0] * 24, 16.0)}, now=T + 145),
    ),
    "a wait of one version": (
        "stall",
        lambda at: facts(
            at, {"learner": stages(*[0.1] * 24, 15.0)}, rows=rows(perf__step_s=12.0), now=T + 45
        ),
    ),
    "a long wait of few": ("stall", lambda at: facts(at, {"learner": stages(*[0.1] * 10, 15.0)}, now=T + 30)),
    "a reward that has lost the little that it gained": (
        "reward falls",
        lambda at: facts(at, rows=rows(rollout__reward__mean=lambda v: 0.9 + 0.002 * min(v, 40 - v))),
    ),
    "a reward that was never above 0": (
        "reward falls",
        lambda at: facts(at, rows=rows(rollout__reward__mean=0.0)),
    ),
    "flat groups where the reward has fallen": (
        "nothing to learn",
        lambda at: facts(
            at,
            rows=rows(
                rollout__flat_group_fraction=0.95,
                rollout__reward__mean=lambda v: 0.3 + 0.02 * min(v, 40 - v),
            ),
        ),
    ),
    "flat groups while the reward rises": (
        "nothing to learn",
        lambda at: facts(at, rows=rows(rollout__flat_group_fraction=0.95)),
    ),
    "an entropy of three tenths of the first": (
        "collapse",
        lambda at: facts(at, rows=rows(train__entropy=lambda v: 0.05 if v < 20 else 0.015)),
    ),
    "no entropy where the tasks are solved": (
        "collapse",
        lambda at: facts(
            at, rows=rows(train__entropy=lambda v: 0.6 if v < 20 else 0.001, rollout__reward__mean=0.99)
        ),
    ),
    "scores that fall where the reward does not rise": (
        "hacked reward",
        lambda at: facts(
            at, evaluations=evaluations(0.5, 0.6, 0.3, 0.1), rows=rows(rollout__reward__mean=0.3)
        ),
    ),
    "a score in the upper half of those that there were": (
        "hacked reward",
        lambda at: facts(at, evaluations=evaluations(0.1, 0.6, 0.5, 0.5)),
    ),
    "longer and better": (
        "lengths",
        lambda at: facts(
            at,
            rows=rows(rollout__length__mean=lambda v: 100 + 5 * v),
            evaluations=evaluations(0.5, 0.5, 0.5, 0.6),
        ),
    ),
    "answers without a score in an earlier evaluation": (
        "limits",
        lambda at: facts(
            at,
            evaluations=[
                {"version": v, "eval/accuracy": 0.5, "eval/unscored": n} for v, n in ((0, 9), (20, 0))
            ],
        ),
    ),
    "a process that ends after the last version": (
        "restarts",
        lambda at: facts(
            at,
            {"launcher": events({"t": NOW + 1, "event": "ended", "process": "generator-0", "code": -15})},
            state="done",
        ),
    ),
    "tasks that were left at the end": ("drops", lambda at: facts(at, rows=rows(queue__dropped__end=900))),
    "few tasks dropped": ("drops", lambda at: facts(at, rows=rows(queue__dropped__reward=30))),
    "few groups refused": (
        "drops",
        lambda at: facts(at, {"queue": events({"event": "refused", "reason": "fenced", "count": 40})}),
    ),
    "a filter that drops two thirds": (
        "drops",
        lambda at: facts(at, rows=rows(queue__dropped__filtered=5000)),
    ),
}

SEVERE: dict[str, tuple[str, str, Callable[[Path], RunFacts]]] = {
    # how bad it is: the rule, the severity, the facts
    "a sample of 30 %": (
        "stale data",
        "warning",
        lambda at: facts(at, rows=rows(train__effective_sample_size=0.3)),
    ),
    "a sample of 10 %": (
        "stale data",
        "wrong",
        lambda at: facts(at, rows=rows(train__effective_sample_size=0.1)),
    ),
    "waits of 35 %": (
        "bottleneck",
        "note",
        lambda at: facts(at, rows=rows(perf__wait_fraction__groups=0.35)),
    ),
    "waits of 50 %": (
        "bottleneck",
        "warning",
        lambda at: facts(at, rows=rows(perf__wait_fraction__groups=0.5)),
    ),
    "a stall of now": (
        "stall",
        "warning",
        lambda at: facts(at, {"learner": stages(*[0.1] * 20, 15.0)}, now=NOW),
    ),
    "a stall of long ago": (
        "stall",
        "note",
        lambda at: facts(
            at,
            {"learner": [*stages(*[0.1] * 20, 15.0), {"t": T + 100}]},
            rows=rows(100),
            now=T + 100,
        ),
    ),
    "a process that came back": (
        "restarts",
        "warning",
        lambda at: facts(at, {"launcher": events({"event": "ended", "process": "generator-0", "code": 1})}),
    ),
    "a process that is left out": (
        "restarts",
        "wrong",
        lambda at: facts(
            at,
            {
                "launcher": events(
                    {"event": "ended", "process": "generator-0", "code": 1},
                    {"event": "left_out", "process": "generator-0"},
                )
            },
        ),
    ),
    "a twentieth dropped": ("drops", "warning", lambda at: facts(at, rows=rows(queue__dropped__reward=150))),
    "a quarter dropped": ("drops", "wrong", lambda at: facts(at, rows=rows(queue__dropped__reward=900))),
}


def of_rule(found: list[Finding], rule: str) -> list[Finding]:
    return [finding for finding in found if finding.rule == rule]


@pytest.mark.parametrize("case", CASES)
def test_a_flaw_is_found_with_its_key(case: str, tmp_path: Path) -> None:
    rule, key, make = CASES[case]
    found = of_rule(findings(make(tmp_path)), rule)
    assert [finding.key for finding in found] == [key]
    (finding,) = found
    assert finding.severity in SEVERITIES
    assert finding.sentence.endswith(".")
    assert finding.evidence
    assert finding.remedy()


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_what_only_comes_near_a_limit_is_no_finding(case: str, tmp_path: Path) -> None:
    rule, make = NEAR_MISSES[case]
    assert of_rule(findings(make(tmp_path)), rule) == []


@pytest.mark.parametrize("case", SEVERE)
def test_a_finding_is_as_severe_as_its_figures(case: str, tmp_path: Path) -> None:
    rule, severity, make = SEVERE[case]
    assert [finding.severity for finding in of_rule(findings(make(tmp_path)), rule)] == [severity]


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.figure)
def test_a_figure_beyond_its_limit_is_found(limit: Any, tmp_path: Path) -> None:
    columns = {limit.figure.replace("/", "__"): 2 * limit.most + 1.0}
    evaluated = limit.figure.startswith("eval/")
    beyond = {"evaluations": evaluations(0.5, 0.5, **columns)} if evaluated else {"rows": rows(**columns)}
    (finding,) = of_rule(findings(facts(tmp_path, **beyond)), "limits")
    assert (finding.key, finding.about) == (limit.change, limit.figure)
    assert "{" not in finding.sentence


def test_a_healthy_run_has_no_findings(tmp_path: Path) -> None:
    assert findings(facts(tmp_path)) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == {rule for rule, _, _ in CASES.values()} | {"limits"}


def test_every_key_that_is_named_exists() -> None:
    keys = {key for _, key, _ in CASES.values()} | {limit.change for limit in LIMITS}
    known = set(re.findall(r"^\| `([\w.]+)` ", markdown(), re.MULTILINE))
    sections = {key.rpartition(".")[0] for key in known} | {"placement"}
    for key in keys - {""}:
        assert key in known or key in sections or key.rpartition(".")[0] in known, key


def test_too_few_versions_make_no_finding(tmp_path: Path) -> None:
    begun = rows(3, **IDLE, train__effective_sample_size=0.01, train__clip_fraction=1.0, train__entropy=0.0)
    assert findings(facts(tmp_path, rows=begun)) == []


def test_a_run_that_is_over_is_not_silent(tmp_path: Path) -> None:
    assert findings(facts(tmp_path, {"generator_1": [*generator(), {"t": T + 1}]}, state="done")) == []


def test_a_process_that_ended_and_is_silent_after_its_restart(tmp_path: Path) -> None:
    launcher = events({"event": "ended", "process": "generator-1", "code": 0})
    found = findings(
        facts(tmp_path, {"generator_1": [{"t": T + 1}, {"t": T + 26}], "launcher": launcher}, now=NOW + 5)
    )
    assert "generator-1" in {finding.about for finding in of_rule(found, "silent")}


def test_a_process_of_an_earlier_start_is_not_silent(tmp_path: Path) -> None:
    head = {"process": "launcher", "role": "launcher", "host": "a", "pid": 9}
    launcher = [{"t": T + 2}, {"t": T + 3, **head}, {"t": NOW}]
    assert findings(facts(tmp_path, {"generator_1": [{"t": T + 1}], "launcher": launcher})) == []


def test_a_process_that_left_is_not_silent(tmp_path: Path) -> None:
    queue = events({"event": "left", "process": "generator-1"})
    assert findings(facts(tmp_path, {"generator_1": [{"t": T + 1}], "queue": queue})) == []


def test_a_generator_that_makes_more_groups_is_not_slow(tmp_path: Path) -> None:
    """Many groups at once take longer each."""
    assert findings(facts(tmp_path, {"generator_1": generator(every=0.2, took=2.0)})) == []


def test_a_generator_that_others_wait_for_is_slow(tmp_path: Path) -> None:
    """Under a tight staleness bound, all make equally many groups."""
    at_once = [span for _ in range(4) for span in generator(every=3.0, took=2.9)]
    processes = {"generator_0": generator(every=0.75, took=0.2), "generator_1": at_once}
    assert [one.about for one in of_rule(findings(facts(tmp_path, processes)), "straggler")] == [
        "generator-1"
    ]


def test_idle_generators_of_all_pools_count(tmp_path: Path) -> None:
    """Of 12, three in ten would do with a quarter to spare: 4.5, so 5. Eight are of other pools, or 3."""

    def fewer(of_pools: int) -> tuple[str, str]:
        generators = {"small": {"count": of_pools}, "out": None}
        keys = changed(generator={"count": 12 - of_pools}, placement={"generators": generators})
        (tmp_path / str(of_pools)).mkdir()
        idle = rows(perf__busy__generator=0.3)
        (found,) = of_rule(findings(facts(tmp_path / str(of_pools), rows=idle, config=keys)), "bottleneck")
        return found.key, found.value

    assert fewer(3) == ("generator.count", "2")
    assert fewer(8) == ("generator.count", "1")


def test_a_generator_of_a_slower_kind_is_not_slow(tmp_path: Path) -> None:
    """It is compared with those of its own pool."""
    small = changed(placement={"generators": {"small": {"count": 2}}})

    def slow(folder: str, config: Any, **others: Sequence[Row]) -> list[str]:
        (tmp_path / folder).mkdir()
        processes = {"generator_small_0": generator(every=3.0, took=2.9), **others}
        found = findings(facts(tmp_path / folder, processes, config=config))
        return [one.about for one in of_rule(found, "straggler")]

    assert slow("one pool", CONFIG) == ["generator-small-0"]
    assert slow("alone", small) == []
    assert slow("in its pool", small, generator_small_1=generator()) == ["generator-small-0"]


def test_one_low_score_is_no_hacked_reward(tmp_path: Path) -> None:
    assert findings(facts(tmp_path, evaluations=evaluations(0.5, 0.6, 0.6, 0.3))) == []


def test_a_stall_names_who_was_silent(tmp_path: Path) -> None:
    processes = {
        "learner": loop("learner", "wait/groups", lasted=18.0),
        "generator_1": [{"t": NOW - 17}],
        "launcher": events({"event": "ended", "process": "generator-0", "code": -9, "signal": "SIGKILL"}),
    }
    found = of_rule(findings(facts(tmp_path, processes)), "stall")
    assert "learner has waited 18 s for groups" in found[0].sentence
    assert "generator-1 silent since" in found[0].evidence


def test_the_cause_of_a_death_is_named(tmp_path: Path) -> None:
    died = events({"event": "ended", "process": "generator-0", "code": -9, "signal": "SIGKILL"})
    known = facts(tmp_path, {"launcher": died}, causes={"generator-0": "out of memory"})
    (finding,) = findings(known)
    assert finding.sentence == "generator-0 has died once."
    assert "SIGKILL: out of memory" in finding.evidence


def test_the_header_names_the_bottleneck_that_the_rule_finds(tmp_path: Path) -> None:
    slow = facts(tmp_path, rows=rows(**IDLE))
    waits = who_waits(slow)
    assert waits is not None
    assert [finding.sentence for finding in findings(slow)] == [waits.sentence]
    balanced = who_waits(RunFacts(rows()))
    assert balanced is not None
    assert balanced.sentence == "Both sides are busy: the learner 94 %, generators 90 % of their time."
    assert who_waits(RunFacts()) is None


def test_of_several_parts_the_one_that_falls_most_is_named(tmp_path: Path) -> None:
    falls = {"rollout__reward__part__a": lambda v: 0.4 - 0.004 * v}
    falls |= {"rollout__reward__part__b": lambda v: 0.4 - 0.01 * v}
    found = facts(tmp_path, rows=rows(rollout__reward__part__tidy=lambda v: 0.02 * v, **falls))
    (finding,) = of_rule(findings(found), "one part")
    assert finding.sentence == "tidy carries the gain of the reward, while b falls."


def test_no_more_than_an_hour_of_lanes_is_looked_at() -> None:
    slow = [{"version": v, "time": T + 600 * v} for v in range(1, 31)]
    assert RunFacts(slow, now=T + 18_000).since == T + 18_000 - 3600
    assert RunFacts(rows(), now=NOW).since == T + VERSIONS - RECENT + 1


def test_only_spans_that_have_ended_since_are_looked_at() -> None:
    spans = [
        Span("a", 0.0, WINDOW_S + 9),
        Span("a", 20.0, 21.0),
        Span("a", 22.0, 23.0),
        Span("b", 24.0, 26.0),
    ]
    since = WINDOW_S + 5
    late = [Span(each.name, each.start + WINDOW_S, each.end + WINDOW_S) for each in spans[1:]]
    lane = Lane("rollouts", False, [spans[0], *spans[1:], *late])
    assert ended(lane, since + 18) == [late[2], late[1]]
    assert ended(lane, since + 18, "a") == [late[1]]
    assert ended(Lane("rollouts", False, spans), 5.0, "a") == [spans[2], spans[1], spans[0]]
    assert ended(Lane("rollouts", False, spans), WINDOW_S + 1) == []


def test_the_noise_of_a_trend_is_that_of_its_means() -> None:
    """Steps of +1 five times and of −1 four times: their deviation is √(10/9), that of means of five √5 less."""
    found = trend([{"version": at, "a": at % 2} for at in range(10)], "a")
    assert found is not None
    assert found.noise == pytest.approx((10 / 9) ** 0.5 / 5**0.5)


def test_a_long_version_counts_by_its_seconds(tmp_path: Path) -> None:
    """Half of the time is one version in which the learner only waits; 19 others have no waits."""
    long = {
        "perf__step_s": lambda v: 19.0 if v == VERSIONS else 1.0,
        "perf__wait_fraction__groups": lambda v: float(v == VERSIONS),
        "perf__busy__generator": lambda v: 0.2 if v == VERSIONS else 1.0,
    }
    waits = who_waits(facts(tmp_path, rows=rows(**long)))
    assert waits is not None
    assert "waits for groups 50 % of its time" in waits.sentence
    assert "generators busy 60 %" in waits.evidence


def test_a_slow_generator_is_the_bottleneck_where_the_others_wait_for_it(tmp_path: Path) -> None:
    waiting = rows(perf__wait_fraction__groups=0.4, perf__busy__generator=0.6)
    slow = {"generator_1": generator(every=4.0, took=3.0)}
    waits = who_waits(facts(tmp_path, slow, rows=waiting))
    assert waits is not None
    assert waits.sentence == "generator-1 is the bottleneck: the learner waits for groups 40 % of its time."
    assert waits.key == "queue.hedge_s"


VALUES = st.none() | st.booleans() | st.text(max_size=3) | st.floats(-1e6, 1e6)
KEYS = sorted({key for row in rows(1) for key in row} - {"version", "time"})


@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), max_size=45),
    st.lists(
        st.dictionaries(st.sampled_from(["eval/accuracy", "eval/unscored", "eval/x"]), VALUES), max_size=6
    ),
)
def test_no_rule_fails_on_any_rows(some: list[Row], evaluated: list[Row]) -> None:
    made = [{"version": at, "time": T + at, **row} for at, row in enumerate(some)]
    scores = [{"version": at, **row} for at, row in enumerate(evaluated)]
    found = findings(RunFacts(made, scores, config={}, now=NOW))
    assert all(finding.sentence and finding.answer() for finding in found)
    assert found == sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


LANES = (
    ("learner", "wait/groups"),
    ("engine", "compute"),
    ("rollouts", "generate"),
    ("turns", "turn"),
    ("rewards", "score"),
)
LINES = st.one_of(
    st.builds(
        lambda t, lane: {"t": T + t, "lane": lane[0], "do": lane[1]}, st.floats(0, 50), st.sampled_from(LANES)
    ),
    st.builds(
        lambda t, took, lane: {"t": T + t, "took": took, "lane": lane[0], "do": lane[1]},
        st.floats(0, 50),
        st.floats(0, 20),
        st.sampled_from(LANES),
    ),
    st.builds(
        lambda t, name, about: {"t": T + t, "event": name, **about},
        st.floats(0, 50),
        st.sampled_from(["claim", "ended", "left", "refused", "silent", "logprob_mismatch", "left_out"]),
        st.dictionaries(st.sampled_from(["process", "code", "count", "reason", "ages"]), VALUES, max_size=3),
    ),
)


@given(st.lists(LINES, max_size=60), st.sampled_from(["learner", "generator", "queue", "launcher"]))
def test_no_rule_fails_on_any_trace(lines: list[Row], role: str) -> None:
    process = ProcessTrace(Path("some.jsonl"))
    for line in [{"t": T, "process": "some", "role": role}, *lines]:
        with suppress(ValueError):  # a lane of the other kind
            process._take(line)
    found = findings(RunFacts(rows(25), processes={"some": process}, config=CONFIG, now=NOW))
    assert all(finding.sentence and finding.answer() for finding in found)


@given(st.lists(st.floats(-1e3, 1e3), min_size=10, max_size=90))
def test_a_trend_lies_between_its_values(values: list[float]) -> None:
    found = trend([{"version": at, "a": value} for at, value in enumerate(values)], "a")
    assert found is not None
    assert min(values) - 1e-6 <= min(found.first, found.last)
    assert max(found.first, found.last) <= found.best <= max(values) + 1e-6
    assert found.noise >= 0
    assert RECENT >= 5


def test_a_rule_that_fails_is_a_note_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = RunFacts(rows(rollout__length__truncated=0.5), config=CONFIG, now=NOW)
    odd = DoctorRule("odd", "what is odd", lambda facts: iter([1 / 0]))  # type: ignore[list-item]
    monkeypatch.setattr("asyncrl.observability.doctor.rules.RULES", (odd, *RULES))
    found = {each.rule: each for each in findings(facts)}
    assert found["odd"].severity == "note"
    assert "division by zero" in found["odd"].evidence
    assert "limits" in found


@pytest.mark.parametrize("value", ["many", [1], {"a": 1}, 10**400])
def test_a_configuration_of_other_kinds_has_defaults(value: object) -> None:
    facts = RunFacts(
        config={"queue": {"max_staleness": value, "depth": value}, "generator": {"count": value}}
    )
    assert (facts.key("queue.max_staleness", 2), facts.key("generator.count", 1)) == (2, 1)
    assert isinstance(facts.key("queue.depth", None), str | None)


def test_rollouts_of_other_kinds_are_left_out() -> None:
    odd: list[Row] = [{"version": "x", "versions": each, "tokens": 1} for each in ("ab", [[1]], 5, None, [1])]
    facts = RunFacts(rows(), rollouts=odd * 40, config=CONFIG, now=NOW)
    assert [each.evidence for each in findings(facts) if "cannot judge" in each.sentence] == []

"""The claims of a learner rank: their order, steps that begin anew, and the errors when no groups come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from learner_cases import packed, random_group

from asyncrl.config.schema import Config, LearnerConfig, QueueConfig, RunConfig
from asyncrl.device.turns import DeviceTurn
from asyncrl.errors import DeadlineError, RefusedError, TrainingError
from asyncrl.learner import train_stream
from asyncrl.learner.checks.group_check import Fault, GroupCheck
from asyncrl.learner.group_wait import counts_text
from asyncrl.learner.train_stream import (
    GroupsRefused,
    LeaveLoop,
    NoGroups,
    StepRestarted,
    TrainStream,
)
from asyncrl.learner.training.version_step import PreparedClaim
from asyncrl.queue.protocol.replies import Claim
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Group, Version


class Dry:
    """A queue without groups, and the backend of a single rank."""

    rank = data_rank = 0
    workers: Mapping[str, Any] = {"generator-0": {"under_way/x.py:quick": 0, "late/x.py:quick": 1}}

    def __init__(self, dropped: Mapping[str, int] | None) -> None:
        self._dropped = dropped

    def claim(self, stream: str, **_: Any) -> Claim | None:
        return None

    def status(self) -> dict[str, Any]:
        if self._dropped is None:
            raise RefusedError("full")
        counts = {"pending": 6, "leased": 4, "ready": 0, "trained": 12, "dropped_by_reason": self._dropped}
        return {"streams": {"train": counts}, "workers": self.workers}

    def exchange(self, mine: Any) -> list[Any]:
        return [mine]


def stream_of(
    both: Any,
    config: Config | None = None,
    turn: DeviceTurn | None = None,
    check: GroupCheck | None = None,
    prepare: Callable[[Sequence[Group], Version], PreparedClaim] = packed,
) -> TrainStream:
    """The stream of a rank whose queue and backend are one object."""
    return TrainStream(
        both,
        both,
        config or Config(),
        Spans(),
        check=check or GroupCheck(rollouts=4, longest=32, vocabulary=33),
        prepare=prepare,
        learner_epoch=0,
        stop=threading.Event(),
        idle=lambda: None,
        turn=turn or DeviceTurn.always(),
        status=ProcessStatus(),
    )


@pytest.mark.parametrize(
    ("dropped", "says"),
    [
        (
            {"reward": 3, "filtered": 900},
            "tasks: 6 pending, 4 leased, 0 ready, 12 trained; dropped: 900 filtered, 3 reward; nearly all groups have "
            "equal rewards: give tasks that are solved now and then, raise batch.group_size, or set "
            "algorithm.filter=none",
        ),
        (
            {"filtered": 2, "reward": 3},
            "tasks: 6 pending, 4 leased, 0 ready, 12 trained; dropped: 3 reward, 2 filtered",
        ),
        ({}, "tasks: 6 pending, 4 leased, 0 ready, 12 trained; dropped: none"),
        (None, "the queue does not say why (full)"),
    ],
)
def test_a_wait_in_vain_tells_where_the_tasks_are(dropped: Mapping[str, int] | None, says: str) -> None:
    dry = Dry(dropped)
    stream = stream_of(dry, Config(learner=LearnerConfig(groups_deadline_s=1e-6)))
    with pytest.raises(NoGroups) as error:
        next(stream.step(3))
    stream.close()
    expected = (
        "learner rank 0 waited 0.0 s for the generators: a group for version 4 (claim 0) did not come; "
    )
    assert str(error.value) == expected + says


def test_a_wait_in_vain_names_the_rewards_whose_calls_do_not_end() -> None:
    """They are not late yet: their deadline is longer than the learner's patience."""
    dry = Dry({})
    dry.workers = {
        "generator-0": {"under_way/x.py:slow": 64},
        "rewards-0": {"under_way/x.py:slow": 8, "groups": 3},
    }
    stream = stream_of(dry, Config(learner=LearnerConfig(groups_deadline_s=1e-6)))
    with pytest.raises(NoGroups, match=r"dropped: none; reward calls under way: 72 of x\.py:slow$"):
        next(stream.step(3))
    stream.close()


@pytest.mark.parametrize(
    ("other", "end"),
    [([None, False, False, "", True, []], NoGroups), ([None, False, True, "", False, []], LeaveLoop)],
)
def test_all_ranks_give_up_together(other: list[Any], end: type[Exception]) -> None:
    """Rank 1 has its group. Rank 0 waits for its own in vain, or was asked to stop: both must leave the version, or the
    other never would."""

    class Full(Dry):
        rank = data_rank = 1

        def claim(self, stream: str, **_: Any) -> Claim:
            return Claim([], last=True, so_far=0)

        def exchange(self, mine: Any) -> list[Any]:
            return [other, mine]

    full = Full({})
    stream = stream_of(full, Config(learner=LearnerConfig(groups_deadline_s=600.0)))
    with pytest.raises(end):
        next(stream.step(3))
    stream.close()


def test_a_corrupt_group_of_another_rank_restarts_the_step_here_too() -> None:
    """Rank 0 has a group of its own, which is good. It drops the one of rank 1, which cannot."""

    class Full(Dry):
        rank = data_rank = 0
        dropped: tuple[Any, ...] = ()

        def claim(self, stream: str, **_: Any) -> Claim:
            return Claim([random_group(4)], last=True, so_far=2, attempt=3, workers=["g0"])

        def abandon(self, stream: str, *, attempt: int, dropped: Sequence[int], reason: str, **_: Any) -> int:
            self.dropped = (attempt, list(dropped), reason)
            return attempt + 1

        def exchange(self, mine: Any) -> list[Any]:
            return [
                mine,
                mine
                and [3, False, False, "", False, [[5, "corrupt", "a text"], [6, "not_finite", "another"]]],
            ]

    full = Full({})
    stream = stream_of(full)
    with pytest.raises(GroupsRefused, match="1 groups cannot be trained on; task 5: a text") as refused:
        next(stream.step(3))
    stream.close()
    assert refused.value.faults == [Fault(5, "corrupt", "a text")]
    assert full.dropped == (3, [5], "corrupt")


def test_groups_are_checked_in_the_claims_thread() -> None:
    class Full(Dry):
        def claim(self, stream: str, **_: Any) -> Claim:
            return Claim([random_group(4)], last=True, so_far=1, workers=["g0"])

    class Check(GroupCheck):
        def fault(self, group: Group, version: Version) -> None:
            threads.append(threading.current_thread().name)

    threads: list[str] = []
    full = Full({})
    stream = stream_of(full, check=Check(rollouts=4, longest=32, vocabulary=33))
    next(stream.step(3))
    stream.close()
    assert threads == ["claims_0"]


def test_a_wait_in_vain_tells_which_pool_has_groups() -> None:
    stages = {"reference": {"waiting": 3, "leased": 1}, "rewards": {"waiting": 0, "leased": 0}}
    places = {"pending": 0, "leased": 0, "ready": 0, "trained": 12, "dropped_by_reason": {}}
    assert counts_text({**places, "stages": stages}).endswith(
        "; groups that wait for a pool: 4 reference, 0 rewards"
    )


def test_a_group_that_takes_900_seconds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is 600 s; the generators make tokens all the time."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(train_stream, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Slow(Dry):
        def claim(self, stream: str, **request: Any) -> Claim | None:
            clock.now += request["wait_s"]
            return Claim([], last=True, so_far=0) if clock.now > 900.0 else None

        def status(self) -> dict[str, Any]:
            return {**super().status(), "workers": {"generator-0": {"tokens": clock.now}}}

    slow = Slow({})
    stream = stream_of(slow)
    assert list(stream.step(3)) == [([], None)]
    stream.close()
    assert clock.now > 900.0


def test_groups_that_lack_something_are_named_in_the_trainers_thread() -> None:
    """Not before all ranks have their claims, any of which may have been restarted."""

    def lacking(groups: Sequence[Group], version: Version) -> PreparedClaim:
        raise TrainingError("the batch has no column 'values'")

    class Full(Dry):
        def claim(self, stream: str, **_: Any) -> Claim:
            return Claim([random_group(0)], last=True, so_far=1, workers=["g"])

    stream = stream_of(Full({}), prepare=lacking)
    ((groups, prepared),) = stream.step(3)
    assert len(groups) == 1
    assert prepared is None
    stream.close()


def test_a_claim_is_an_event_with_the_ages_of_its_groups(trace: Any) -> None:
    class Full(Dry):
        def claim(self, stream: str, **_: Any) -> Claim:
            groups = [random_group(0, version=version) for version in (3, 1, 3)]
            return Claim(groups, last=True, so_far=3, workers=["g"] * 3)

    full = Full({})
    stream = stream_of(full)
    groups, prepared = next(stream.step(3))
    assert prepared is not None
    assert prepared.batch.groups == len(groups) == 3
    stream.close()
    (event,) = trace().events
    assert event.name == "claim"
    assert event.about == {
        "version": 3,
        "groups": 3,
        "ages": {"0": 2, "2": 1},
        "last": True,
        "tasks": [0, 0, 0],
    }


class Recording(Dry):
    """Every step is one claim without groups. `asked` holds the requests as (step, index), those of the first claim of
    a later step with "ahead", and the reports as "trained"; `answers` what the next claims are answered with, in place
    of a claim. A claim of a later step waits for the report, but for those `ahead`."""

    def __init__(self, versions: int = 9) -> None:
        super().__init__({})
        self.asked: list[tuple[Any, ...] | str] = []
        self.answers: list[Claim | Exception | None] = []
        self.ahead: dict[int, Claim] = {}  # by step
        self.version = 0
        self.moved = threading.Condition()
        self.config = Config(run=RunConfig(versions=versions))

    def claim(
        self,
        stream: str,
        *,
        step: int,
        index: int,
        attempt: int | None,
        ahead: bool,
        received: int,
        wait_s: float,
        **_: Any,
    ) -> Claim | None:
        with self.moved:
            again = attempt is not None and index == 0
            about = ("ahead",) if ahead and step > self.version else ("again",) if again else ()
            self.note(step, index, *about)
            if ahead and step > self.version and step in self.ahead:
                return self.ahead[step]
            if not self.moved.wait_for(lambda: step <= self.version, wait_s):
                return None
            if again and step in self.ahead and not self.answers:
                return replace(self.ahead[step], groups=[], ahead=False)
        answer = self.answers.pop(0) if self.answers else Claim([], last=True, so_far=0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def trained(self, stream: str, *, step: int, **_: Any) -> str:
        self.asked.append("trained")
        with self.moved:
            self.version = step + 1
            self.moved.notify_all()
        return "counts"

    def note(self, *request: Any) -> None:
        """Once: a wait in vain is repeated."""
        with self.moved:
            if request not in self.asked:
                self.asked.append(request)
            self.moved.notify_all()

    def was_asked(self, *request: Any) -> None:
        """Waits for it."""
        with self.moved:
            assert self.moved.wait_for(lambda: request in self.asked, 10.0), self.asked


def ahead_of(*groups: Group, last: bool = True) -> Claim:
    ordinals = [group.task.ordinal for group in groups]
    return Claim([*groups], last, len(groups), 0, True, ordinals, workers=["g"] * len(groups))


def behind_step_0(queue: Recording, last: bool = True, **options: Any) -> TrainStream:
    """The stream of a rank that has computed step 0. The first claim of step 1, of task 4, came ahead."""
    queue.ahead[1] = ahead_of(random_group(4), last=last)
    stream = stream_of(queue, queue.config, **options)
    list(stream.step(0))
    queue.was_asked(1, 0, "ahead")
    return stream


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_claim_of_a_step_is_requested_while_the_one_before_is_computed(rank: int) -> None:
    queue = Recording(versions=3)
    queue.rank = queue.data_rank = rank
    stream = stream_of(queue, queue.config)
    for step in range(3):
        for _ in stream.step(step):
            stream.request_following()
            if step < 2:
                queue.was_asked(step + 1, 0, "ahead")
        report = stream.report(step)
        assert (report and report.result(10.0).counts) == ("counts" if rank == 0 else None)
        queue.trained("", step=step)  # by rank 0
    stream.close()
    assert {request for request in queue.asked if request != "trained"} == {
        (0, 0),
        (1, 0, "ahead"),
        (2, 0, "ahead"),
    }


def test_a_step_whose_claim_is_there_begins_before_the_report_is_answered() -> None:
    class Slow(Recording):
        may_answer = threading.Event()

        def trained(self, stream: str, *, step: int, **_: Any) -> str:
            assert self.may_answer.wait(10.0), "the report was waited for"
            return super().trained(stream, step=step)

    queue = Slow()
    queue.ahead[1] = ahead_of(random_group(4))
    stream = stream_of(queue, queue.config)
    assert list(stream.step(0)) == [([], None)]
    report = stream.report(0)
    running = stream.step(1)
    groups, prepared = next(running)
    assert prepared is not None
    assert [group.task.ordinal for group in groups] == [4]
    queue.may_answer.set()
    assert report is not None
    assert report.result(10.0).counts == "counts"
    assert list(running) == []
    queue.was_asked(2, 0, "ahead")
    stream.close()
    assert queue.asked.index("trained") < queue.asked.index((2, 0, "ahead"))
    assert queue.asked.count((1, 0, "again")) == 1


def test_a_claim_behind_one_that_came_ahead_is_requested_behind_its_repetition() -> None:
    """The queue refuses claim 1 of a step whose claim 0 was not made."""
    queue = Recording()
    stream = behind_step_0(queue, last=False)
    stream.report(0)
    assert [len(groups) for groups, _ in stream.step(1)] == [1, 0]
    queue.was_asked(2, 0, "ahead")
    stream.close()
    behind = [request for request in queue.asked if request != "trained"]
    assert behind == [(0, 0), (1, 0, "ahead"), (1, 0, "again"), (1, 1), (2, 0, "ahead")]


def test_a_claim_that_came_ahead_and_does_not_stand_restarts_the_step() -> None:
    """The queue came back without the bytes of one of its groups."""
    queue = Recording()
    stream = behind_step_0(queue)
    stream.report(0)
    running = stream.step(1)
    assert len(next(running)[0]) == 1
    queue.answers = [RefusedError("abandoned")]
    with pytest.raises(StepRestarted):
        next(running)
    assert list(stream.step(1)) == [([], None)]
    stream.close()


def test_ranks_confirm_a_claim_together_if_it_came_ahead_to_one_of_them() -> None:
    """This rank got its claim when the step ran. The other one exchanges once more."""

    class Full(Recording):
        exchanged = 0

        def exchange(self, mine: Any) -> list[Any]:
            self.exchanged += 1
            return [mine, [0, True, False, "", False, []] if self.exchanged == 1 else ""]

    queue = Full()
    stream = stream_of(queue, queue.config)
    assert list(stream.step(0)) == [([], None)]
    stream.close()
    assert queue.exchanged == 2


def test_a_group_of_a_claim_that_came_ahead_is_dropped_once_the_step_runs() -> None:
    """Before the report of the step before, the queue knows of no claim from which a group could be dropped."""

    class Dropping(Recording):
        def abandon(self, stream: str, *, step: int, attempt: int, dropped: Sequence[int], **_: Any) -> int:
            assert step == self.version
            assert (step, 0, "again") in self.asked
            self.asked.append(("dropped", *dropped))
            return attempt + 1

    class Check(GroupCheck):
        def fault(self, group: Group, version: Version) -> Fault:
            return Fault(group.task.ordinal, "corrupt", "a text")

    queue = Dropping()
    stream = behind_step_0(queue, check=Check(rollouts=4, longest=32, vocabulary=33))
    stream.report(0)
    with pytest.raises(GroupsRefused, match="task 4: a text"):
        next(stream.step(1))
    stream.close()
    assert ("dropped", 4) in queue.asked


def test_the_repetition_of_a_claim_that_came_ahead_is_repeated_until_the_step_runs() -> None:
    """The report is late: the first repetition waits in vain. What follows is requested behind it, also where the claim
    is the step's last."""

    class Late(Recording):
        vain = 0

        def claim(self, stream: str, *, step: int, index: int, attempt: int | None, **about: Any) -> Any:
            if (step, index, self.vain) == (1, 0, 0) and attempt is not None:
                self.vain = 1
                return None
            return super().claim(stream, step=step, index=index, attempt=attempt, **about)

    queue = Late()
    stream = behind_step_0(queue)
    stream.report(0)
    assert len(list(stream.step(1))) == 1
    assert queue.vain == 1
    queue.was_asked(2, 0, "ahead")
    stream.close()


def test_a_queue_that_does_not_run_the_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No report reaches it."""
    monkeypatch.setattr(train_stream, "PARK_S", 0.01)
    queue = Recording()
    queue.config = replace(queue.config, queue=QueueConfig(deadline_s=0.05))
    stream = behind_step_0(queue)
    with pytest.raises(
        DeadlineError, match=r"rank 0 waited .* for the queue: the first claim of step 1, once more"
    ):
        list(stream.step(1))
    stream.close()


def test_a_step_that_the_queue_began_with_other_groups_is_restarted() -> None:
    """It came back with an older journal, and has made another claim of this step."""
    queue = Recording()
    stream = behind_step_0(queue)
    queue.ahead[1] = ahead_of(random_group(5))
    stream.report(0)
    with pytest.raises(StepRestarted):
        list(stream.step(1))
    stream.close()


def test_the_device_is_not_given_away_before_the_optimizer_step() -> None:
    """The claim that came ahead is the step's last, and the queue counts it late: a generator that wants the device has
    to wait, since nothing takes it back before the step."""
    computing = threading.Event()

    class Turn(DeviceTurn):
        def offer_until(self, request: Any) -> None:
            assert not computing.is_set(), "the device was offered"

    queue = Recording()
    stream = behind_step_0(queue, turn=Turn.always())
    running = stream.step(1)
    next(running)
    computing.set()
    stream.request_following()
    queue.was_asked(1, 0, "again")
    stream.report(0)
    assert list(running) == []
    stream.close()


def test_a_group_that_cannot_be_read_ahead_is_not_requested_again_before_the_step_runs() -> None:
    class Corrupt(Recording):
        refusals = 0

        def claim(self, stream: str, *, step: int, ahead: bool, **about: Any) -> Any:
            if ahead and step > self.version:
                self.refusals += 1
                self.note(step, 0, "ahead")
                raise RefusedError("abandoned", "step 1 will begin without [4]")
            return super().claim(stream, step=step, ahead=ahead, **about)

    queue = Corrupt()
    stream = stream_of(queue, queue.config)
    list(stream.step(0))
    queue.was_asked(1, 0, "ahead")
    stream.report(0)
    assert list(stream.step(1)) == [([], None)]
    stream.close()
    assert queue.refusals <= 2  # of step 1, and of step 2


def test_a_report_that_failed_is_raised_where_it_is_waited_for() -> None:
    class Fenced(Recording):
        def trained(self, stream: str, *, step: int, **_: Any) -> str:
            raise RefusedError("fenced", "another learner has the stream")

    queue = Fenced()
    stream = stream_of(queue, queue.config)
    report = stream.report(0)
    assert report is not None
    for wait in (report.result, lambda: next(stream.step(1))):  # not the deadline of the groups
        with pytest.raises(RefusedError, match="another learner has the stream"):
            wait()
    stream.close()


def test_a_claim_that_was_requested_ahead_is_not_taken_for_another_step() -> None:
    queue = Recording()
    stream = behind_step_0(queue)
    assert list(stream.step(0)) == [([], None)]
    stream.close()


@pytest.mark.parametrize(
    "answer",
    [None, RefusedError("abandoned"), DeadlineError("rank 0", "the queue", "a reply", 60.0)],
    ids=["in vain", "refused", "without a queue"],
)
def test_a_request_ahead_without_a_claim_is_made_again(answer: Any) -> None:
    queue = Recording()
    queue.answers = [Claim([], last=True, so_far=0), answer]
    stream = stream_of(queue, queue.config)
    list(stream.step(0))
    stream.report(0)
    assert list(stream.step(1)) == [([], None)]
    stream.close()
    assert queue.answers == []


def test_a_step_that_begins_anew_does_not_keep_the_refused_request() -> None:
    queue = Recording()
    queue.answers = [RefusedError("abandoned")]
    stream = stream_of(queue, queue.config)
    with pytest.raises(StepRestarted):
        next(stream.step(0))
    assert list(stream.step(0)) == [([], None)]
    stream.close()


def test_the_device_is_offered_in_each_step_even_if_its_claims_are_there() -> None:
    offers = 0

    class Turn(DeviceTurn):
        def offer(self) -> None:
            nonlocal offers
            offers += 1

    queue = Recording()
    stream = stream_of(queue, queue.config, Turn.always())
    for step in range(3):
        queue.ahead[step + 1] = ahead_of()
        list(stream.step(step))
        queue.was_asked(step + 1, 0, "ahead")
        stream.report(step)
    stream.close()
    assert offers == 3

"""What whole runs leave in their traces: processes that are killed, and machines that share nothing but the queue."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from processes import (
    FOR_EVER,
    family,
    finished,
    kill_after,
    queue_address,
    started,
    succeeded,
    until,
    until_trained,
)

from asyncrl.observability.timeline import ProcessTrace, Timeline

SHIFTED = str(Path(__file__).parents[1] / "shifted_generator.py")


def timeline_of(run: Path) -> Timeline:
    timeline = Timeline(run)
    timeline.read()
    return timeline


def happened(trace: ProcessTrace, name: str) -> list[dict]:
    return [event.about for event in trace.events if event.name == name]


def joined(run: Path) -> set[str]:
    """The clients that the queue has seen."""
    return {about["process"] for about in happened(timeline_of(run).processes["queue"], "joined")}


def spans(trace: ProcessTrace, lane: str) -> set[str]:
    return {span.name for span in trace.lanes[lane].spans}


def test_a_run_with_a_killed_generator_and_two_ranks_is_in_its_traces(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = ("asyncrl", "train", str(config_file), "run.versions=30", "learner.processes=2")
    with started(*words) as launcher:
        kill_after(run, [2], launcher, "generator")
        succeeded(launcher)
    traces = timeline_of(run).processes
    assert set(traces) == {"launcher", "queue", "learner", "learner-rank-1", "generator-0"}
    assert {trace.damaged for trace in traces.values()} == {0}
    launcher_, learner, generator = traces["launcher"], traces["learner"], traces["generator-0"]
    assert [each["process"] for each in happened(launcher_, "restarted")] == ["generator-0"]
    ended = [each for each in happened(launcher_, "ended") if each["process"] == "generator-0"]
    assert [each.get("signal") for each in ended] == ["SIGKILL", None]
    assert len(happened(launcher_, "started")) == 4
    assert len(happened(generator, "began again")) == 1
    assert {"snapshot", "send"} <= spans(learner, "weights")
    assert spans(learner, "disk") == {"checkpoint", "export"}
    assert spans(learner, "evaluation") == {"evaluate"}
    assert {each["version"] for each in happened(learner, "published")} == set(range(1, 31))
    ranks = (learner, traces["learner-rank-1"])
    assert sum(each["groups"] for rank in ranks for each in happened(rank, "claim")) == 30 * 4
    for rank in ranks:
        assert {"wait/groups", "compute/forward_backward"} <= spans(rank, "learner")
        assert "snapshot" in spans(rank, "weights")
    assert {"fetch", "flip", "verify"} <= spans(generator, "weights")
    assert {"generate", "evaluate"} <= spans(generator, "rollouts")
    assert max(generator.figures["sync/held"][1]) >= 1
    assert "queue/ready" in traces["queue"].figures
    assert {trace.offset_s for trace in traces.values()} == {0.0}  # one machine, one clock


def test_processes_of_another_machine_send_their_rows_and_line_up(config_file: Path) -> None:
    """Another run folder, and a clock that is an hour behind; one generator is killed in the middle."""
    run, config = config_file.parent / "it", str(config_file)
    elsewhere = f"run.dir={config_file.parent / 'elsewhere'}"
    begun = time.time()
    with started("asyncrl", "queue", config) as queue:
        address = queue_address(run, queue)
        shared = (config, address, elsewhere)
        with (
            started(SHIFTED, "generator", *shared, "--name", "doomed") as doomed,
            started(SHIFTED, "generator", *shared, "--name", "steady") as steady,
            started("asyncrl", "learner", *shared, FOR_EVER) as learner,
        ):
            far = config_file.parent / "elsewhere" / "it"
            until_trained(far, 2, queue, steady, learner)
            until(lambda: "doomed" in timeline_of(run).processes, "rows of a generator elsewhere", queue)
            until(lambda: "doomed" in joined(run), "look of the queue", queue)
            for one in family(doomed.pid):
                one.kill()
            learner.send_signal(signal.SIGTERM)
            finished(learner)
            succeeded(steady)
        succeeded(queue)
    ended = time.time()
    traces = timeline_of(run).processes
    assert {"queue", "learner", "doomed", "steady"} <= set(traces)
    assert {"snapshot", "send"} <= spans(traces["learner"], "weights")
    assert traces["learner"].offset_s == 0.0
    steady_ = traces["steady"]
    assert abs(steady_.offset_s - 3600) <= steady_.offset_error_s + 0.01
    for trace in traces.values():
        assert begun - 1 <= trace.first <= trace.last <= ended + 1, trace.name
        assert not happened(trace, "rows_missed")
    # A version is fetched once it is copied, and made live after that, on one clock.
    margin = steady_.offset_error_s
    copied = {
        span.about["version"]: span
        for span in traces["learner"].lanes["weights"].spans
        if span.name == "snapshot"
    }
    fetched = [
        span for span in steady_.lanes["weights"].spans if span.name == "fetch" and span.end == span.end
    ]
    assert fetched
    for span in fetched:
        assert span.end + margin >= copied[span.about["version"]].end
    own = timeline_of(far).processes["steady"]
    assert len(own.lanes["weights"].spans) == len(steady_.lanes["weights"].spans)

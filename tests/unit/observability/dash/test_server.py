"""The server of the page: its answers, what it refuses, and that it gives away nothing but runs."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from aiohttp.test_utils import TestClient, TestServer

from asyncrl.errors import ConfigError
from asyncrl.observability.dash.page_data import MOST_PROCESSES, PageData
from asyncrl.observability.dash.page_files import FILES, STATIC
from asyncrl.observability.dash.serve import listening_socket, serve_until
from asyncrl.observability.dash.server import PageServer
from asyncrl.observability.run_files import RunFiles

HOSTILE = "</script><script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"
T = 1_795_000_000.0
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def write_rows(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def version_row(version: int) -> dict[str, Any]:
    return {
        "version": version,
        "time": T + version,
        "rollout/reward/mean": version / 10,
        "perf/step_s": 1.0,
        "perf/wait_fraction/groups": 0.6,
        "perf/busy/generator": 0.95,
    }


def generator_trace(folder: Path, name: str) -> None:
    write_rows(
        folder / "trace" / f"{name}.jsonl",
        {"t": T, "process": name, "role": "generator", "host": "a", "pid": 1},
        {"t": T, "lane": "engine", "do": "compute"},
        {"t": T + 3, "lane": "engine", "do": "wait/tasks"},
        {"t": T + 3, "took": 0.5, "lane": "weights", "do": "fetch", "version": 7, "bytes": 4096},
        {"t": T + 3.1, "took": 0.02, "lane": "weights", "do": "flip", "version": 7},
        {"t": T + 4, "lane": "engine", "do": None},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    write_rows(folder / "metrics.jsonl", *map(version_row, range(1, 4)))
    write_rows(folder / "metrics.jsonl", {"version": 2, "time": T + 9, "eval/accuracy": 0.5})
    write_rows(
        folder / "rollouts.jsonl",
        *(
            {"version": v, "ordinal": v, "prompt": "1+1=", "answer": HOSTILE, "reward": v / 2}
            for v in (1, 2, 3)
        ),
    )
    (folder / "config.yaml").write_text("run: {versions: 10}\nqueue: {max_staleness: 2, keys: secret-keys}\n")
    (folder / "images").mkdir()
    (folder / "images" / "a.png").write_bytes(PNG)
    generator_trace(folder, "generator-0")
    write_rows(
        folder / "trace" / "queue.jsonl",
        {"t": T, "process": "queue", "role": "queue", "host": "a", "pid": 2},
        {"t": T + 1, "event": "joined", "worker": "generator-0"},
        {"t": T + 1, "values": {"queue/ready": 3}},
        {"t": T + 2, "values": {"queue/ready": 5}},
    )
    return folder


@asynccontextmanager
async def client(*folders: Path, token: str = "") -> AsyncIterator[TestClient]:
    server = TestServer(PageServer([PageData(folder) for folder in folders], token, read_every_s=0.0).app())
    async with TestClient(server) as made:
        yield made


async def answer(made: TestClient, path: str, **query: Any) -> Any:
    response = await made.get(f"/api/{path}", params=query)
    assert response.status == 200, await response.text()
    return await response.json()


async def test_the_state_of_a_run(run: Path) -> None:
    async with client(run) as made:
        state = await answer(made, "state")
    assert state["metrics"]["rollout/reward/mean"] == [0.1, 0.2, 0.3]
    assert state["evaluations"] == {"version": [2], "time": [T + 9], "eval/accuracy": [0.5]}
    assert state["overview"]["version"] == 3
    assert (state["overview"]["versions"], state["overview"]["bound"]) == (10, 2)
    assert state["overview"]["state"] == "silent"
    assert "60 %" in state["overview"]["bottleneck"]
    assert [event["event"] for event in state["events"]] == ["joined"]
    (weights,) = state["weights"]
    assert (weights["held"], weights["bytes"]) == (7, 4096)
    assert weights["fetch_ms"] == pytest.approx(500.0)


async def test_only_new_rows_are_sent_and_all_after_a_rewind(run: Path) -> None:
    async with client(run) as made:
        first = await answer(made, "state")
        write_rows(run / "metrics.jsonl", version_row(4))
        more = await answer(made, "state", epoch=first["epoch"], after=3)
        assert more["metrics"]["version"] == [4]
        rows = (run / "metrics.jsonl").read_text().splitlines()[:2]
        (run / "new").write_text("\n".join([*rows, json.dumps(version_row(3))]) + "\n")
        os.replace(run / "new", run / "metrics.jsonl")
        anew = await answer(made, "state", epoch=first["epoch"], after=4)
        assert anew["epoch"] != first["epoch"]
        assert anew["metrics"]["version"] == [1, 2, 3]


async def test_findings_come_beside_the_requests(run: Path) -> None:
    write_rows(run / "metrics.jsonl", *map(version_row, range(4, 21)))
    async with client(run) as made:
        assert (await answer(made, "state"))["findings"] == []
        while not (found := (await answer(made, "state"))["findings"]):
            pass
    assert [(one["rule"], one["severity"], one["key"]) for one in found] == [
        ("bottleneck", "warning", "generator.count")
    ]
    assert found[0]["remedy"].startswith("Try generator.count=2")


async def test_a_run_that_is_alive(run: Path) -> None:
    write_rows(run / "trace" / "queue.jsonl", {"t": time.time()})
    async with client(run) as made:
        state = await answer(made, "state")
    assert state["overview"]["state"] == "running"
    assert state["overview"]["left_s"] == pytest.approx(7.0)


async def test_a_run_is_over_with_its_summary_until_it_goes_on(run: Path) -> None:
    write_rows(run / "trace" / "queue.jsonl", {"t": time.time()})
    (run / "summary.json").write_text(json.dumps({"ended": "done", "versions": 3}))
    async with client(run) as made:
        assert (await answer(made, "state"))["overview"]["state"] == "done"
        write_rows(run / "metrics.jsonl", version_row(4))
        assert (await answer(made, "state"))["overview"]["state"] == "running"


async def test_processes_may_leave_for_a_minute_after_the_summary(run: Path) -> None:
    (run / "summary.json").write_text(json.dumps({"ended": "done", "versions": 3}))
    os.utime(run / "summary.json", (T, T))
    async with client(run) as made:
        write_rows(run / "trace" / "queue.jsonl", {"t": T + 60})
        over = (await answer(made, "state"))["overview"]
        assert (over["state"], over["left_s"]) == ("done", None)
        write_rows(run / "trace" / "queue.jsonl", {"t": T + 61})
        assert (await answer(made, "state"))["overview"]["state"] == "silent"


async def test_a_configuration_that_has_changed_is_read_again(run: Path) -> None:
    async with client(run) as made:
        assert (await answer(made, "state"))["overview"]["versions"] == 10
        (run / "config.yaml").write_text("run: {versions: 20}\n")
        os.utime(run / "config.yaml", (T, T))
        assert (await answer(made, "state"))["overview"]["versions"] == 20


async def test_a_row_that_is_written_anew_makes_the_page_begin_anew(run: Path) -> None:
    """By a learner that resumes at the version before."""
    async with client(run) as made:
        first = await answer(made, "state")
        write_rows(run / "metrics.jsonl", {**version_row(3), "rollout/reward/mean": 0.75})
        anew = await answer(made, "state", epoch=first["epoch"], after=3)
    assert anew["metrics"]["rollout/reward/mean"] == [0.1, 0.2, 0.75]


async def test_the_newest_events_that_are_no_routine(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observability.dash.page_data.MOST_EVENTS", 2)
    names = ("joined", "left", "claim", "published", "flip", "checkpoint", "fenced")
    write_rows(
        run / "trace" / "queue.jsonl", *({"t": T + 3 + at, "event": each} for at, each in enumerate(names))
    )
    async with client(run) as made:
        state = await answer(made, "state")
    assert [event["event"] for event in state["events"]] == ["left", "fenced"]


async def test_how_far_a_generator_is_behind(run: Path) -> None:
    head = {"t": T, "process": "learner", "role": "learner", "host": "a", "pid": 3}
    write_rows(
        run / "trace" / "learner.jsonl",
        head,
        *({"t": T + 3, "event": "published", "version": v} for v in (8, 9)),
    )
    async with client(run) as made:
        (weights,) = (await answer(made, "state"))["weights"]
    assert (weights["held"], weights["lag"]) == (7, 2)
    assert weights["flip_ms"] == pytest.approx(20.0)


async def test_figures_of_generators_are_apart(run: Path) -> None:
    for index in (0, 1):
        generator_trace(run, f"generator-{index}")
        write_rows(
            run / "trace" / f"generator-{index}.jsonl", {"t": T + 1, "values": {"sync/held": 5 + index}}
        )
    async with client(run) as made:
        figures = (await answer(made, "lanes", **{"from": T, "to": T + 4, "pixels": 3}))["figures"]
    assert figures["generator-0 sync/held"] == [5.0]
    assert figures["generator-1 sync/held"] == [6.0]


async def test_what_a_dead_process_did_last_ends_with_its_last_row(run: Path) -> None:
    write_rows(
        run / "trace" / "generator-0.jsonl", {"t": T + 4, "lane": "engine", "do": "compute"}, {"t": T + 6}
    )
    async with client(run) as made:
        reply = await answer(made, "lanes", **{"from": T, "to": T + 40, "pixels": 4})
    engine = next(lane for lane in reply["lanes"] if lane["lane"] == "engine")
    assert engine["totals"] == pytest.approx({"compute": 5.0, "wait/tasks": 1.0})


async def test_lanes_of_a_viewport(run: Path) -> None:
    async with client(run) as made:
        reply = await answer(made, "lanes", **{"from": T, "to": T + 4, "pixels": 4})
        engine = next(lane for lane in reply["lanes"] if lane["lane"] == "engine")
        shares = {name: list(base64.b64decode(part)) for name, part in engine["rows"][0]["shares"].items()}
        assert shares == {"compute": [255, 255, 255, 0], "wait/tasks": [0, 0, 0, 255]}
        assert engine["totals"] == pytest.approx({"compute": 3.0, "wait/tasks": 1.0})
        assert reply["figures"]["queue/ready"] == [4.0]
        span = await answer(made, "span", process="generator-0", lane="weights", row=0, time=T + 2.7)
        assert span["name"] == "fetch"
        assert span["about"] == {"version": 7, "bytes": 4096}
        assert await answer(made, "span", process="generator-0", lane="weights", row=0, time=T + 9) is None


async def test_many_processes_of_a_role_are_one_group_until_it_is_opened(run: Path) -> None:
    count = MOST_PROCESSES + 1
    for index in range(1, count):
        generator_trace(run, f"generator-{index}")
    async with client(run) as made:
        closed = await answer(made, "lanes", pixels=10)
        opened = await answer(made, "lanes", pixels=10, open="generator")
    assert [lane["group"] for lane in closed["lanes"]] == [count, count]
    assert closed["lanes"][0]["totals"]["compute"] == pytest.approx(3.0 * count, abs=1e-3)
    assert closed["many"] == ["generator"]
    assert len({lane["process"] for lane in opened["lanes"]}) == count


async def test_rollouts_by_version_and_reward(run: Path) -> None:
    async with client(run) as made:
        assert [row["version"] for row in (await answer(made, "rollouts"))["rows"]] == [3, 2, 1]
        some = await answer(made, "rollouts", **{"from": 2, "least": "", "most": 1})
    assert [row["version"] for row in some["rows"]] == [2]
    assert some["rows"][0]["answer"] == HOSTILE


async def test_no_more_rollouts_than_a_page_shows_and_of_a_new_file_only_its_own(run: Path) -> None:
    made_anew = ({"version": v, "ordinal": v, "reward": 1.0} for v in range(1, 251))
    write_rows(run / "rollouts.jsonl", *made_anew)
    async with client(run) as made:
        shown = await answer(made, "rollouts")
        assert (shown["found"], len(shown["rows"]), shown["rows"][0]["version"]) == (253, 200, 250)
        write_rows(run / "new", {"version": 1, "ordinal": 7, "reward": 1.0})
        os.replace(run / "new", run / "rollouts.jsonl")
        assert [row["ordinal"] for row in (await answer(made, "rollouts"))["rows"]] == [7]


async def test_an_answer_has_no_more_of_long_rollouts_than_a_page_can_take(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.observability.dash.page_data.ANSWER_BYTES", 1000)
    long = {"reward": 1.0, "answer": "x" * 400}
    write_rows(run / "rollouts.jsonl", *({"version": v, "ordinal": v, **long} for v in range(5, 9)))
    async with client(run) as made:
        shown = await answer(made, "rollouts")
    assert [row["version"] for row in shown["rows"]] == [8, 7]
    assert shown["found"] == 7


def test_only_the_newest_rollouts_are_held(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.observability.run_files.ROLLOUT_BYTES", 1000)
    write_rows(run / "rollouts.jsonl", *({"version": v, "answer": "x" * 400} for v in range(5, 9)))
    files = RunFiles(run, texts=True)
    files.read()
    assert [row["version"] for row in files.rollout_rows] == [7, 8]


def test_rules_keep_no_texts_of_rollouts(run: Path) -> None:
    files = RunFiles(run)
    files.read()
    assert [row["version"] for row in files.rollout_rows] == [1, 2, 3]
    assert HOSTILE not in str(files.rollout_rows)


async def test_several_runs(run: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "second" / "metrics.jsonl", version_row(1))
    async with client(run, tmp_path / "second") as made:
        assert [one["name"] for one in await answer(made, "runs")] == ["first", "second"]
        assert (await answer(made, "state", run=1))["metrics"]["version"] == [1]


async def test_an_empty_folder_has_a_page(tmp_path: Path) -> None:
    async with client(tmp_path) as made:
        assert (await answer(made, "state"))["overview"]["version"] == 0
        assert (await answer(made, "lanes"))["lanes"] == []


@pytest.mark.parametrize(
    ("path", "query", "named"),
    [
        ("state", {"run": 1}, "run"),
        ("state", {"run": -1}, "run"),
        ("state", {"run": "x"}, "run"),
        ("state", {"after": "nan"}, "after"),
        ("lanes", {"pixels": 0}, "pixels"),
        ("lanes", {"pixels": 10**9}, "pixels"),
        ("lanes", {"from": 5, "to": 4}, "from"),
        ("span", {"row": "inf"}, "row"),
        ("rollouts", {"least": "1; drop"}, "least"),
    ],
)
async def test_a_wrong_parameter_is_refused_by_name(run: Path, path: str, query: Any, named: str) -> None:
    async with client(run) as made:
        response = await made.get(f"/api/{path}", params=query)
        assert response.status == 400
        assert named in await response.text()


async def test_every_file_of_the_page_is_there_and_no_other(run: Path) -> None:
    on_disk = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.is_file()}
    assert on_disk == {*FILES, "index.html"}
    async with client(run) as made:
        for name in FILES:
            assert (await made.get(f"/static/{name}")).status == 200
        for name in ("..%2fserver.py", "%2fetc%2fpasswd", "index.html/../../server.py", "nothing.js"):
            assert (await made.get(f"/static/{name}")).status == 404


async def test_each_answer_forbids_foreign_scripts_also_errors(run: Path) -> None:
    async with client(run) as made:
        for path in (
            "/",
            "/static/app.js",
            "/api/state",
            "/api/state?run=9",
            "/nothing",
            "/api/image?path=x",
        ):
            headers = (await made.get(path)).headers
            assert (
                "default-src 'none'; script-src 'self'; style-src 'self'"
                in headers["Content-Security-Policy"]
            )
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert headers["Content-Security-Policy"].endswith(
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert headers["Cache-Control"] == "no-store"
        assert HOSTILE not in await (await made.get("/")).text()
        assert (await made.get("/api/rollouts")).content_type == "application/json"


async def test_configuration_and_logs_are_not_given_away(run: Path) -> None:
    async with client(run) as made:
        assert "secret-keys" not in await (await made.get("/api/state")).text()


async def test_pictures_are_confined_to_the_folder_of_pictures(run: Path) -> None:
    outside = run.parent / "outside.png"
    outside.write_bytes(PNG)
    (run / "own.png").write_bytes(PNG)
    (run / "images" / "link.png").symlink_to(outside)
    (run / "images" / "page.svg").write_text("<svg onload='alert(1)'/>")
    async with client(run) as made:
        good = await made.get("/api/image", params={"path": "images/a.png"})
        assert (good.status, good.content_type, await good.read()) == (200, "image/png", PNG)
        for path in (
            "../outside.png",
            "images/../../outside.png",
            str(outside),
            "images/link.png",
            "images/page.svg",
            "own.png",
            "config.yaml",
            "images",
            "images/a.png\0",
            "images/" + "a" * 5000 + ".png",
            "",
        ):
            assert (await made.get("/api/image", params={"path": path})).status == 404, path


async def test_without_the_token_nothing_is_answered(run: Path) -> None:
    async with client(run, token="right") as made:
        for path in ("/", "/static/app.js", "/api/state", "/api/image?path=images/a.png"):
            for query in ({}, {"token": "wrong"}, {"token": ""}, {"token": "rïght"}):
                response = await made.get(path, params=query)
                assert response.status == 403
                assert "first" not in await response.text()


async def test_the_token_moves_from_the_address_into_a_cookie(run: Path) -> None:
    async with client(run, token="right") as made:
        moved = await made.get("/", params={"token": "right"}, allow_redirects=False)
        assert (moved.status, moved.headers["Location"]) == (303, "/")
        assert moved.headers["Set-Cookie"].startswith(f"asyncrl_{made.port}=right;")
        assert "HttpOnly" in moved.headers["Set-Cookie"]
        assert "SameSite=Strict" in moved.headers["Set-Cookie"]
        assert (await made.get("/", params={"token": "right"})).status == 200
        assert (await made.get("/api/state")).status == 200


async def test_on_loopback_other_names_are_refused(run: Path) -> None:
    """A page elsewhere whose name leads to loopback must not read."""
    async with client(run) as made:
        for host, status in (
            ("evil.example", 403),
            ("evil.example:8420", 403),
            ("127.0.0.1:port", 403),
            ("127.0.0.1:99999", 403),
            ("::ffff:127.0.0.1", 403),
            ("localhost:8420", 200),
            ("[::1]:1", 200),
        ):
            assert (await made.get("/api/state", headers={"Host": host})).status == status, host


def test_off_loopback_a_server_has_a_token_in_its_address_and_answers_to_nothing_else(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.observability.dash.serve.is_loopback", lambda host: False)
    addresses, ended = SimpleQueue[str](), Event()
    server = Thread(target=serve_until, args=([run], "127.0.0.1", 0, addresses.put, ended), daemon=True)
    server.start()
    place, _, token = addresses.get(timeout=30.0).partition("?token=")
    assert len(token) >= 32
    with pytest.raises(HTTPError, match="403"):
        urlopen(f"{place}api/state", timeout=30.0)
    with urlopen(f"{place}api/state?token={token}", timeout=30.0) as answered:
        assert json.load(answered)["name"] == "first"
    ended.set()
    server.join(30.0)
    assert not server.is_alive()


@pytest.fixture
def taken() -> Iterator[int]:
    with listening_socket("127.0.0.1", 0) as listener:
        yield listener.getsockname()[1]


def test_a_port_that_is_taken_is_refused_and_the_next_one_found(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=str(taken)):
        listening_socket("127.0.0.1", taken)
    monkeypatch.setattr("asyncrl.observability.dash.serve.PORT", taken)
    with listening_socket("127.0.0.1", None) as listener:
        assert listener.getsockname()[1] != taken


async def test_a_token_of_broken_bytes_is_refused(run: Path) -> None:
    async with client(run, token="right") as made:
        name = f"asyncrl_{made.port}"
        assert (await made.get("/api/state", headers={"Cookie": f"{name}=\udcff"})).status == 403
        assert (await made.get("/api/state", headers={"Host": "127.0.0.1:x"})).status == 403


async def test_a_configuration_that_grows_without_end_is_answered(run: Path) -> None:
    """YAML whose aliases are a billion entries where somebody writes them out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    text = "\n".join([*lines, "model: {path: *a9}", "queue: {max_staleness: *a9}", "run: {versions: *a9}"])
    (run / "config.yaml").write_text(text)
    async with client(run) as made:
        state = await (await made.get("/api/state")).json()
        assert (state["overview"]["bound"], state["overview"]["versions"]) == (None, None)

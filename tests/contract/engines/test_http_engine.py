"""What an engine behind HTTP does beyond the contract, against the stand-in of an SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from engine_cases import (
    SYNC,
    VOCABULARY,
    HostedSglang,
    learner,
    nudged,
    request,
    staged,
    tiny_qwen2,
    until_tokens,
    update,
    weights_of,
)
from transformers import AutoModelForCausalLM
from waiting import eventually

from asyncrl.config.sections.generator import KvAtFlip
from asyncrl.errors import ConfigError, DeadlineError, ProcessDiedError, RunClosedError, WeightSyncError
from asyncrl.generator.engines.engine import SampleLostError
from asyncrl.generator.engines.http import http_link
from asyncrl.generator.engines.http.http_engine import PrioritySemaphore
from asyncrl.generator.engines.http.http_link import ServerRefusedError, metric_sums
from asyncrl.generator.engines.receiver import LostWeightsError, WeightReader
from asyncrl.generator.watches import EngineWatch
from asyncrl.types import NO_VERSION

READER = WeightReader("run", "generator-0", SYNC)


@asynccontextmanager
async def started(folder: Path, kv: KvAtFlip = "keep", **more: Any) -> AsyncIterator[HostedSglang]:
    engine = HostedSglang(folder, kv, **more)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


# ---- samples in flight at a flip


async def test_what_goes_on_after_a_flip_draws_other_numbers_than_what_it_goes_on_from(
    tmp_path: Path,
) -> None:
    async with started(tmp_path, "recompute", spans=False) as engine:
        async with staged(engine, nudged(weights_of(tiny_qwen2()))) as flip:
            sampling = asyncio.ensure_future(engine.sample(request("a", n=4, max_tokens=390)))
            await until_tokens(engine, 10)
            await flip()
        await sampling
        seeds = [body["sampling_params"]["sampling_seed"] for kind, body in asked(engine) if "rid" in body]
        assert len(set(seeds)) == len(seeds) == 8


@pytest.mark.parametrize(("kv", "mode", "flushed"), [("keep", "in_place", False), ("drain", "abort", True)])
async def test_what_is_cached_of_old_weights_is_never_used_for_new_ones(
    tmp_path: Path, kv: str, mode: str, flushed: bool
) -> None:
    """Flushed where nothing is running, else set apart by a key."""
    async with started(tmp_path, kv) as engine:
        await engine.sample(request("a"))
        await update(engine, nudged(weights_of(tiny_qwen2())))
        await engine.sample(request("b"))
        log = engine.stand_in.log
        assert ("pause", mode) in log
        assert [body["flush_cache"] for kind, body in log if kind == "update"] == [flushed]
        keys = [body.get("extra_key") for _, body in asked(engine) if "rid" in body]
        assert keys == [None, None] if flushed else len(set(keys)) == 2


def asked(engine: HostedSglang) -> list[tuple[str, Any]]:
    return [entry for entry in engine.stand_in.log if entry[0] == "generate"]


async def test_a_server_that_does_not_say_which_weights_made_a_token_cannot_keep_the_cache(
    tmp_path: Path,
) -> None:
    engine = HostedSglang(tmp_path, "keep", spans=False)
    with pytest.raises(ConfigError, match=r"generator\.kv.*which weights.*recompute"):
        await engine.start()
    await engine.close()


# ---- the folders


async def test_a_version_is_a_folder_that_transformers_loads_and_two_of_them_stay(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        receiver = engine.receiver(READER)
        for version in (1, 2, 3):
            weights = nudged(weights_of(tiny_qwen2()), seed=version)
            with learner(weights, version) as source:
                await receiver.open(source)
                await receiver.stage(version)
                await receiver.flip(version)
        await receiver.close()
        folder = tmp_path / "versions/run/generator-0"
        assert sorted(path.name for path in folder.iterdir()) == ["00000002", "00000003"]
        loaded = weights_of(AutoModelForCausalLM.from_pretrained(folder / "00000003"))
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)


async def test_a_folder_that_the_server_cannot_load_ends_the_flip_by_name(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        receiver = engine.receiver(READER)
        with learner(weights_of(tiny_qwen2()), 1) as source:
            await receiver.open(source)
            await receiver.stage(1)
            (tmp_path / "versions/run/generator-0/00000001/config.json").unlink()
            with pytest.raises(WeightSyncError, match=r"generator-0: the server at http.*model config"):
                await receiver.flip(1)
        await receiver.close()


# ---- a server that goes away


async def test_tokens_of_a_server_that_restarted_are_not_believed(tmp_path: Path) -> None:
    weights = nudged(weights_of(tiny_qwen2()))
    async with started(tmp_path) as engine:
        receiver = engine.receiver(READER)
        with learner(weights, 7) as source:
            await receiver.open(source)
            await receiver.stage(7)
            await receiver.flip(7)
            assert await receiver.newest(7, 0.0) is None
            engine.stand_in.restart()
            sampling = asyncio.ensure_future(engine.sample(request("a", n=2)))
            with pytest.raises(LostWeightsError, match="default"):
                await receiver.newest(7, 0.0)
            assert engine.version == NO_VERSION
            await receiver.open(source)
            assert await receiver.newest(NO_VERSION, 5.0) == 7
            await receiver.stage(7)
            assert not sampling.done()
            await receiver.flip(7)
            for turn in await sampling:
                assert (turn.versions == 7).all()
        await receiver.close()


@pytest.mark.parametrize("kv", ["keep", "drain"])
async def test_what_a_lost_server_still_owes_is_not_waited_for(tmp_path: Path, kv: str) -> None:
    async with started(tmp_path, kv) as engine:
        plain, silent = engine.stand_in.engine.sample, asyncio.Event()

        async def sample(asked: Any) -> Any:
            if silent.is_set():
                return await plain(asked)
            silent.set()
            return await asyncio.get_running_loop().create_future()

        engine.stand_in.engine.sample = sample  # type: ignore[method-assign]
        sampling = asyncio.ensure_future(engine.sample(request("a")))
        await silent.wait()
        engine.stand_in.restart()
        with pytest.raises(LostWeightsError, match="default"):
            await engine.check_weights()
        engine.stand_in._running.clear()
        new = await update(engine, weights_of(tiny_qwen2()))
        (turn,) = await sampling
        assert (turn.versions == new).all()


async def test_two_engines_at_one_server_find_each_other_out(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        await engine._server.set_label("another.0.0")
        sampling = asyncio.ensure_future(engine.sample(request("a")))
        with pytest.raises(LostWeightsError, match=r"another\.0\.0"):
            await engine.check_weights()
        await engine.check_weights()  # said once; what is held is gone
        await asyncio.sleep(0)
        assert not sampling.done()


async def test_failures_of_the_server_are_tried_again_and_refusals_are_not(tmp_path: Path) -> None:
    async with started(tmp_path) as engine:
        plain, failures = engine.stand_in.engine.sample, [web.HTTPServiceUnavailable, web.HTTPBadGateway]

        async def sample(asked: Any) -> Any:
            if failures:
                raise failures.pop()
            return await plain(asked)

        engine.stand_in.engine.sample = sample  # type: ignore[method-assign]
        (turn,) = await engine.sample(request("a"))
        assert len(turn.output_ids) == 5
        failures += [web.HTTPServiceUnavailable] * 9
        with pytest.raises(SampleLostError, match="failed at a sample of b 3 times"):
            await engine.sample(request("b"))
        failures[:] = [web.HTTPBadRequest]
        with pytest.raises(ServerRefusedError, match="400"):
            await engine.sample(request("c"))
        assert len(await engine.sample(request("d", n=3))) == 3


async def not_json(request: web.Request, label: str) -> web.StreamResponse:
    return web.Response(body=b"\xff\x00{[")


async def brackets(request: web.Request, label: str) -> web.Response:
    return web.Response(text="[" * 100_000, content_type="application/json")


async def half_an_answer(request: web.Request, label: str) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "1000"})
    await answer.prepare(request)
    await answer.write(b'{"meta_info": {"output_token_logprobs": [[-1.0, 5')
    assert request.transport is not None
    request.transport.close()
    return answer


def answers(tokens: Any) -> Any:
    async def generate(request: web.Request, label: str) -> web.StreamResponse:
        meta = {"output_token_logprobs": tokens, "weight_version": label, "finish_reason": {"type": "stop"}}
        return web.json_response({"meta_info": meta})

    return generate


BAD_ANSWERS = {
    "no json": not_json,
    "half an answer": half_an_answer,
    "a number": lambda request, label: answer_json(7),
    "no metadata": lambda request, label: answer_json({"text": "fine"}),
    "tokens that are none": answers([5, 6]),
    "a word for a token": answers([[-1.0, "five", None]]),
    "a token beyond the vocabulary": answers([[-1.0, VOCABULARY, None]]),
    "a negative token": answers([[-1.0, -1, None]]),
    "a log-prob above 0": answers([[1.0, 5, None]]),
    "a log-prob beyond all floats": answers([[-(10**400), 5, None]]),
    "brackets without end": brackets,
    "a log-prob that is no number": answers([[float("nan"), 5, None]]),
    "more tokens than requested": answers([[-1.0, 5, None]] * 6),
}


async def answer_json(answer: Any) -> web.Response:
    return web.json_response(answer)


@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
async def test_an_answer_that_is_none_loses_the_sample_by_name_and_the_next_goes_well(
    tmp_path: Path, bad: Any
) -> None:
    engine = HostedSglang(tmp_path, "recompute", spans=False)
    plain, broken = engine.stand_in._generate, False

    async def generate(request: web.Request) -> Any:
        return await (bad(request, engine.stand_in.label) if broken else plain(request))

    engine.stand_in._generate = generate  # type: ignore[method-assign]
    await engine.start()
    try:
        broken = True
        with pytest.raises(SampleLostError, match="the server failed at a sample of a 3 times: ") as error:
            await engine.sample(request("a"))
        assert "weights" not in str(error.value)
        broken = False
        assert len(await engine.sample(request("b", n=2))) == 2
        assert engine.stats()["running"] == 0
    finally:
        await engine.close()


async def test_a_request_that_the_server_forgets_is_lost_while_the_others_go_on(tmp_path: Path) -> None:
    async with started(tmp_path, progress_deadline_s=0.2) as engine:
        plain = engine.stand_in.engine.sample

        async def sample(asked: Any) -> Any:
            if asked.request_id.startswith("forgotten"):
                return await asyncio.get_running_loop().create_future()
            return await plain(asked)

        engine.stand_in.engine.sample = sample  # type: ignore[method-assign]
        forgotten = asyncio.ensure_future(engine.sample(request("forgotten")))
        async with asyncio.timeout(60):
            while not forgotten.done():
                assert len(await engine.sample(request("b", n=4, max_tokens=40))) == 4
        with pytest.raises(SampleLostError, match=r"has not answered forgotten/0/\d+\. after 0\.2 s"):
            await forgotten
        assert engine.stats()["running"] == 0


async def test_a_server_that_accepts_and_never_answers_is_an_engine_without_progress(tmp_path: Path) -> None:
    """Its metrics do not answer either. The time that tokens may take which it would report late is granted first."""
    engine = HostedSglang(tmp_path, "recompute", spans=False)
    silent, plain = (
        False,
        {name: getattr(engine.stand_in, name) for name in ("_generate", "_metrics", "_abort")},
    )

    def silenced(name: str) -> Any:
        async def answer(request: web.Request) -> Any:
            return await (asyncio.get_running_loop().create_future() if silent else plain[name](request))

        return answer

    for name in plain:
        setattr(engine.stand_in, name, silenced(name))
    await engine.start()
    try:
        silent = True
        sampling = asyncio.ensure_future(engine.sample(request("a", max_tokens=30)))
        await eventually(lambda: engine.stats()["running"] == 1)
        watch = EngineWatch("generator-0", engine, deadline_s=20.0)
        for now in range(1, 51):
            watch.look(now, engine.stats(), flipping=False)
        with pytest.raises(
            DeadlineError, match=r"generator-0 waited 50\.0 s for its engine \(HostedSglang\): a token of"
        ):
            watch.look(51, engine.stats(), flipping=False)
        assert not sampling.done()
    finally:
        await engine.close()
    with pytest.raises(RunClosedError):
        await sampling


async def test_a_server_that_never_answers_at_the_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_link, "PAUSES_S", (10.0, 10.0))
    silent = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silent.wait()
        writer.close()

    engine = HostedSglang(tmp_path, "keep")
    monkeypatch.setattr(engine._server._link, "_deadline_s", 0.2)
    listener = await asyncio.start_server(accept, "127.0.0.1", engine.stand_in.port)
    with pytest.raises(ProcessDiedError, match="generator-0 waited 0 s for the server at http"):
        await engine._server.start()
    await engine._server.close()
    silent.set()
    listener.close()
    await listener.wait_closed()


async def test_a_server_that_is_gone_ends_the_generator_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_link, "PAUSES_S", (10.0, 10.0))  # past the deadline at once
    async with started(tmp_path) as engine:
        await engine.stand_in.close()
        with pytest.raises(ProcessDiedError, match="generator-0 waited 5 s for the server at http"):
            await engine.sample(request("a"))


async def test_an_address_where_no_such_server_is_refused_by_name(tmp_path: Path) -> None:
    engine = HostedSglang(tmp_path, "keep")
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", engine.stand_in.port)
    await site.start()
    with pytest.raises(ConfigError, match=r"generator\.server\.urls.*404"):
        await engine._server.start()
    await engine._server.close()
    await runner.cleanup()


# ---- places and metrics


async def test_places_go_to_the_lowest_ordinal_that_waits() -> None:
    places, order = PrioritySemaphore(1), []

    async def work(ordinal: int) -> None:
        async with places.slot(ordinal):
            order.append(ordinal)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(ordinal) for ordinal in (5, 3, 9, 1)))
    assert order == [5, 1, 3, 9]
    assert (places.taken, places.waiting) == (0, 0)


@pytest.mark.parametrize("granted", [False, True])
async def test_who_stops_waiting_takes_no_place(granted: bool) -> None:
    places, leave = PrioritySemaphore(1), asyncio.Event()

    async def hold() -> None:
        async with places.slot(0):
            await leave.wait()
        if granted:
            waiter.cancel()  # in the step that has granted it the place

    async def wait() -> None:
        async with places.slot(1):
            pytest.fail("it was cancelled")

    holder, waiter = asyncio.create_task(hold()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert (places.taken, places.waiting) == (1, 1)
    if not granted:
        waiter.cancel()
    leave.set()
    await asyncio.gather(holder, waiter, return_exceptions=True)
    assert waiter.cancelled()
    assert (places.taken, places.waiting) == (0, 0)


@pytest.mark.parametrize("line", ["# TYPE a counter", "", "a", "a nothing", 'a{b="c"}', "a{"])
def test_lines_that_are_no_metric_are_overlooked(line: str) -> None:
    assert metric_sums(line + "\nb 1") == {"b": 1.0}

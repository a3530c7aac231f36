"""python -m bench.agents: see the package."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.load import load_config
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.engines.engine import Engine, SampleRequest
from asyncrl.generator.gateway.call_record import CallRecord
from asyncrl.generator.gateway.harness import HarnessAgent
from asyncrl.generator.process import load_engine
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.types import Sampling, Task
from bench.agents import recipes
from bench.agents.adapters import shares
from bench.agents.recorded import compared
from bench.bars import Bar, figures, number, row, verdict_table
from bench.generator.model import SIZES, TINY
from bench.output import bench_parser, machine, write_results
from bench.process import ROOT, Process
from bench.qwen2 import write_qwen2

KINDS: Mapping[str, Mapping[str, Any]] = {
    "single": {"turns": 1, "tool_s": 0.0},
    "tools": {"turns": 4, "tool_s": 0.05},
}
TOKENS, CROWD_TOKENS = 64, 16
"""Of a turn; of one in the crowd."""
SAMPLED_S = 0.1
"""Between two looks at the memory."""
BARS = (
    Bar("single_gateway", 0.9, "single_bare"),
    Bar("tools_gateway", 0.9, "tools_bare"),
    Bar("crowd_kb", 256, most=True),  # so programs × 256 kB bound what a crowd takes
    Bar("unequal_logprobs", 0, most=True),
    Bar("adapter_bytes_share", 1.01, "adapter_parameter_share", most=True),
    *recipes.BARS,
)
NAMES = {
    "single_bare": "one turn: tokens/s of the engine alone",
    "single_gateway": "one turn: tokens/s that programs get",
    "single_gateway / single_bare": "their ratio",
    "tools_bare": "four turns with a tool: tokens/s of the engine alone",
    "tools_gateway": "four turns with a tool: tokens/s that programs get",
    "tools_gateway / tools_bare": "their ratio",
    "crowd_kb": "kB that each program of the crowd takes in the generator's process, all at once",
    "crowd_left_kb": "kB for each of them once all have ended",
    "crowd_s": "seconds that the crowd takes",
    "recorded_logprobs": "recorded log-probs that were compared with the engine's",
    "unequal_logprobs": "those that differ in any bit",
    "adapter_bytes": "bytes of a version of adapters",
    "adapter_bytes_share": "their share of the bytes of all weights",
    "adapter_parameter_share": "their share of the parameters",
    "adapter_bytes_share / adapter_parameter_share": "the ratio of these shares",
    **recipes.names(),
}
CONFIG = """
run: {{name: bench, dir: {folder}, seed: 3}}
model: {{path: {folder}/model}}
tasks: {{source: "bench.generator.model:tasks"}}
reward: {{function: "bench.generator.model:reward"}}
agent: {{function: "{function}"}}
generator: {{slots: {slots}, max_tokens: {tokens}, max_length: 1024, threads: 1}}
"""

Play = Callable[[Task], Awaitable[int]]
"""One rollout. Returns the tokens of the policy."""


def main() -> None:
    args = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="agents-") as folder:
        found = asyncio.run(_measured(Path(folder), args)) | recipes.climbs(args.recipes, Path(folder))
    text = _table(found, args)
    print(text)
    write_results(args.json, {"figures": found, "machine": machine()}, args.table, text)


async def _measured(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    load_function(f"{ROOT}/examples/calculator_agent.py:write_model_folder", "bench")(folder / "model")
    found: dict[str, float] = {}
    if args.rounds:
        sizes = TINY if args.tiny else SIZES
        async with _plays(folder, sizes, args.at_once, "bench.agents.program:run", TOKENS) as plays:
            found = await _speeds(plays, args)
        found |= figures([await shares(folder / "agents.yaml")], BARS)
        found |= await compared(folder / "agents.yaml", KINDS["tools"], args.at_once, TOKENS)
    async with _plays(folder, TINY, args.at_once, "bench.agents.crowd:run", CROWD_TOKENS) as plays:
        return {**found, **await _crowd(plays["gateway"], folder, args)}


@asynccontextmanager
async def _plays(
    folder: Path, sizes: Mapping[str, Any], slots: int, function: str, tokens: int
) -> AsyncIterator[Mapping[str, Play]]:
    """Rollouts by an engine of its own. tokens: of a turn"""
    write_qwen2(
        folder / "model",
        **sizes,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=8192,  # so that hardly a turn ends by itself
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    path = folder / "agents.yaml"
    text = CONFIG.format(folder=folder, slots=slots, tokens=tokens, function=function)
    path.write_text(text, encoding="utf-8")
    config = load_config(path)
    tokenizer = policy_tokenizer(config)
    engine = load_engine(config, tokenizer, "bench", load_weights=True)
    await engine.start()
    player = HarnessAgent(engine, tokenizer, config)
    try:
        sampling = Sampling(max_tokens=tokens)
        yield {"bare": _bare(engine, Chat(tokenizer), sampling), "gateway": _through(player, sampling)}
    finally:
        await player.close()
        await engine.close()


async def _speeds(plays: Mapping[str, Play], args: argparse.Namespace) -> dict[str, float]:
    numbers = itertools.count()

    async def speed(kind: str, way: str, rollouts: int) -> float:
        at_once, begun = asyncio.Semaphore(args.at_once), time.perf_counter()

        async def one() -> int:
            async with at_once:
                return await plays[way](Task(next(numbers), "123456", KINDS[kind]))

        tokens = sum(await asyncio.gather(*(one() for _ in range(rollouts))))
        return tokens / (time.perf_counter() - begun)

    ways = [(kind, way) for kind in KINDS for way in plays]
    for kind, way in ways:
        await speed(kind, way, args.at_once)
    rounds: list[dict[str, float]] = []
    for repetition in range(args.rounds):
        rounds.append({})
        for kind, way in ways[:: -1 if repetition % 2 else 1]:  # a machine that gets slower favours neither
            rounds[-1][f"{kind}_{way}"] = await speed(kind, way, args.rollouts // KINDS[kind]["turns"])
        print(rounds[-1], file=sys.stderr, flush=True)
    return figures(rounds, BARS)


async def _crowd(play: Play, folder: Path, args: argparse.Namespace) -> dict[str, float]:
    numbers, data = itertools.count(1 << 20), {**KINDS["tools"], "socket": str(folder / "crowd")}

    async def played(programs: int) -> int:
        """The most memory meanwhile, in bytes."""
        tasks = [Task(next(numbers), "1", data) for _ in range(programs)]
        playing, most = asyncio.gather(*map(play, tasks)), 0
        while not playing.done():
            most = max(most, psutil.Process().memory_info().rss)
            await asyncio.wait({playing}, timeout=SAMPLED_S)
        playing.result()
        return most

    with Process(["bench.agents.crowd"], folder / "crowd.log", data["socket"]) as process:
        await asyncio.to_thread(process.hears)
        await played(args.at_once)
        before, begun = psutil.Process().memory_info().rss, time.perf_counter()
        most = await played(args.crowd)
        seconds, left = time.perf_counter() - begun, psutil.Process().memory_info().rss
    kb = {"crowd_kb": most - before, "crowd_left_kb": left - before}
    return {name: grown / 1e3 / args.crowd for name, grown in kb.items()} | {"crowd_s": seconds}


def _bare(engine: Engine, chat: Chat, sampling: Sampling) -> Play:
    async def play(task: Task) -> int:
        ids, made = chat.open([{"role": "user", "content": str(task.prompt)}]), 0
        for index in range(task.data["turns"]):
            if index:
                await asyncio.sleep(task.data["tool_s"])
            drawn, name = replace(sampling, seed=index), f"bare/{task.ordinal}/{index}"
            (turn,) = await engine.sample(SampleRequest(name, ids, drawn, task.ordinal))
            made += len(turn.output_ids)
            answer = chat.after([{"role": "user", "content": str(index)}], None)
            ids = np.concatenate([ids, turn.output_ids, answer])
        return made

    return play


def _through(player: HarnessAgent, sampling: Sampling) -> Play:
    async def play(task: Task) -> int:
        record: CallRecord = await player.play(task, f"gateway/{task.ordinal}", sampling)
        return int(record.rollout({}).loss_mask.sum())

    return play


def _table(found: Mapping[str, float], args: argparse.Namespace) -> str:
    lines = [row((name, number(found[key], ",.3g"))) for key, name in NAMES.items() if key in found]
    return "\n".join(
        [
            "# What agents cost, and what they learn",
            "",
            f"`python -m bench.agents`, medians of {args.rounds} rounds of one run, {args.at_once} programs at once, "
            f"{TOKENS} tokens a turn; the crowd is {args.crowd} programs, each with four turns of {CROWD_TOKENS} "
            f"tokens by a model of no size. {machine()}",
            "",
            row(("figure", "value")),
            row(("---", "---")),
            *lines,
            "",
            *verdict_table(found, BARS),
            "",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("agents", "Programs that call the policy beside the bare engine.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-once", type=int, default=32, help="programs, and slots of the engine")
    parser.add_argument("--rollouts", type=int, default=256, help="turns of one measurement")
    parser.add_argument("--crowd", type=int, default=500, help="programs at once when memory is measured")
    parser.add_argument("--recipes", nargs="*", choices=recipes.STATED, default=[*recipes.STATED])
    parser.add_argument("--tiny", action="store_true", help="a model of no size, to see that all works")
    return parser


if __name__ == "__main__":
    main()

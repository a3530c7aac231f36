"""Play seeds, or one seed with everything that happened: python -m tests.simulation.run --seed 17 --trace"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable

from .scenario import scenario
from .world import Trace, World


class SeedError(AssertionError):
    """What has failed under which seed, and how to see it again."""

    def __init__(self, seed: int, error: BaseException) -> None:
        command = f"python -m tests.simulation.run --seed {seed} --trace"
        super().__init__(f"seed {seed}: {type(error).__name__}: {error}\nplay it again: {command}")
        self.seed, self._error = seed, error

    def __reduce__(self) -> tuple[type[SeedError], tuple[int, Exception]]:
        """From another process: the error in words, since not every one can be pickled."""
        return type(self), (self.seed, RuntimeError(f"{type(self._error).__name__}: {self._error}"))


def simulate(seed: int, trace: Trace | None = None) -> World:
    """One run, to its end and as it must be. SeedError if it is not."""
    world = World(scenario(seed), trace)
    try:
        world.play()
    except Exception as error:
        raise SeedError(seed, error) from error
    return world


def simulate_all(seeds: Iterable[int]) -> Counter[str]:
    """Messages, virtual seconds and faults of all of them."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        world = simulate(seed)
        seen.update(world.struck)
        seen.update({"messages": world.messages, "seconds": int(world.loop.time()), "seeds": 1})
        seen["versions"] += len(world.history.steps)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds from there on")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.trace else logging.CRITICAL)
    if args.trace:
        print(scenario(args.seed), flush=True)
        simulate(args.seed, lambda at, what: print(f"{at:9.3f} {what}", file=sys.stdout))
        return
    began, worked = time.perf_counter(), time.process_time()
    seen = simulate_all(range(args.seed, args.seed + args.count))
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    print({**seen, "seeds_per_s": round(args.count / seconds, 1), "per_cpu_s": round(args.count / worked, 1)})


if __name__ == "__main__":
    main()

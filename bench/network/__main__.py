"""python -m bench.network: see the package. About 5 minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from asyncrl.rpc.keys import make_keys
from bench.bars import Bar, Measured, figures, number, row, verdict_table
from bench.network.hosts import CARD, Host, Network
from bench.output import bench_parser, machine, write_results
from bench.process import Process
from bench.sync.model import LEARNERS, SHAPES, total_bytes
from bench.sync.runner import Others, clear

GENERATORS = 4

OTHERS = {
    "gloo_raw": ("raw", 1, "one gloo send of 256 MB"),
    "gloo_per_tensor_1": ("per_tensor", 1, "gloo broadcast of each tensor, to one rank"),
    "gloo_packed_1": ("packed", 1, "gloo broadcast of 64 MB buckets, to one rank"),
    "gloo_per_tensor_2": ("per_tensor", 2, "gloo broadcast of each tensor, to two ranks"),
    "gloo_packed_4": ("packed", 4, "gloo broadcast of 64 MB buckets, to four ranks"),
}
OURS = {
    "asyncrl_tp1": "asyncrl, to one rank",
    "asyncrl_tp2": "asyncrl, to two ranks, each its half",
    "asyncrl_4": "asyncrl, to four generators, which hand buckets on",
    "asyncrl_4_direct": "the same without relays (sync.fanout=0)",
}
BARS = (
    Bar("asyncrl_tp1", 0.85, over="gloo_raw"),
    Bar("asyncrl_tp2", 2.0, over="gloo_per_tensor_2"),
    Bar("asyncrl_4", 1.0, over="gloo_packed_4"),
)


class Ours:
    """A learner rank on each of the first two hosts, and generators on the others. sync: keys of that section"""

    def __init__(
        self,
        millions: int,
        hosts: Sequence[Host],
        folder: Path,
        stack: ExitStack,
        sync: Mapping[str, float],
    ) -> None:
        self._bytes = total_bytes(millions)
        make_keys(folder / "keys")
        self._told = {"millions": millions, "backend": "tcp", "keys": str(folder / "keys")}
        self._sync, self._version = sync, 0
        self._folder, self._stack = folder, stack
        self._learners = [
            self._start("bench.sync.learner", hosts[rank], {"rank": rank}) for rank in range(LEARNERS)
        ]
        endpoints = [learner.hears() for learner in self._learners]
        away = hosts[LEARNERS:]
        shapes: Mapping[str, list[tuple[Host, dict[str, object]]]] = {
            "asyncrl_tp1": [(away[0], {"rank": 0, "world": 1})],
            "asyncrl_tp2": [(host, {"rank": rank, "world": 2}) for rank, host in enumerate(away[:2])],
            "asyncrl_4": [(host, {"rank": 0, "world": 1, "relays": True}) for host in away],
            "asyncrl_4_direct": [(host, {"rank": 0, "world": 1}) for host in away],
        }
        self._generators = {
            name: [
                self._start(
                    "bench.sync.generator",
                    host,
                    shape | {"who": f"{name}-{number}", "endpoints": endpoints},
                    {} if "relays" in shape else {"fanout": 0},
                )
                for number, (host, shape) in enumerate(ranks)
            ]
            for name, ranks in shapes.items()
        }
        for ranks in self._generators.values():
            for rank in ranks:
                rank.hears()

    def gb_per_s(self, name: str) -> float:
        """Publish a version, and have these generators take it."""
        self._version += 1
        for process in (*self._generators[name], *self._learners):
            process.tell(self._version)
        begun = min(learner.hears()["begun"] for learner in self._learners)
        ended = max(generator.hears()["ended"] for generator in self._generators[name])
        clear(self._generators[name])
        return self._bytes / (ended - begun) / 1e9

    def _start(
        self, module: str, host: Host, shape: Mapping[str, object], sync: Mapping[str, object] | None = None
    ) -> Process:
        told = {**self._told, **shape, "sync": {**self._sync, "host": host.address, **(sync or {})}}
        return self._stack.enter_context(host_process(module, self._folder, host, told))


def host_process(module: str, folder: Path, host: Host, told: Mapping[str, object]) -> Process:
    """A process of that host, with its log in the folder."""
    log = folder / f"{len(list(folder.iterdir()))}-{module}-{host.name}.log"
    return Process([module], log, told, begins=host.moving_there())


def measured(millions: int, gbit: float, repetitions: int, bucket_mb: float) -> dict[str, float]:
    """Medians of interleaved repetitions, over cards of so many Gbit/s. The first round is not kept."""
    with tempfile.TemporaryDirectory(prefix="network-") as place, ExitStack() as stack:
        folder, limit = Path(place), gbit / 8
        network = stack.enter_context(Network(LEARNERS + GENERATORS, folder))
        network.limit(limit * 1e9)
        hosts = network.hosts
        begins = [host.moving_there() for host in (hosts[0], *hosts[LEARNERS:])]
        others = Others(millions, folder, stack, begins, CARD)
        ours = Ours(millions, hosts, folder, stack, {"network_gb_s": limit, "bucket_mb": bucket_mb})
        rounds = []
        for _ in range(1 + repetitions):
            found = {name: others.gb_per_s(method, sinks) for name, (method, sinks, _) in OTHERS.items()}
            found |= {name: ours.gb_per_s(name) for name in OURS}
            print("  ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
            rounds.append({"limit": limit, **found})
    return figures(rounds[1:], BARS, [(name, "limit") for name in (*OTHERS, *OURS)])


def table(links: Mapping[float, Measured], millions: int, repetitions: int, bucket_mb: float) -> str:
    """Markdown. links: Gbit/s of a card → what was measured"""
    labels = {name: label for name, (*_, label) in OTHERS.items()} | OURS
    lines = [
        "# A new policy's way over a network",
        "",
        f"`python -m bench.network`, medians of {repetitions} interleaved repetitions. {machine()}",
        f"{millions}M parameters in bf16, buckets of {bucket_mb:g} MB (sync.bucket_mb). Each rank has a host of its "
        "own, whose card sends and receives at most so much. GB/s of unique bytes, from `publish` to verified live "
        "parameters at the last rank; gloo starts with the gathered model at one rank and verifies nothing. In brackets"
        " the share of what one card can do: more than 1 is possible where two hosts send to two.",
        "",
        row(["GB/s", *(f"{gbit:g} Gbit/s" for gbit in links)]),
        row(["---", *("--:" for _ in links)]),
    ]
    for name, label in labels.items():
        cells = (
            f"{number(found.get(name), '.3f')} ({number(found.get(f'{name} / limit'), '.2f')})"
            for found in links.values()
        )
        lines.append(row([label, *cells]))
    for gbit, found in links.items():
        lines += ["", f"## {gbit:g} Gbit/s", "", *verdict_table(found, BARS)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = bench_parser("network", "Weights over a network of hosts whose cards have a limit.")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=100, choices=list(SHAPES), help="millions")
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0], help="of a card, per second")
    parser.add_argument("--bucket-mb", type=float, default=64.0)
    args = parser.parse_args()
    links = {gbit: measured(args.parameters, gbit, args.repetitions, args.bucket_mb) for gbit in args.gbit}
    text = table(links, args.parameters, args.repetitions, args.bucket_mb)
    print(text)
    write_results(
        args.json,
        {"by_gbit_per_s": links, "bucket_mb": args.bucket_mb, "machine": machine()},
        args.table,
        text,
    )


if __name__ == "__main__":
    main()

"""How long a version takes over a slow link: whole, as its changes, and as deflated changes.

    python -m bench.network.changes --json FILE --table FILE

Two learner ranks and one generator, on hosts of their own. Each step moves all weights by 1e-6, as AdamW does at that
learning rate. A version's time runs from `publish` to verified parameters. About 7 minutes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from asyncrl.rpc.keys import make_keys
from bench.bars import Bar, Measured, figures, number, row, verdict_table
from bench.network.__main__ import host_process
from bench.network.hosts import Host, Network
from bench.output import bench_parser, machine, write_results
from bench.sync.model import LEARNERS, SHAPES, total_bytes
from bench.sync.tensors import LR

FORMS: dict[str, tuple[dict[str, Any], float]] = {
    "whole": ({"delta": "never"}, 0.0),
    "changes": ({"delta": "always"}, 0.0),
    "deflated": ({"delta": "always"}, math.inf),
}
"""Keys of sync, and the speed below which a link gets deflated changes."""

MBIT = [100.0, 1000.0, 2500.0, 5000.0, 10_000.0]

BARS = (Bar("bytes.deflated", 0.02, most=True),)


class Form:
    """The ranks of a learner and a generator between which versions have one of FORMS."""

    def __init__(
        self, form: str, millions: int, hosts: Sequence[Host], folder: Path, stack: ExitStack
    ) -> None:
        sync, deflate_bytes_s = FORMS[form]
        keys = folder / f"keys-{form}"
        make_keys(keys)
        told = {"millions": millions, "backend": "tcp", "keys": str(keys), "drifts": True}
        self._whole, self._version = total_bytes(millions), 0

        def start(module: str, host: Host, more: Mapping[str, object]) -> Any:
            said = {**told, **more, "sync": {**sync, "snapshots": 2, "fanout": 0, "host": host.address}}
            return stack.enter_context(host_process(module, folder, host, said))

        speed = {"deflate_bytes_s": deflate_bytes_s}
        *learners, away = hosts
        self._learners = [
            start("bench.sync.learner", host, {"rank": rank, **speed}) for rank, host in enumerate(learners)
        ]
        shape = {"rank": 0, "world": 1, "endpoints": [learner.hears() for learner in self._learners]}
        self._generator = start("bench.sync.generator", away, shape)
        self._generator.hears()

    def take(self) -> tuple[float, float]:
        """Publish a version and take it: seconds, and bytes over those of a whole one."""
        self._version += 1
        for process in (self._generator, *self._learners):
            process.tell(self._version)
        begun = min(learner.hears()["begun"] for learner in self._learners)
        taken = self._generator.hears()
        return taken["ended"] - begun, taken["received"] / self._whole


def measured(millions: int, mbit: float, repetitions: int) -> dict[str, float]:
    """Medians of interleaved repetitions. The first two versions of each form are not kept: one is taken whole."""
    with tempfile.TemporaryDirectory(prefix="changes-") as place, ExitStack() as stack:
        folder, limit = Path(place), mbit / 8 * 1e6
        network = stack.enter_context(Network(LEARNERS + 1, folder))
        network.limit(limit)
        forms = {form: Form(form, millions, network.hosts, folder, stack) for form in FORMS}
        rounds = []
        for _ in range(2 + repetitions):
            found: dict[str, float] = {}
            for name, form in forms.items():
                found[f"seconds.{name}"], found[f"bytes.{name}"] = form.take()
                found[f"limit.{name}"] = found[f"bytes.{name}"] * total_bytes(millions) / limit
            print("  ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)
            rounds.append(found)
    beside = [(f"seconds.{name}", "seconds.whole") for name in FORMS if name != "whole"]
    return figures(rounds[2:], BARS, [*beside, ("seconds.deflated", "seconds.changes")])


def table(links: Mapping[float, Measured], millions: int, repetitions: int) -> str:
    """Markdown. links: Mbit/s of a card → what was measured"""
    lines = [
        "# Changes over slow links",
        "",
        f"`python -m bench.network.changes`, medians of {repetitions} interleaved repetitions. {machine()}",
        f"{millions}M parameters in bf16, two learner ranks and one generator. All weights move by {LR:g} a version. "
        "From `publish` to verified parameters; in brackets the wire alone. Bytes over those of a whole version.",
    ]
    for mbit, found in links.items():
        lines += [
            "",
            f"## {mbit:g} Mbit/s",
            "",
            row(["a version", "bytes", "seconds"]),
            row(["---", "--:", "--:"]),
        ]
        for name in FORMS:
            seconds, limit = (number(found.get(f"{what}.{name}"), ".2f") for what in ("seconds", "limit"))
            lines.append(row([name, number(found.get(f"bytes.{name}"), ".4f"), f"{seconds} ({limit})"]))
        lines += ["", *verdict_table(found, BARS)]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = bench_parser(
        "network.changes", "A version over a slow link: whole, as changes, as deflated changes."
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=100, choices=list(SHAPES), help="millions")
    parser.add_argument("--mbit", type=float, nargs="+", default=MBIT, help="of a card, per second")
    args = parser.parse_args()
    links = {mbit: measured(args.parameters, mbit, args.repetitions) for mbit in args.mbit}
    text = table(links, args.parameters, args.repetitions)
    print(text)
    write_results(args.json, {"by_mbit_per_s": links, "machine": machine()}, args.table, text)


if __name__ == "__main__":
    main()

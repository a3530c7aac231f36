"""How many bytes a version takes if changes alone travel, or projections in 8 bits, and what making them costs.

    python -m bench.sync.fewer_bytes --parameters 100 --json FILE --table FILE

For each form: bytes of a version and of its changes, plain and deflated, as shares of a whole version in bf16; the
learner's pause and the time to write projections out again for the embedded engine, over a plain copy of as much bf16.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from asyncrl.learner.ranks import process_group
from asyncrl.sync.delta.delta import add, bits, find_changes
from asyncrl.sync.delta.records import changes_to_bytes, deflate, read
from asyncrl.sync.layout.layout import layout_bytes, whole_layout
from asyncrl.sync.layout.quantized import quantized_layout
from asyncrl.sync.tensors.quantization import QuantizedShards, dequantize
from asyncrl.sync.tensors.shards import LiveShards, Shards, TensorBuffer, layout_of
from bench.output import bench_parser, machine, write_results
from bench.sync.model import SHAPES, shapes, total_bytes
from bench.sync.tensors import LR, drawn

WARM_UP, STEPS = 10, 2
MOST = 1 << 16
"""Elements of one tensor that are trained, about: more of them change the figure by nothing."""

FORMS: tuple[str | None, ...] = (None, "int8", "fp8")
CPU = torch.device("cpu")


def delta_bytes(millions: int, lr: float = LR, quantization: str | None = None) -> dict[str, float]:
    """The bytes of the last two deltas of some AdamW steps on fp32 masters, between their bf16 copies, or between those
    in 8 bits; over the bytes of versions in bf16: plain, and deflated. Each step is bit-exact, else RuntimeError.

    Gradients keep their signs, so that every step has the full length `lr`: with noisier ones it is shorter, and fewer
    weights change.
    """
    sent, total = Counter[str](), 0
    for name, shape in shapes(millions).items():
        weights = drawn(name, shape)
        some = weights[: max(1, MOST // shape[-1])] if weights.dim() > 1 else weights[:MOST]
        sent.update(_deltas(name, some, lr, quantization))
        total += STEPS * 2 * some.numel()
    return {kind: count / total for kind, count in sent.items()}


def _deltas(name: str, weights: Tensor, lr: float, quantization: str | None) -> Counter[str]:
    """Bytes of the deltas of one parameter."""
    master = weights.float().requires_grad_()
    master.data += 1e-5 * torch.randn_like(master)  # masters lie anywhere between two bf16 numbers
    direction = torch.randn_like(master)
    optimizer = torch.optim.AdamW([master], lr=lr, weight_decay=0.0)
    staged, sent = _form(name, master, quantization), Counter[str]()
    for step in range(WARM_UP + STEPS):
        master.grad = direction + 0.1 * torch.randn_like(master)
        optimizer.step()
        for held, new in zip(staged, _form(name, master, quantization), strict=True):
            plain = changes_to_bytes(find_changes(held, new))
            deflated = deflate(plain, held.element_size())
            if step >= WARM_UP:
                sent.update(plain=plain.numel(), deflated=deflated.numel())
            for record in (plain, deflated):
                moved = held.clone()
                (changes,) = read(record, [(held.numel(), held.element_size())])
                add(moved, changes)
                if not torch.equal(bits(moved), bits(new)):
                    raise RuntimeError(f"step {step}: the delta does not give the new weights")
            held.copy_(new)
    return sent


def _form(name: str, master: Tensor, quantization: str | None) -> list[Tensor]:
    return _taken({name: master.detach().bfloat16()}, quantization).shards.parts


def _taken(live: Mapping[str, Tensor], quantization: str | None) -> TensorBuffer:
    source = _source(live, quantization)
    buffer = TensorBuffer(source.layout, CPU)
    buffer.take(source)
    return buffer


def _source(live: Mapping[str, Tensor], quantization: str | None) -> LiveShards:
    shards = Shards(layout_of(live), live)
    quantizes = quantization is not None and len(quantized_layout(shards.layout, quantization)) > len(live)
    return QuantizedShards(shards, str(quantization), process_group) if quantizes else shards


def version_bytes_ratio(millions: int, quantization: str | None) -> float:
    whole = whole_layout({name: (shape, "bfloat16") for name, shape in shapes(millions).items()})
    return layout_bytes(quantized_layout(whole, quantization)) / total_bytes(millions)


def times(millions: int, repetitions: int) -> dict[str, float]:
    """Seconds of a pause and of writing out, each over a plain copy that is measured beside it: medians."""
    live = {name: drawn(name, shape) for name, shape in shapes(millions).items()}
    plain = Shards(layout_of(live), live)
    copy, into = TensorBuffer(plain.layout, CPU), {name: tensor.clone() for name, tensor in live.items()}
    found: dict[str, list[float]] = {}
    for form in FORMS[1:]:
        source, buffer = _source(live, form), _taken(live, form)
        staged = {name: parts[0] for name, parts in buffer.shards.tensors.items()}
        for _ in range(repetitions):
            plain_s = copy.take(plain)
            found.setdefault(f"pause_over_copy.{form}", []).append(buffer.take(source) / plain_s)
            found.setdefault(f"write_out_over_copy.{form}", []).append(
                _seconds(lambda staged=staged: dequantize(staged, into)) / plain_s  # type: ignore[misc]
            )
    return {name: statistics.median(values) for name, values in found.items()}


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = bench_parser("sync.fewer_bytes", "Versions of fewer bytes.")
    parser.add_argument("--parameters", type=int, default=100, choices=list(SHAPES), help="millions")
    parser.add_argument("--repetitions", type=int, default=9)
    args = parser.parse_args()
    found: dict[str, float] = {}
    for form in FORMS:
        name = form or "bf16"
        found[f"version_bytes.{name}"] = version_bytes_ratio(args.parameters, form)
        for kind, share in delta_bytes(args.parameters, quantization=form).items():
            found[f"delta_bytes.{name}.{kind}"] = share
    found |= times(args.parameters, args.repetitions)
    text = table(found, args.parameters)
    print(text)
    measured = {"figures": found, "machine": machine(), "million_parameters": args.parameters}
    write_results(args.json, measured, args.table, text)


def table(found: Mapping[str, float], millions: int) -> str:
    rows = [
        f"Versions of {millions}M parameters, over one in bf16; AdamW at a rate of {LR:g}. Times over a plain copy.",
        "",
        "| form | bytes | bytes of changes | deflated | the learner's pause | writing out |",
        "|---|---|---|---|---|---|",
    ]
    for form in FORMS:
        name = form or "bf16"
        pause, out = (found.get(f"{what}.{name}") for what in ("pause_over_copy", "write_out_over_copy"))
        times = ["1" if pause is None else f"{pause:.1f}", "" if out is None else f"{out:.1f}"]
        share = found[f"version_bytes.{name}"]
        plain, deflated = (found[f"delta_bytes.{name}.{kind}"] for kind in ("plain", "deflated"))
        rows.append(f"| {name} | {share:.3f} | {plain:.4f} | {deflated:.4f} | {times[0]} | {times[1]} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    main()

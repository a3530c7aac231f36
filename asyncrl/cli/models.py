"""Commands on a model: export, evaluation, answers; and benchmarks."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

from asyncrl.cli.command import Arguments, Command, loading, option, read_config


def _export(arguments: Arguments) -> int:
    from asyncrl.launch.folder.run_folder import config_of, find_run

    run = find_run(arguments.run)
    config = config_of(run) if arguments.config is None else read_config(arguments)
    loading(arguments, f"torch and the checkpoint of {run}")
    from asyncrl.learner.export import export

    version = export(config, run, Path(arguments.folder), arguments.version)
    print(f"{arguments.folder}: the policy of version {version} of {run}, for transformers")
    return 0


def _eval(arguments: Arguments) -> int:
    config = read_config(arguments)
    loading(arguments, f"torch and the model {arguments.model}")
    from asyncrl.evaluate import evaluate

    print(json.dumps(evaluate(config, arguments.model), indent=2))
    return 0


def _generate(arguments: Arguments) -> int:
    config = read_config(arguments)
    loading(arguments, f"torch and the model {arguments.model}")
    from asyncrl.evaluate import generate

    for text in generate(config, arguments.model, arguments.prompt):
        print(text)
    return 0


def _bench(arguments: Arguments) -> int:
    loading(arguments, f"the benchmark {arguments.theme}")
    return importlib.import_module(f"asyncrl.bench.{arguments.theme}").main(arguments.words) or 0


MODEL = (option("--model", required=True, metavar="PATH", help="Hugging Face folder, e.g. runs/demo/final"),)

COMMANDS: dict[str, Command] = {
    "export": Command(
        _export,
        "make a model of a checkpoint",
        "Write the policy of a checkpoint as a Hugging Face folder: weights, config, tokenizer, adapters if there are "
        "any. In one process on the CPU, whatever saved it; for a run that ended without final/, or an older version.",
        "asyncrl export demo --version 50 demo-at-50",
        (
            option("run", metavar="RUN", help="folder of a run, or its name under runs/"),
            option("folder", metavar="DIR", help="is made"),
            option("--version", type=int, metavar="N", help="of the checkpoint; the newest unless given"),
            option(
                "--config",
                metavar="FILE",
                help="of the run, where its folder has no config.yaml or models have moved",
            ),
        ),
        takes_config=False,
    ),
    "eval": Command(
        _eval,
        "score a model on the held-out tasks",
        "Answer the held-out tasks of evaluation.source and evaluation.sets with a model, sampled as these say, and "
        "print the scores as JSON.",
        "asyncrl eval configs/recipes/demo.yaml --model runs/demo/final",
        MODEL,
    ),
    "generate": Command(
        _generate,
        "answer prompts with a model",
        "Print the answer of a model to each prompt, with the engine and the sampling of the configuration.",
        "asyncrl generate configs/recipes/demo.yaml --model runs/demo/final --prompt 47+85=",
        (
            *MODEL,
            option("--prompt", required=True, action="append", metavar="TEXT", help="may be repeated"),
        ),
    ),
    "bench": Command(
        _bench,
        "measure",
        "Run one of the benchmarks that need real processes; words after the theme are its own.",
        "asyncrl bench utilization --help",
        (
            option("theme", choices=["utilization", "climb"]),
            option("words", nargs=argparse.REMAINDER, metavar="…", help="passed on to the benchmark"),
        ),
        takes_config=False,
    ),
}

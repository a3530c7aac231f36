"""`asyncrl demo`: a small model learns a task, from nothing but the installed package: two-digit addition, or another
of `RECIPES`.

    configuration and tokenizer ──▸ warm-up (asyncrl sft) ──▸ training (asyncrl train)
    DIR/addition/model              DIR/addition/warm         DIR/demo

The warm-up is made once: later demos begin with the training. The configurations are in `configs/recipes/`.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asyncrl.config.load import CONFIGS, load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, ProcessDiedError
from asyncrl.launch.folder.run_folder import remove_run, run_folder
from asyncrl.system.signals import die_with
from asyncrl.tasks import lookups

MARK = ".demo"
"""A file that a demo puts into the folder of its run. A folder without it is the user's and is never removed."""


def _write_adder(folder: Path, config: Config, layers: int = 4) -> None:
    from asyncrl.tasks.addition import write_model_folder  # takes seconds, for transformers

    write_model_folder(folder, layers=layers)


def _write_speaker(
    folder: Path, config: Config, pieces: Sequence[str] = (), demonstrations: int = 400
) -> None:
    """A model for the texts of a recipe with several turns. See `write_tiny_model`."""
    from asyncrl.tasks.tiny_model import demonstrated_texts, write_tiny_model

    texts = asyncio.run(demonstrated_texts(config, demonstrations))
    write_tiny_model(folder, texts, pieces, least=demonstrations // 8)


def _write_viewer(folder: Path, config: Config) -> None:
    from asyncrl.tasks.pictures import write_model_folder  # takes seconds, for transformers

    write_model_folder(folder)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The model and the task of a demo. minutes: of the warm-up, and of the training on two CPU cores.

    warm_up, training: names of configurations
    own_name: `run.name` of the training. A demo replaces an earlier one of this name; any other name is the user's.
    """

    about: str
    minutes: tuple[int, int]
    warm_up: str
    training: str
    own_name: str
    write_model: Callable[[Path, Config], None]


def _of_turns(
    name: str, about: str, minutes: tuple[int, int], pieces: Sequence[str] = (), demonstrations: int = 400
) -> Recipe:
    write = partial(_write_speaker, pieces=pieces, demonstrations=demonstrations)
    return Recipe(about, minutes, f"{name}.yaml", f"{name}.yaml", f"demo-{name}", write)


PAGES = ["find me a ", ", price lower than ", " dollars\nsearch page", "] [", "[buy now] [back to search]"]
CODE = ["```python\n", "\n```"]
RECIPES = {
    "addition": Recipe("two-digit addition", (2, 3), "sft_addition.yaml", "demo.yaml", "demo", _write_adder),
    "sokoban": _of_turns("sokoban", "Sokoban", (1, 2), demonstrations=40),
    "webshop": _of_turns("webshop", "to buy in a web shop", (3, 2), PAGES),
    "python": _of_turns("python", "to compute with programs", (3, 2), CODE, demonstrations=16),
    "pictures": Recipe(
        "to answer questions about pictures",
        (1, 1),
        "pictures.yaml",
        "pictures.yaml",
        "demo-pictures",
        _write_viewer,
    ),
    "iteration": Recipe(
        "to continue a sequence for many steps",
        (1, 2),
        "iteration.yaml",
        "iteration.yaml",
        "demo-iteration",
        partial(_write_adder, layers=2),
    ),
    "search": _of_turns("search", "to look up answers", (2, 1), [lookups.OPEN, lookups.CLOSE]),
}


@dataclass(frozen=True, slots=True)
class Demo:
    """The folders of one demo and the checked configuration of its training."""

    recipe: Recipe
    folder: Path
    model: Path
    warm: Path
    config: Config

    @property
    def needs_warm_up(self) -> bool:
        """Whether the training begins with the warmed-up model and that model is missing."""
        return Path(self.config.model.path) == self.warm and not (self.warm / "config.json").exists()

    @property
    def replaces(self) -> bool:
        """Whether the training takes the place of an earlier demo's."""
        return run_folder(self.config) == self.folder / self.recipe.own_name and not self.config.run.resume

    def plan(self, trains: bool = True) -> str:
        """The steps to come, for the user to read before the first one starts."""
        warm_up, training = self.recipe.minutes
        time = f"about {warm_up} min, only this time" if self.needs_warm_up else "is there already"
        lines = [f"A small model learns {self.recipe.about}.", f"  warm-up   {time}: {self.warm}"]
        if trains:
            folder = run_folder(self.config)
            earlier = " (replaces the earlier run)" if self.replaces and folder.exists() else ""
            lines.append(f"  training  about {training} min on two CPU cores: {folder}{earlier}")
        return "\n".join(lines)


def demo(folder: str, overrides: Sequence[str] = (), name: str = "addition") -> Demo:
    """A demo of the recipe `name` whose model and run lie in `folder`. Raises ConfigError for wrong "key=value" words,
    before any work."""
    if name not in RECIPES:
        raise ConfigError("--recipe", name, f"is none of {', '.join(RECIPES)}", "give one of these")
    recipe, models = RECIPES[name], Path(folder) / name
    words = [_word("run.dir", folder), _word("model.path", models / "warm"), *overrides]
    config = load_config(CONFIGS / "recipes" / recipe.training, words)
    return Demo(recipe, Path(folder), models / "model", models / "warm", config)


def check_folder(demo: Demo) -> None:
    """Raise ConfigError if the run's folder is there and not an earlier demo's."""
    folder = run_folder(demo.config)
    if not demo.replaces or not os.path.lexists(folder) or _is_a_demos(folder):
        return
    if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
        rule = f"{folder} is there already, and no demo has made it (it holds no {MARK})"
        remedy = (
            f"set run.name=NAME, or give another folder by --dir; remove {folder} if a demo of an earlier "
        )
        raise ConfigError("run.name", demo.recipe.own_name, rule, f"{remedy}version of asyncrl has made it")


def clear_folder(demo: Demo) -> None:
    """Remove the run of an earlier demo, which would block the name, and mark the folder of this one. ConfigError if
    that run is still alive, or no demo's."""
    check_folder(demo)
    if not demo.replaces:
        return
    folder = run_folder(demo.config)
    if _is_a_demos(folder):
        remove_run(demo.config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def warm_up(demo: Demo) -> None:
    """Make the warmed-up model if it is missing.

    Raises ConfigError if its folder cannot be made, holds other files, or another demo is at work on it, and
    ProcessDiedError if the warm-up failed; its own message is on the terminal.
    """
    if not demo.needs_warm_up:
        return
    with _locked(demo.warm.parent):
        if not demo.needs_warm_up:
            return
        if os.path.lexists(demo.warm) and (not demo.warm.is_dir() or any(demo.warm.iterdir())):
            rule = f"{demo.warm} is no folder of a model, and the warmed-up model goes there"
            raise ConfigError("--dir", str(demo.folder), rule, "move it away, or give another folder")
        demo.recipe.write_model(demo.model, demo.config)
        # An interrupted warm-up leaves no half of a model under `warm`.
        unfinished = demo.warm.with_name("warm.partial")
        shutil.rmtree(unfinished, ignore_errors=True)
        _run_sft(demo, unfinished)
        unfinished.rename(demo.warm)
    print(f"the warmed-up model: {demo.warm}", flush=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One demo at a time makes a model in `folder`. The kernel frees the lock when the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        rule = f"{folder} cannot be made or written: {error.strerror}"
        raise ConfigError("--dir", str(folder.parent), rule, "give a folder that you may write") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = f"another demo is making the warmed-up model in {folder}"
            remedy = "wait until it trains, or give another folder"
            raise ConfigError("--dir", str(folder.parent), rule, remedy) from None
        yield


def _is_a_demos(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / MARK).is_file()


def _word(key: str, path: str | Path) -> str:
    """A word of the command line, for any path."""
    return f"{key}={json.dumps(str(path), ensure_ascii=False)}"


def _run_sft(demo: Demo, output: Path) -> None:
    """In a process of its own: the launcher of the run that follows stays small."""
    shutil.rmtree(demo.warm.parent / "warm-up-sft", ignore_errors=True)  # of one that was interrupted
    words = [_word("run.dir", demo.warm.parent), "run.name=warm-up", _word("model.path", demo.model)]
    words += [_word("sft.output", output)]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "sft", str(CONFIGS / "recipes" / demo.recipe.warm_up), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=die_with(os.getpid()),
    )
    if done.returncode:
        raise ProcessDiedError(f"the warm-up ended with exit code {done.returncode}", done.returncode)

"""`asyncrl retrain`: one step of a run again, in this process, on groups that were saved.

    RUN/checkpoints/v000008 ──▸ policy ──┐
    RUN/groups/v000010 ──────▸ groups ───┴──▸ version step ──▸ its metrics beside those of the run

Nothing is published and nothing of the run changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner import checkpoint
from asyncrl.learner.reporting.saved_groups import folder_of, load_groups
from asyncrl.learner.startup import open_backend
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import VersionReport, version_step
from asyncrl.types import Version


def retrain(
    config: Config, run_folder: Path, version: Version, files: Sequence[Path] = ()
) -> tuple[Version, VersionReport]:
    """Make the step that published `version` again.

    Args:
        config: of the run, maybe with other values, e.g. another loss.
        files: of groups, or folders of such; none: those that the run has saved of this version.

    Returns:
        The version of the checkpoint that the policy came from, `version - 1` or the newest before it, and the report
        of the step. The metrics are those of the run, up to rounding, if the checkpoint is of `version - 1` and the
        groups are all.

    Raises:
        ConfigError: No groups, no checkpoint before the version, or a model that learns in a pool.
        NonFiniteGroups: Groups have, or lead to, numbers that are not finite.
    """
    if pools := requirements.models_trained_in_pools(config):
        at = config.placement.key_of(pools[0])
        rule = f"the {pools[0]} learns in a pool, and this process trains alone"
        raise ConfigError(f"{at}.where", "pool", rule, f"set {at}.where=colocated")
    saved = folder_of(run_folder, version)
    if not files and not saved.is_dir():
        remedy = "set telemetry.groups_every=N for the run, or name files with --groups"
        raise ConfigError("version", version, f"the run has no groups of it in {saved.parent}", remedy)
    groups = [*load_groups(files or [saved])]
    began = checkpoint.newest_before(run_folder, version)
    backend = open_backend(config)
    try:
        training = version_step(backend, config)
        folder = checkpoint.of_version(run_folder, began)
        backend.load(folder / checkpoint.STATE)
        training.controls = training.controls.restored(
            checkpoint.read_meta(folder).controls, config.algorithm
        )
        training.add(groups, version - 1)
        return began, training.step(version - 1)
    finally:
        backend.close()

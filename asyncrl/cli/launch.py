"""`asyncrl launch`: a run for the scheduler of a cluster."""

from __future__ import annotations

from pathlib import Path

from asyncrl.cli.command import Arguments, Command, option, read_config
from asyncrl.config.rules import at_least


def _kubernetes(arguments: Arguments) -> int:
    from asyncrl.cluster.kubernetes.manifests import as_yaml, manifests
    from asyncrl.cluster.kubernetes.order import PodOrder
    from asyncrl.config.load import OWN_EYES
    from asyncrl.system.disk import replace_text

    order = PodOrder(
        image=arguments.image,
        namespace=arguments.namespace,
        claim=arguments.claim,
        storage=arguments.storage,
        kueue_queue=arguments.queue,
        env_secret=arguments.env_secret,
        gpus_per_node=arguments.gpus_per_node,
        gpu_resource=arguments.gpu_resource,
        max_generators=arguments.max_generators,
    )
    text = as_yaml(manifests(read_config(arguments), order))
    if arguments.output is None:
        print(text, end="")
    else:
        replace_text(Path(arguments.output), text, mode=OWN_EYES)
    return 0


def _slurm(arguments: Arguments) -> int:
    from asyncrl.cluster.slurm.job import JobOrder, launcher_command, script, submit

    config = read_config(arguments)
    order = JobOrder(
        partition=arguments.partition,
        account=arguments.account,
        time=arguments.time,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_node=arguments.cpus_per_node,
        more=arguments.sbatch,
    )
    text = script(config, order, launcher_command(arguments.config, arguments.overrides))
    if arguments.dry_run:
        print(text, end="")
    else:
        print(f"job {submit(config, text)}: {config.run.name}")
    return 0


GPUS_PER_NODE = option(
    "--gpus-per-node",
    type=at_least(0),
    default=8,
    metavar="N",
    help="of one node, 8 unless given; 0: no rank gets a GPU",
)

COMMANDS: dict[str, Command] = {
    "launch k8s": Command(
        _kubernetes,
        "the objects of a run on Kubernetes, as YAML",
        "Print the objects of a run for `kubectl apply -f -`: queue, learner, generators, pools, the configuration, "
        "and the keys of queue.keys as secrets. Nothing is started. docs/kubernetes.md has what the cluster needs.",
        "asyncrl launch k8s configs/recipes/demo.yaml --image asyncrl:gpu queue.keys=KEYS | kubectl apply -f -",
        (
            option("--image", required=True, help="of all processes: packaging/docker makes one"),
            option(
                "--output",
                metavar="FILE",
                help="that gets the objects, for your eyes alone; stdout unless given",
            ),
            option("--namespace", default="default", metavar="NAME", help="of all objects"),
            option(
                "--claim",
                metavar="NAME",
                help="a volume that all pods may write to; one is claimed unless given",
            ),
            option("--storage", default="100Gi", metavar="SIZE", help="of volumes that are claimed"),
            option("--queue", metavar="NAME", help="of Kueue, which then admits the pods"),
            option(
                "--env-secret",
                metavar="NAME",
                help="a secret whose entries become variables, e.g. HF_TOKEN",
            ),
            GPUS_PER_NODE,
            option(
                "--gpu-resource",
                default="nvidia.com/gpu",
                metavar="NAME",
                help="of one GPU; nvidia.com/gpu unless given",
            ),
            option(
                "--max-generators",
                type=at_least(1),
                metavar="N",
                help="up to which an autoscaler starts more than generator.count, while the learner waits",
            ),
        ),
    ),
    "launch slurm": Command(
        _slurm,
        "a run as a job of Slurm",
        "Submit a job with a component for the learner, one for the generators and one for each pool, in which "
        "`asyncrl train --on slurm` starts a step for each process. A job that is queued again goes on from the newest "
        "checkpoint. docs/slurm.md has what the nodes must share.",
        "asyncrl launch slurm configs/recipes/math/math_7b.yaml --partition gpu --time 24:00:00",
        (
            option("--partition", metavar="NAME", help="of all components, as the next two"),
            option("--account", metavar="NAME", help="that is charged"),
            option("--time", metavar="TIME", help="until the run is saved and queued again, e.g. 24:00:00"),
            GPUS_PER_NODE,
            option(
                "--cpus-per-node",
                type=at_least(0),
                default=0,
                metavar="N",
                help="of one node; unless given, nodes have as many as they need",
            ),
            option(
                "--sbatch",
                action="append",
                default=[],
                metavar="WORD",
                help="a further word for each component, e.g. --sbatch=--constraint=h100; may be repeated",
            ),
            option("--dry-run", action="store_true", help="print the script, and submit nothing"),
        ),
    ),
}

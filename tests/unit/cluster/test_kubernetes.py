"""The objects of a run on Kubernetes: by the official schemas, by the fields of JobSet, and by what they must hold."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.cli import main
from asyncrl.cluster.kubernetes.manifests import as_yaml, manifests
from asyncrl.cluster.kubernetes.order import CONFIG, PodOrder, in_pods
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.rpc.keys import make_keys

ORDER = PodOrder(image="asyncrl:gpu")
JOBSET_SPEC = {
    "replicatedJobs", "network", "successPolicy", "failurePolicy", "startupPolicy", "suspend", "coordinator",
    "managedBy", "ttlSecondsAfterFinished", "volumeClaimPolicies",
}  # fmt: skip
"""The fields of JobSetSpec in v1alpha2; below those of ReplicatedJob, FailurePolicy and FailurePolicyRule."""
REPLICATED_JOB = {"name", "groupName", "template", "replicas", "dependsOn"}
FAILURE_POLICY = {"maxRestarts", "restartStrategy", "rules"}
FAILURE_RULE = {
    "name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs",
}  # fmt: skip
EVERYTHING = (
    "generator.count=3",
    "generator.engine=vllm",
    "generator.vllm.tensor_parallel=2",
    "generator.grace_s=90",
    "learner.processes=16",
    "placement.rewards.where=pool",
    "placement.generators.small_ones={count: 2, grace_s: 20, vllm: {tensor_parallel: 1}}",
    "queue.store=redis",
    "queue.redis_url=redis://:se%2Fcret@127.0.0.1:6379/0",
    "telemetry.prometheus_port=9400",
)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    make_keys(tmp_path / "keys")
    return [f"queue.keys={tmp_path / 'keys'}"]


def config_of(words: list[str], *more: str) -> Config:
    return load_config("configs/recipes/demo.yaml", [*words, *more])


def by_kind(config: Config, order: PodOrder = ORDER) -> dict[str, dict[str, Any]]:
    """Kind and name of each object → the object, as it is read back."""
    objects = yaml.safe_load_all(as_yaml(manifests(config, order)))
    return {f"{one['kind']} {one['metadata']['name']}": one for one in objects}


def templates(objects: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Component of each pod → its template."""
    found = {}
    for one in objects.values():
        spec = one.get("spec", {})
        jobs = [job["template"]["spec"]["template"] for job in spec.get("replicatedJobs", ())]
        for template in [*jobs, *([spec["template"]] if "template" in spec else [])]:
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template
    return found


@pytest.mark.parametrize("more", [(), EVERYTHING])
def test_objects_fit_the_official_schemas(words: list[str], more: tuple[str, ...]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    order = dataclasses.replace(ORDER, kueue_queue="gpus", env_secret="tokens", max_generators=6)
    for one in by_kind(config_of(words, "telemetry.prometheus_port=9400", *more), order).values():
        if one["kind"] != "JobSet":
            validate.validate(one, "1.30", strict=True)
            continue
        job = one["spec"]["replicatedJobs"][0]["template"]
        validate.validate(
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, **job}, "1.30", strict=True
        )


def test_the_jobset_has_fields_of_its_kind_alone(words: list[str]) -> None:
    jobset = by_kind(config_of(words))["JobSet demo-learner"]
    spec = jobset["spec"]
    assert jobset["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert spec.keys() <= JOBSET_SPEC
    (job,) = spec["replicatedJobs"]
    assert job.keys() <= REPLICATED_JOB
    policy = spec["failurePolicy"]
    assert policy.keys() <= FAILURE_POLICY
    assert policy["maxRestarts"] == 3
    (rule,) = policy["rules"]
    assert rule.keys() <= FAILURE_RULE
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (of_pods,) = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert (of_pods["action"], of_pods["onExitCodes"]["values"]) == ("FailJob", [ConfigError.exit_code])


def test_a_run_has_these_objects(words: list[str]) -> None:
    assert [*by_kind(config_of(words))] == [
        "PersistentVolumeClaim demo-work",
        "ConfigMap demo-config",
        "Secret demo-client-key",
        "Secret demo-server-key",
        "Service demo-queue",
        "StatefulSet demo-queue",
        "JobSet demo-learner",
        "Deployment demo-generators",
    ]
    order = dataclasses.replace(ORDER, claim="shared", max_generators=6)
    found = [*by_kind(config_of(words, *EVERYTHING), order)]
    assert "PersistentVolumeClaim demo-work" not in found
    assert found[:5] == [
        "Secret demo-config",
        "Secret demo-client-key",
        "Secret demo-server-key",
        "Secret demo-redis",
        "Service demo-redis",
    ]
    assert found[-2:] == ["Deployment demo-rewards", "HorizontalPodAutoscaler demo-generators"]


def test_ranks_are_spread_over_the_fewest_pods_and_each_has_a_gpu(words: list[str]) -> None:
    objects = by_kind(config_of(words, *EVERYTHING))
    job = objects["JobSet demo-learner"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    pods = templates(objects)
    container = pods["learner"]["spec"]["containers"][0]
    assert container["command"] == [
        "asyncrl", "learner", CONFIG, "run.resume=true", "--nodes", "2", "--node", "$(NODE)",
    ]  # fmt: skip
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": index}}} in container["env"]
    gpus = {
        name: pod["spec"]["containers"][0].get("resources", {}).get("limits") for name, pod in pods.items()
    }
    assert gpus == {
        "redis": None,
        "queue": None,
        "learner": {"nvidia.com/gpu": "8"},
        "generators": {"nvidia.com/gpu": "2"},
        "generators-small-ones": {"nvidia.com/gpu": "1"},
        "rewards": None,
    }
    without = templates(by_kind(config_of(words, *EVERYTHING), dataclasses.replace(ORDER, gpus_per_node=0)))
    assert "limits" not in without["learner"]["spec"]["containers"][0]["resources"]
    assert without["learner"]["spec"]["containers"][0]["command"][-1] == "run.resume=true"


def test_the_key_of_the_server_is_the_queues_alone(words: list[str]) -> None:
    for name, pod in templates(by_kind(config_of(words, "placement.rewards.where=pool"))).items():
        (secrets,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "secrets"]
        held = [source["secret"]["name"] for source in secrets["projected"]["sources"]]
        own = ["demo-server-key"] if name == "queue" else []
        assert held == ["demo-client-key", *own], name
        (container,) = pod["spec"]["containers"]
        assert "secrets" not in [mount["name"] for mount in container["volumeMounts"]]


def test_pods_have_no_rights(words: list[str]) -> None:
    for pod in templates(by_kind(config_of(words, *EVERYTHING))).values():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] > 0
        assert not spec["automountServiceAccountToken"]
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            rights = container["securityContext"]
            assert (rights["allowPrivilegeEscalation"], rights["capabilities"]) == (False, {"drop": ["ALL"]})


def test_processes_have_time_for_their_last_work(words: list[str]) -> None:
    pods = templates(by_kind(config_of(words, *EVERYTHING)))
    assert pods["generators"]["spec"]["terminationGracePeriodSeconds"] == 120
    assert pods["generators-small-ones"]["spec"]["terminationGracePeriodSeconds"] == 50
    assert pods["learner"]["spec"]["terminationGracePeriodSeconds"] > 600


def test_pods_read_a_configuration_of_the_cluster(words: list[str]) -> None:
    objects = by_kind(config_of(words, *EVERYTHING))
    assert "ConfigMap demo-config" not in objects
    text = objects["Secret demo-config"]["stringData"]["config.yaml"]
    read = yaml.safe_load(text)
    assert read["queue"]["address"] == "tcp://demo-queue:5555"
    assert read["queue"]["keys"] == "/keys"
    assert read["queue"]["redis_url"] == "redis://:se%2Fcret@demo-redis:6379/0"
    assert read["telemetry"]["prometheus_host"] == "0.0.0.0"
    assert objects["Secret demo-redis"]["stringData"] == {"password": "se/cret"}
    open_parts = [one for kind, one in objects.items() if not kind.startswith("Secret")]
    assert "cret@" not in json.dumps(open_parts)
    command = templates(objects)["queue"]["spec"]["containers"][0]["command"]
    assert command[-1] == "queue.address=tcp://0.0.0.0:5555"


def test_a_redis_elsewhere_stays_there(words: list[str]) -> None:
    elsewhere = "redis://:pw@cache.example:6379/1"
    config = config_of(words, "sync.backend=redis", f"sync.redis_url={elsewhere}")
    assert in_pods(config, ORDER).sync.redis_url == elsewhere
    assert "StatefulSet demo-redis" not in by_kind(config)


def test_probes_ask_the_endpoint_for_prometheus(words: list[str]) -> None:
    more = ("telemetry.prometheus_port=9400", "launch.load_deadline_s=600")
    pods = templates(by_kind(config_of(words, *more)))
    container = pods["generators"]["spec"]["containers"][0]
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 600
    assert container["livenessProbe"]["httpGet"] == {"path": "/metrics", "port": "metrics"}
    assert {"name": "metrics", "containerPort": 9400} in container["ports"]
    assert pods["generators"]["metadata"]["annotations"]["prometheus.io/port"] == "9400"
    plain = templates(by_kind(config_of(words)))["generators"]["spec"]["containers"][0]
    assert not {"startupProbe", "livenessProbe"} & plain.keys()


def test_the_autoscaler_follows_the_learners_waits(words: list[str]) -> None:
    order = dataclasses.replace(ORDER, max_generators=6)
    objects = by_kind(config_of(words, *EVERYTHING), order)
    spec = objects["HorizontalPodAutoscaler demo-generators"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 6)
    metric = spec["metrics"][0]["external"]["metric"]
    assert metric["name"] == "asyncrl_perf_wait_fraction"
    assert metric["selector"]["matchLabels"] == {"whom": "groups", "app_kubernetes_io_instance": "demo"}
    assert "replicas" not in objects["Deployment demo-generators"]["spec"]
    assert by_kind(config_of(words))["Deployment demo-generators"]["spec"]["replicas"] == 1


def test_a_pool_of_generators_is_a_deployment_of_its_own(words: list[str]) -> None:
    objects = by_kind(config_of(words, *EVERYTHING), dataclasses.replace(ORDER, max_generators=6))
    assert objects["Deployment demo-generators-small-ones"]["spec"]["replicas"] == 2, "not scaled by itself"
    container = templates(objects)["generators-small-ones"]["spec"]["containers"][0]
    assert container["command"][:4] == ["asyncrl", "generator", CONFIG, "--pool"]
    assert container["command"][4] == "small_ones"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_kueue_admits_each_workload(words: list[str]) -> None:
    objects = by_kind(config_of(words, *EVERYTHING), dataclasses.replace(ORDER, kueue_queue="gpus"))
    queued = {
        kind for kind, one in objects.items() if "kueue.x-k8s.io/queue-name" in one["metadata"]["labels"]
    }
    assert queued == {
        "StatefulSet demo-redis",
        "StatefulSet demo-queue",
        "JobSet demo-learner",
        "Deployment demo-generators",
        "Deployment demo-generators-small-ones",
        "Deployment demo-rewards",
    }


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.name=My_Run", "run.name = 'My_Run': names objects and hosts of Kubernetes"),
        ("run.dir=/data/runs", "run.dir = '/data/runs': lies outside of /work"),
        ("run.dir=../runs", "run.dir = '../runs': lies outside of /work"),
        ("queue.keys=null", "queue.keys = None: must be set"),
        ("queue.keys=nowhere", "queue.keys = 'nowhere': server.key: No such file"),
        ("sync.host=10.0.0.1", "sync.host = '10.0.0.1': is the address of one machine"),
        ("learner.devices='0'", "learner.devices = '0': names devices of one machine, and Kubernetes"),
        (
            "telemetry.prometheus_port=null",
            "telemetry.prometheus_port = None: is not set, and the autoscaler",
        ),
    ],
)
def test_what_cannot_work_in_pods_is_refused_by_key(words: list[str], word: str, message: str) -> None:
    order = dataclasses.replace(ORDER, max_generators=6)
    with pytest.raises(ConfigError) as caught:
        manifests(config_of(words, "telemetry.prometheus_port=9400", word), order)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("namespace", "BAD_NS", "--namespace = 'BAD_NS': is no name of Kubernetes"),
        ("storage", "lots", "--storage = 'lots': is no size of Kubernetes"),
        ("image", " ", "--image = ' ': is empty"),
        ("max_generators", 3, "--max-generators = 3: must be above generator.count=3"),
    ],
)
def test_an_order_that_no_cluster_takes_is_refused(
    words: list[str], field: str, value: object, message: str
) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError) as caught:
        manifests(config_of(words, "generator.count=3"), dataclasses.replace(ORDER, **changes))
    assert str(caught.value).startswith(message)


def test_a_process_that_no_node_holds_is_refused(words: list[str]) -> None:
    order = dataclasses.replace(ORDER, gpus_per_node=1)
    with pytest.raises(ConfigError, match="--gpus-per-node = 1: generators: a node must have 2"):
        manifests(config_of(words, *EVERYTHING), order)


def test_an_own_redis_needs_a_password(words: list[str]) -> None:
    config = config_of(words, "queue.store=redis", "queue.redis_url=redis://127.0.0.1:6379/0")
    with pytest.raises(ConfigError, match=r"queue\.redis_url = .*so it needs one password"):
        manifests(config, ORDER)


def test_the_command_prints_them(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "launch",
        "k8s",
        "configs/recipes/demo.yaml",
        "--image",
        "asyncrl:cpu",
        "--namespace",
        "rl",
        *words,
    ]
    assert main(command) == 0
    objects = [*yaml.safe_load_all(capsys.readouterr().out)]
    assert {one["metadata"]["namespace"] for one in objects} == {"rl"}
    file = tmp_path / "run.yaml"
    assert main([*command, "--output", str(file)]) == 0
    assert [*yaml.safe_load_all(file.read_text())] == objects
    assert file.stat().st_mode & 0o777 == 0o600
    assert main([*command, "queue.keys=null"]) == 2
    assert "asyncrl keys DIR" in capsys.readouterr().err

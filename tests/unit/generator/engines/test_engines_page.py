"""docs/engines.md: its settings are valid, its commands those that the tests and the code use."""

from __future__ import annotations

import shlex
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from pages import blocks, text_of

from asyncrl.config.rules import check_section
from asyncrl.config.schema import Config, GeneratorConfig, PlacementConfig
from asyncrl.config.sections.generator import ServerConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.http import sglang_server, vllm_server
from asyncrl.generator.engines.http.http_link import key_from, url_of
from asyncrl.generator.engines.vllm.vllm_start import EXTENSION

PAGE = text_of("docs/engines.md")


def generator(**settings: Any) -> GeneratorConfig:
    server = ServerConfig(**settings.pop("server", {}))
    section = GeneratorConfig(**settings, server=server)
    check_section(section, "generator")
    return section


def test_the_settings_are_valid() -> None:
    pools, *others = map(yaml.safe_load, blocks("docs/engines.md", "yaml"))
    made = Config(
        generator=generator(**pools["generator"]), placement=PlacementConfig(**pools["placement"])
    ).generator_pools
    assert {name: pool.engine for name, pool in made.items()} == {
        "": "vllm",
        "older": "vllm",
        "large": "vllm",
        "cpus": "transformers",
    }
    assert [generator(**one["generator"]).engine for one in others] == ["vllm_server", "sglang"]


def test_every_engine_of_the_config_is_on_the_page() -> None:
    engines = set(get_args(get_type_hints(GeneratorConfig)["engine"]))
    told = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}
    assert engines - {"scripted"} <= told


def test_the_commands_start_what_the_engines_ask_for() -> None:
    for_vllm, for_sglang = (set(shlex.split(text)) for text in blocks("docs/engines.md", "sh"))
    needed = {word for word in vllm_server.START.split() if word.startswith(("--", "VLLM", "processed"))}
    assert needed | {EXTENSION} <= for_vllm
    assert set(shlex.split(vllm_server.__doc__.split("\n\n")[1])) <= for_vllm  # type: ignore[union-attr]
    assert set(shlex.split(sglang_server.__doc__.split("\n\n")[1])) <= for_sglang  # type: ignore[union-attr]


URLS = ["http://a:1", "http://b:1"]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"engine": "vllm_server"}, "generator.server.urls"),
        ({"engine": "vllm", "server": {"urls": URLS}}, "generator.server.urls"),
        ({"engine": "vllm_server", "count": 3, "server": {"urls": URLS}}, "generator.server.urls"),
        ({"engine": "vllm_server", "server": {"urls": [URLS[0]] * 2}}, "generator.server.urls"),
        ({"engine": "vllm_server", "server": {"urls": ["a:1"]}}, "generator.server.urls"),
        ({"engine": "vllm", "server": {"folder": "/f"}}, "generator.server.folder"),
        ({"engine": "vllm_server", "server": {"urls": URLS, "deadline_s": 0}}, "generator.server.deadline_s"),
        ({"engine": "sglang", "server": {"urls": URLS}}, "generator.server.folder"),
        ({"engine": "sglang", "server": {"urls": URLS, "folder": "/f"}, "top_k": 5}, "generator.engine"),
        ({"engine": "scripted", "kv": "recompute"}, "generator.kv"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        generator(**settings)
    assert refused.value.key == key


def test_each_generator_has_a_server_of_its_own() -> None:
    assert [url_of(URLS, f"generator-{k}") for k in range(2)] == URLS
    for name in ("generator-2", "mine"):
        with pytest.raises(ConfigError, match=name):
            url_of(URLS, name)


def test_a_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    assert (key_from("SERVER_KEY"), key_from(None)) == ("secret", None)
    with pytest.raises(ConfigError, match=r"generator\.server\.key_variable = 'OTHER_KEY'"):
        key_from("OTHER_KEY")

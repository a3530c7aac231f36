"""The engine behind HTTP that `generator.engine` and `generator.server` name."""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.http.http_engine import HttpEngine
from asyncrl.generator.engines.http.http_link import HttpLink, key_from
from asyncrl.generator.engines.http.server import Server
from asyncrl.generator.engines.http.sglang_server import SglangServer
from asyncrl.generator.engines.http.vllm_server import VllmServer
from asyncrl.generator.engines.transformers.transformers_engine import load_end_ids


def load_server_engine(config: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> HttpEngine:
    """For the generator `name`. Raises ConfigError."""
    return HttpEngine(load_server(config, name, load_end_ids(config.model, tokenizer)), config.generator)


def load_server(config: Config, name: str, end_ids: list[int]) -> Server:
    """end_ids: tokens that end an answer. Raises ConfigError."""
    ours = config.generator.server
    link = HttpLink(name, url_of(ours.urls, name), ours.deadline_s, key_from(ours.key_variable))
    if config.generator.engine == "sglang":
        assert ours.folder is not None
        return SglangServer(link, config, end_ids, Path(ours.folder) / config.run.name / name)
    return VllmServer(link, config, end_ids)


def url_of(urls: list[str], name: str) -> str:
    """The server of a generator. Each updates its own, so of several generator-k uses the k-th. Raises ConfigError.

    >>> url_of(["http://a:1", "http://b:1"], "generator-1"), url_of(["http://a:1"], "mine")
    ('http://b:1', 'http://a:1')
    """
    if len(urls) == 1:
        return urls[0]
    number = re.search(r"-(\d+)$", name)
    if number is None or int(number[1]) >= len(urls):
        raise ConfigError(
            "generator.server.urls",
            urls,
            f"say nothing of a server for the generator {name!r}: generator-K asks the one at K, from 0",
            "start it with --name generator-K, or add its server",
        )
    return urls[int(number[1])]

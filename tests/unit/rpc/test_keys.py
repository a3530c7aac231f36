"""Key files: made private, read strictly; and which peers they admit."""

from __future__ import annotations

from pathlib import Path

import pytest
from zmq.utils import z85

from asyncrl.errors import ConfigError
from asyncrl.rpc.keys import CLIENT_FILE, SERVER_FILE, client_keys, make_keys, server_keys


def test_both_sides_know_each_others_public_key_and_nobody_else_reads_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    server, client = server_keys(str(folder)), client_keys(str(folder))
    assert server is not None
    assert client is not None
    assert (server.public, server.client) == (client.server, client.public)
    assert server.secret not in (folder / CLIENT_FILE).read_bytes()
    for name in (SERVER_FILE, CLIENT_FILE):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="there already"):
        make_keys(folder)


def test_no_folder_no_keys() -> None:
    assert (server_keys(None), client_keys(None)) == (None, None)


def test_a_bad_key_file_is_refused_with_its_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"queue\.keys .* No such file .* make the folder with `asyncrl keys"
    ):
        client_keys(str(tmp_path))
    make_keys(tmp_path)
    path = tmp_path / SERVER_FILE
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"others may read server\.key\. Remedy: chmod 600"):
        server_keys(str(tmp_path))
    path.chmod(0o600)
    for text in ("", "public = x\n", path.read_text().replace("client", "friend"), "\0", "é"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no key file"):
            server_keys(str(tmp_path))


def test_only_the_one_client_key_is_admitted(tmp_path: Path) -> None:
    make_keys(tmp_path)
    keys = server_keys(str(tmp_path))
    assert keys is not None
    ask = [b"1.0", b"7", b"", b"10.0.0.2", b"", b"CURVE"]
    known, unknown = z85.decode(keys.client), z85.decode(keys.public)
    assert keys.admits([*ask, known])
    for request in (
        [*ask, unknown],
        [*ask[:5], b"NULL"],
        [*ask[:5], b"PLAIN", known],
        [*ask, known, b""],
        [],
    ):
        assert not keys.admits(request)

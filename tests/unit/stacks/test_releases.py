"""Releases from every kind of index in a pip configuration."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from moediag.errors import NoSuchRelease, StackError
from moediag.lab.stacks import releases
from moediag.lab.stacks.index_pages import IndexFile, Unreachable, read_index, read_links
from moediag.lab.stacks.indexes import IndexConfig, read_config, redacted
from tests.unit.stacks.loopback import Loopback

JSON = "application/vnd.pypi.simple.v1+json"


class Server(Loopback):
    """Serves pages by path."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[int, str, bytes]] = {}
        super().__init__()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        return self.pages.get(path, (404, "text/html", b""))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = Server()
    yield running
    running.stop()


def page(*entries: dict[str, object]) -> tuple[int, str, bytes]:
    whole = {"meta": {"api-version": "1.1"}, "name": "demo", "versions": [], "files": entries}
    return 200, JSON, json.dumps(whole).encode()


def entry(name: str, **more: object) -> dict[str, object]:
    return {"filename": name, "url": f"../../files/{name}", "hashes": {}, **more}


def only_files(server: Server) -> list[IndexFile]:
    return read_index(server.url, "demo", IndexConfig(indexes=(server.url,), timeout=5))


def test_json_index_provides_dates_yanks_and_prereleases(server: Server) -> None:
    server.pages["/simple/demo/"] = page(
        entry("demo-2.0rc1-py3-none-any.whl", **{"upload-time": "2025-03-01T10:00:00Z"}),
        entry(
            "demo-1.10-py3-none-any.whl",
            **{"upload-time": "2025-02-01T10:00:00.123456Z", "requires-python": ">=3.9"},
        ),
        entry("demo-1.10.tar.gz", **{"upload-time": "2025-02-01T10:00:30Z"}),
        entry("demo-1.9-py3-none-any.whl", yanked="broken wheel"),
        entry("demo-1.9.exe"),
        entry("other-7-py3-none-any.whl"),
    )
    found = releases.releases("Demo", IndexConfig(indexes=(server.url,)))
    assert [r.version for r in found] == ["1.9", "1.10", "2.0rc1"]
    old, middle, candidate = found
    assert old.yanked and old.yanked_reason == "broken wheel" and old.uploaded is None
    assert middle.uploaded == datetime(2025, 2, 1, 10, 0, 0, 123456, tzinfo=timezone.utc)
    assert middle.settled == datetime(2025, 2, 1, 10, 0, 30, tzinfo=timezone.utc)
    assert middle.requires_python == ">=3.9" and not middle.yanked and not middle.prerelease
    assert candidate.prerelease


def test_a_release_is_yanked_only_when_all_its_files_are(server: Server) -> None:
    server.pages["/simple/demo/"] = page(
        entry("demo-1.0-py3-none-any.whl", yanked=True), entry("demo-1.0.tar.gz", yanked=False)
    )
    (found,) = releases.releases("demo", IndexConfig(indexes=(server.url,)))
    assert not found.yanked


def test_html_index_may_lack_dates(server: Server) -> None:
    text = b"""<!DOCTYPE html><body>
    <a href="../../f/demo-1.0-py3-none-any.whl#sha256=ab" data-requires-python="&gt;=3.9"
       data-yanked>demo</a>
    <a href="https://e.org/demo-1.1.tar.gz" data-upload-time="2025-01-02T03:04:05.1234567Z">x</a>
    <a href="https://e.org/demo-1.2.tar.gz" data-upload-time="yesterday">x</a>
    <a href="/simple/other/">other</a></body>"""
    server.pages["/simple/demo/"] = (200, "text/html", text)
    first, second, third = only_files(server)
    assert (first.version, first.requires_python, first.yanked) == ("1.0", ">=3.9", "")
    assert first.uploaded is None and third.uploaded is None
    assert second.uploaded == datetime(2025, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert second.yanked is None


def test_json_dates_may_be_missing(server: Server) -> None:
    server.pages["/simple/demo/"] = page(
        entry("demo-1.tar.gz"),
        entry("demo-3.tar.gz", **{"upload-time": "2025-01-02T03:04:05.123456Z"}),
    )
    one, three = only_files(server)
    assert one.uploaded is None
    assert three.uploaded is not None and three.uploaded.year == 2025


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, b"<html>"),
        (JSON, b"[]"),
        (JSON, b'{"files": [{"filename": 3}]}'),
        (JSON, b'{"meta": {"api-version": "9.0"}, "name": "demo", "versions": [], "files": []}'),
        ("text/html", b'<meta name="pypi:repository-version" content="9.0">'),
    ],
)
def test_an_unreadable_page_is_not_a_missing_package(
    server: Server, kind: str, body: bytes
) -> None:
    server.pages["/simple/demo/"] = (200, kind, body)
    with pytest.raises(Unreachable, match="not a simple-API page"):
        only_files(server)
    with pytest.raises(StackError, match="not a simple-API page"):
        releases.releases("demo", IndexConfig(indexes=(server.url,)))


@pytest.mark.parametrize("reply", [b"", b"nonsense\r\n\r\n",
                                   b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"])  # fmt: skip
def test_an_invalid_http_response_is_a_stack_error(reply: bytes) -> None:
    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/simple"
        with pytest.raises(StackError, match=r"cannot ask for the releases of demo: http://127"):
            releases.releases("demo", IndexConfig(indexes=(url,), timeout=5))
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_sources_are_merged_and_dated_files_preferred(server: Server, tmp_path: Path) -> None:
    name = "demo-1.0-py3-none-any.whl"
    (tmp_path / name).touch()
    (tmp_path / "demo-0.9.tar.gz").touch()
    server.pages["/simple/demo/"] = page(entry(name, **{"upload-time": "2025-02-01T10:00:00Z"}))
    config = IndexConfig(indexes=(server.url,), find_links=(str(tmp_path),))
    found = releases.releases("demo", config)
    assert [(r.version, r.uploaded is not None) for r in found] == [("0.9", False), ("1.0", True)]


def test_file_indexes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "simple" / "demo"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text('<a href="../../files/demo-3.0.tar.gz">x</a>')
    config = IndexConfig(indexes=((tmp_path / "simple").as_uri(),))
    (found,) = releases.files("demo", config).files
    assert (found.name, found.version) == ("demo-3.0.tar.gz", "3.0")
    (folder / "index.html").unlink()
    (folder / "demo-4.0.tar.gz").touch()
    assert [f.version for f in read_index(config.indexes[0], "demo", config)] == ["4.0"]
    assert read_index(config.indexes[0], "absent", config) == []


def test_find_links_pages_are_read_and_missing_folders_ignored(tmp_path: Path) -> None:
    links = tmp_path / "links.html"
    links.write_text('<a href="demo-1.0.tar.gz">x</a><a href="other-1.0.tar.gz">x</a>')
    assert [f.version for f in read_links(str(links), "demo", IndexConfig())] == ["1.0"]
    assert read_links(str(tmp_path / "absent"), "demo", IndexConfig()) == []


def test_a_missing_release_error_lists_the_nearest(server: Server) -> None:
    versions = ["4.51.0", "4.52.4", "4.53.0", "4.53.1", "4.53.3", "4.54.0", "5.0.0"]
    server.pages["/simple/demo/"] = page(*(entry(f"demo-{v}.tar.gz") for v in versions))
    config = IndexConfig(indexes=(server.url,))
    with pytest.raises(NoSuchRelease) as caught:
        releases.find("demo", "4.53.2", config)
    assert "4.53.0, 4.53.1, 4.53.3, 4.54.0" in caught.value.message
    assert releases.find("demo", "4.53", config).version == "4.53.0"


@pytest.mark.parametrize(
    ("wanted", "expected"), [("0.1", ["1", "2", "3", "4"]), ("9", ["2", "3", "4", "5"])]
)
def test_nearest_releases_are_found_at_both_ends(wanted: str, expected: list[str]) -> None:
    assert releases.nearest(wanted, ["5", "4", "3", "2", "1"]) == expected


def test_a_local_version_is_found_by_its_public_version(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl").touch()
    config = IndexConfig(indexes=(), find_links=(str(tmp_path),))
    assert releases.find("torch", "2.13.0", config).version == "2.13.0+cpu"
    with pytest.raises(NoSuchRelease):
        releases.find("torch", "2.13.0+cu128", config)


def test_newest_skips_yanked_prereleases_and_other_pythons(server: Server) -> None:
    server.pages["/simple/demo/"] = page(
        entry("demo-1.0.tar.gz"),
        entry("demo-1.1.tar.gz", **{"requires-python": ">=3.9"}),
        entry("demo-1.2.tar.gz", **{"requires-python": ">=3.13"}),
        entry("demo-1.3.tar.gz", yanked=True),
        entry("demo-2.0b1.tar.gz"),
    )
    config = IndexConfig(indexes=(server.url,))
    assert releases.newest("demo", "3.11.7", config).version == "1.1"
    assert releases.newest("demo", "3.13.0", config).version == "1.2"


def test_a_network_error_includes_advice() -> None:
    with pytest.raises(StackError) as caught:
        releases.releases("demo", IndexConfig(indexes=("http://127.0.0.1:9/simple",), timeout=5))
    assert not isinstance(caught.value, NoSuchRelease)
    assert "127.0.0.1:9" in caught.value.message
    assert "moediag stacks build" in caught.value.help_text


def test_a_partial_network_never_reports_a_release_as_missing(tmp_path: Path) -> None:
    (tmp_path / "demo-1.0.tar.gz").touch()
    dead = "http://someone:secret@127.0.0.1:9/simple"
    config = IndexConfig(indexes=(dead,), find_links=(str(tmp_path),), timeout=5)
    assert releases.find("demo", "1.0", config).version == "1.0"
    with pytest.raises(StackError) as caught:
        releases.find("demo", "2.0", config)
    assert not isinstance(caught.value, NoSuchRelease)
    assert "secret" not in caught.value.message


def test_an_unknown_package_is_an_error(server: Server) -> None:
    with pytest.raises(NoSuchRelease, match="no package named demo"):
        releases.releases("demo", IndexConfig(indexes=(server.url,)))


def test_a_failing_server_is_retried_once_and_reported(server: Server) -> None:
    server.pages["/simple/demo/"] = (503, "text/html", b"later")
    with pytest.raises(StackError, match="503"):
        releases.releases("demo", IndexConfig(indexes=(server.url,)))
    assert len(server.asked) == 2


def test_credentials_are_sent_in_the_header(server: Server) -> None:
    server.pages["/simple/demo/"] = page(entry("demo-1.0.tar.gz"))
    url = server.url.replace("http://", "http://us%40er:pass@")
    assert releases.releases("demo", IndexConfig(indexes=(url,)))
    assert server.headers[0]["Authorization"] == "Basic dXNAZXI6cGFzcw=="
    assert "json" in server.headers[0]["Accept"]


def test_credentials_come_from_netrc(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.pages["/simple/demo/"] = page(entry("demo-1.0.tar.gz"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login us@er password pass\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert only_files(server)
    assert server.headers[0]["Authorization"] == "Basic dXNAZXI6cGFzcw=="


def test_pip_proxy_takes_precedence_over_the_environment(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "http://index.example/simple"
    server.pages[f"{address}/demo/"] = page(entry("demo-1.0.tar.gz"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    proxy = server.url.removesuffix("/simple")
    found = releases.releases("demo", IndexConfig(indexes=(address,), proxy=proxy))
    assert [one.version for one in found] == ["1.0"]
    assert server.asked == [f"{address}/demo/"]


# --- configuration ---------------------------------------------------------------------


def config_from(tmp_path: Path, text: str = "", **environ: str) -> IndexConfig:
    file = tmp_path / "pip.conf"
    file.write_text(text)
    nowhere = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "none")}
    return read_config({**nowhere, "PIP_CONFIG_FILE": str(file), **environ}, tmp_path / "prefix")


def test_pip_configuration_is_read_as_pip_does(tmp_path: Path) -> None:
    text = """
[global]
index-url = https://a.example/simple
extra_index_url =
    https://b.example/simple
    file:///srv/simple
find-links = /srv/wheels /srv/more
timeout = 40
[install]
index-url = https://c.example/simple
trusted-host = c.example
"""
    config = config_from(tmp_path, text)
    assert config.indexes == (
        "https://c.example/simple", "https://b.example/simple", "file:///srv/simple",
    )  # fmt: skip
    assert config.find_links == ("/srv/wheels", "/srv/more")
    assert (config.timeout, config.trusted_hosts) == (40.0, ("c.example",))
    arguments = " ".join(config.uv_arguments())
    assert "--default-index https://c.example/simple" in arguments
    assert "--index https://b.example/simple --index file:///srv/simple" in arguments
    assert "--find-links /srv/wheels --find-links /srv/more" in arguments
    assert "--index-strategy unsafe-best-match" in arguments
    assert "--allow-insecure-host c.example" in arguments


def test_environment_overrides_files_and_uv_overrides_pip(tmp_path: Path) -> None:
    text = "[global]\nindex-url = https://a.example/simple\n"
    config = config_from(tmp_path, text, PIP_INDEX_URL="https://e.example/simple")
    assert config.indexes[0] == "https://e.example/simple"
    both = config_from(
        tmp_path, text, PIP_INDEX_URL="https://e.example/simple",
        UV_DEFAULT_INDEX="mine=https://u.example/simple",
    )  # fmt: skip
    assert both.indexes == ("https://u.example/simple",)


def test_dev_null_disables_all_files(tmp_path: Path) -> None:
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text("[global]\nindex-url = https://x.example\n")
    seen = config_from(tmp_path)
    assert seen.indexes == ("https://x.example",)
    assert config_from(tmp_path, PIP_CONFIG_FILE="/dev/null").indexes == (
        "https://pypi.org/simple",
    )


def test_no_index_and_offline_folder_are_used(tmp_path: Path) -> None:
    config = config_from(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="/srv/wheels")
    assert config.indexes == () and "--no-index" in config.uv_arguments()
    (tmp_path / "bundle" / "wheels").mkdir(parents=True)
    offline = config_from(tmp_path, MOEDIAG_WHEELS=str(tmp_path / "bundle"))
    assert offline.find_links == (str(tmp_path / "bundle" / "wheels"),)
    assert {"--no-index", "--offline"} <= set(offline.uv_arguments())


def test_uv_receives_the_certificate_and_only_our_indexes(tmp_path: Path) -> None:
    config = config_from(tmp_path, "[global]\ncert = /etc/ca.pem\nproxy = http://p:3128\n")
    child = config.uv_environment({"UV_INDEX_URL": "https://x", "VIRTUAL_ENV": "/v", "A": "b"})
    assert child["SSL_CERT_FILE"] == "/etc/ca.pem" and child["HTTPS_PROXY"] == "http://p:3128"
    assert "UV_INDEX_URL" not in child and "VIRTUAL_ENV" not in child and child["A"] == "b"
    assert config.uv_environment({"SSL_CERT_FILE": "/mine"})["SSL_CERT_FILE"] == "/mine"


def test_credentials_are_redacted() -> None:
    assert redacted("https://user:pw@h.example/simple") == "https://***@h.example/simple"
    assert redacted("https://h.example/simple") == "https://h.example/simple"

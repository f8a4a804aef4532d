"""Reads where packages come from: the user's pip and uv configuration.

It reads pip's files (INI files in documented places) and ``PIP_*`` directly, because environments
made by uv have no pip. moediag's look-ups and uv's command line use the same result, so they see
the same releases.
"""

from __future__ import annotations

import configparser
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from moediag.records import dataclass

PYPI = "https://pypi.org/simple"
ENV_WHEELS = "MOEDIAG_WHEELS"  # folder made by `moediag stacks build --out`; disables the network

# uv reads these, too; IndexConfig includes them and passes them as arguments.
_UV_INDEX_VARIABLES = (
    "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS",
    "UV_NO_INDEX", "UV_OFFLINE", "UV_INDEX_STRATEGY",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Where to look for packages, and how to connect."""

    indexes: tuple[str, ...] = (PYPI,)  # base URLs of simple-API indexes, the default one first
    find_links: tuple[str, ...] = ()  # folders or pages of files
    offline: bool = False
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout: float = 15.0  # seconds per request
    bundle: Path | None = None  # the folder of ENV_WHEELS

    def uv_arguments(self) -> list[str]:
        """Returns the arguments that make ``uv pip`` look where pip looks.

        pip takes the best version of all indexes. uv by default stops at the first index that has
        the package, so its strategy is set to pip's.
        """
        arguments = ["--index-strategy", "unsafe-best-match"]
        if self.indexes:
            arguments += ["--default-index", self.indexes[0]]
            for url in self.indexes[1:]:
                arguments += ["--index", url]
        else:
            arguments.append("--no-index")
        for place in self.find_links:
            arguments += ["--find-links", place]
        for host in self.trusted_hosts:
            arguments += ["--allow-insecure-host", host]
        if self.offline:
            arguments.append("--offline")
        return arguments

    def pip_arguments(self) -> list[str]:
        """Returns the same places for pip, which does not read uv's variables."""
        arguments = ["--timeout", f"{self.timeout:g}"]
        if self.indexes:
            arguments += ["--index-url", self.indexes[0]]
            for url in self.indexes[1:]:
                arguments += ["--extra-index-url", url]
        else:
            arguments.append("--no-index")
        for place in self.find_links:
            arguments += ["--find-links", place]
        for host in self.trusted_hosts:
            arguments += ["--trusted-host", host]
        known = {"--cert": self.cert, "--client-cert": self.client_cert, "--proxy": self.proxy}
        for name, value in known.items():
            arguments += [name, value] if value else []
        return arguments

    def pip_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns ``environ`` for a pip process that uses only :meth:`pip_arguments`."""
        child = {k: v for k, v in environ.items() if not k.startswith("PIP_")}
        return {**child, "PIP_CONFIG_FILE": os.devnull}

    def uv_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Returns ``environ`` for a uv process; the user's own settings of uv win."""
        child = {k: v for k, v in environ.items() if k not in _UV_INDEX_VARIABLES}
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "UV_PROJECT_ENVIRONMENT"):
            child.pop(name, None)
        if self.cert:
            child.setdefault("SSL_CERT_FILE", self.cert)
        if self.client_cert:
            child.setdefault("SSL_CLIENT_CERT", self.client_cert)
        if self.proxy:
            child.setdefault("HTTPS_PROXY", self.proxy)
            child.setdefault("HTTP_PROXY", self.proxy)
        child.setdefault("UV_HTTP_TIMEOUT", str(max(30, int(self.timeout))))
        child.setdefault("UV_NO_PROGRESS", "1")
        return child


def read_config(
    environ: Mapping[str, str] | None = None, prefix: Path | None = None
) -> IndexConfig:
    """Returns the user's configuration: ``UV_*``, then ``PIP_*``, pip's files, the default (PyPI).

    ``prefix`` is the environment whose ``pip.conf`` is read; default: the running one.
    """
    environ = os.environ if environ is None else environ
    values = _pip_files(environ, prefix or Path(sys.prefix))
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            values[name[4:].lower().replace("_", "-")] = value
    default = environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")
    default = default or values.get("index-url") or PYPI
    extra = _words(values.get("extra-index-url"))
    uv_extra = _words(environ.get("UV_INDEX")) + _words(environ.get("UV_EXTRA_INDEX_URL"))
    links = _words(values.get("find-links"))
    if environ.get("UV_FIND_LINKS"):
        links = tuple(x for x in environ["UV_FIND_LINKS"].replace(",", " ").split() if x)
    timeout = values.get("timeout") or values.get("default-timeout") or "15"
    config = IndexConfig(
        indexes=tuple(_unnamed(u) for u in dict.fromkeys((default, *(uv_extra or extra)))),
        find_links=links,
        offline=_true(environ.get("UV_OFFLINE")),
        cert=values.get("cert"),
        client_cert=values.get("client-cert"),
        proxy=values.get("proxy"),
        trusted_hosts=_words(values.get("trusted-host")),
        timeout=_number(timeout, 15.0),
    )
    if _true(values.get("no-index")) or _true(environ.get("UV_NO_INDEX")):
        config = replace(config, indexes=())
    if environ.get(ENV_WHEELS):
        folder = Path(environ[ENV_WHEELS]).expanduser().resolve()
        wheels = folder / "wheels" if (folder / "wheels").is_dir() else folder
        config = replace(config, indexes=(), find_links=(str(wheels),), offline=True, bundle=folder)
    return config


def redacted(url: str) -> str:
    """Returns ``url`` without user name and password, for messages."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


def _pip_files(environ: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """Returns pip's options from its configuration files; later files override earlier ones
    (https://pip.pypa.io/en/stable/topics/configuration/)."""
    home = Path(environ.get("HOME") or Path.home())
    xdg_all = environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    paths = [Path(folder) / "pip/pip.conf" for folder in xdg_all if folder]
    paths += [Path("/etc/pip.conf"), home / ".pip/pip.conf"]
    if sys.platform == "darwin":
        paths.append(home / "Library/Application Support/pip/pip.conf")
    paths.append(Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf")
    paths.append(prefix / "pip.conf")
    chosen = environ.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:  # pip's documented way to ignore all files
        return {}
    if chosen:
        paths.append(Path(chosen))
    values: dict[str, str] = {}
    for path in paths:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):
            continue  # pip itself will report it
        for section in ("global", "install"):
            if parser.has_section(section):
                values.update((k.replace("_", "-"), v) for k, v in parser.items(section))
    return values


def _words(value: str | None) -> tuple[str, ...]:
    return tuple((value or "").split())


def _unnamed(url: str) -> str:
    """Drops the name of uv's ``name=URL``."""
    name, separator, rest = url.partition("=")
    return rest if separator and name.replace("-", "").replace("_", "").isalnum() else url


def _true(value: str | None) -> bool:
    return (value or "").strip().lower() in {"1", "true", "yes", "on"}


def _number(value: str, otherwise: float) -> float:
    try:
        return float(value)
    except ValueError:
        return otherwise

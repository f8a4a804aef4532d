"""The files of one package on one index, in one folder, or on one page of links.

HTTP is done by requests: timeouts, proxies, certificates, and credentials from the URL or
``~/.netrc``. Pages are parsed by pypi-simple. Local folders are read here: pypi-simple knows none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from moediag.stacks.indexes import IndexConfig, redacted

if TYPE_CHECKING:
    import requests

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5, */*;q=0.1"
RETRIES = 1  # after a lost connection or one of _BUSY
_BUSY = (429, 500, 502, 503, 504)


class Unreachable(Exception):
    """A place that could not be asked. This does not mean that it lacks the package."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A wheel or source archive of the package."""

    name: str
    version: str
    #: In UTC, where the index gives it.
    uploaded: datetime | None = None
    #: The reason, perhaps empty, of a withdrawn file, else None.
    yanked: str | None = None
    requires_python: str | None = None


def read_index(url: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """The files of ``package`` on the index ``url``; empty if it does not have the package."""
    folder = _local_path(url)
    if folder is not None:
        return _local(folder / package / "index.html", package) or _local(folder / package, package)
    return _remote(f"{url.rstrip('/')}/{package}/", package, config)


def read_links(place: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """The files of ``package`` in a find-links folder or page."""
    path = _local_path(place)
    return _remote(place, package, config) if path is None else _local(path, package)


def _local_path(place: str) -> Path | None:
    """The folder or file that ``place`` names, None for a real URL."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in {"http", "https"} else Path(place).expanduser()


def _local(path: Path, package: str) -> list[IndexFile]:
    """Of a folder of files or a page of links; empty where there is neither."""
    if path.is_dir():
        return [found for file in sorted(path.iterdir()) for found in _file(file.name, package)]
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return list(_links(text, path.absolute().as_uri(), package))


def _remote(url: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """Raises Unreachable for everything but an answer that can be read or "no such page"."""
    if config.offline:
        raise Unreachable(f"{redacted(url)}: the network is switched off")
    import requests

    try:
        answer = _get(url, config)
        if answer.status_code in {404, 410}:
            return []
        if answer.ok:
            return list(_parsed(answer, package))
        problem = f"HTTP {answer.status_code} {answer.reason}"
    except requests.RequestException as error:
        problem = f"{type(error).__name__}: {error}"
    except Exception as error:  # of many kinds: whatever a broken page leads the parsers to
        problem = f"not a simple-API page ({type(error).__name__}: {error})"
    raise Unreachable(f"{redacted(url)}: {problem}")


def _get(url: str, config: IndexConfig) -> requests.Response:
    """The server's answer, asked with the user's proxy and certificates.

    As in pip, only the certificates of hosts named in ``trusted-host`` are not checked.
    """
    import requests
    import urllib3
    from requests.adapters import HTTPAdapter

    trusted = urlsplit(url).hostname in {host.partition(":")[0] for host in config.trusted_hosts}
    if trusted:
        urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    retry = urllib3.Retry(
        RETRIES, status_forcelist=_BUSY, raise_on_status=False, respect_retry_after_header=False
    )
    with requests.Session() as session:
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        return session.get(
            url,
            headers={"Accept": ACCEPT, "User-Agent": "moediag"},
            timeout=min(config.timeout, 60.0),
            # Given with the request, because the session's own yield to REQUESTS_CA_BUNDLE and
            # HTTPS_PROXY, which pip's configuration must win over.
            verify=False if trusted else config.cert or os.environ.get("SSL_CERT_FILE") or True,
            cert=config.client_cert,
            proxies={"http": config.proxy, "https": config.proxy} if config.proxy else None,
        )


def _parsed(answer: requests.Response, package: str) -> Iterator[IndexFile]:
    from pypi_simple import ProjectPage

    if "json" not in answer.headers.get("Content-Type", ""):
        yield from _links(answer.content.decode("utf-8", "replace"), answer.url, package)
        return
    for found in ProjectPage.from_json_data(json.loads(answer.content), answer.url).packages:
        yield from _file(
            found.filename,
            package,
            uploaded=found.upload_time,
            yanked=(found.yanked_reason or "") if found.is_yanked else None,
            requires_python=found.requires_python,
        )


def _links(page: str, url: str, package: str) -> Iterator[IndexFile]:
    """The links of an HTML page. Some indexes add upload times to them, though no standard does."""
    from pypi_simple import RepositoryPage

    for link in RepositoryPage.from_html(page, url).links:
        known = {name: value for name, value in link.attrs.items() if isinstance(value, str)}
        yield from _file(
            unquote(urlsplit(link.url).path.rpartition("/")[2]),
            package,
            uploaded=_time(known.get("data-upload-time", "")),
            yanked=known.get("data-yanked"),
            requires_python=known.get("data-requires-python"),
        )


def _file(name: str, package: str, **known: Any) -> Iterator[IndexFile]:
    """At most one file: nothing where the name is not a distribution of ``package``."""
    try:
        if name.endswith(".whl"):
            distribution, version, _, _ = parse_wheel_filename(name)
        else:
            distribution, version = parse_sdist_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return
    if distribution == canonicalize_name(package):
        yield IndexFile(name, str(version), **known)


def _time(text: str) -> datetime | None:
    """Of an ISO time in UTC; Python 3.10 reads neither its "Z" nor every fraction of a second."""
    try:
        return datetime.fromisoformat(text[:19]).replace(tzinfo=timezone.utc)
    except ValueError:
        return None

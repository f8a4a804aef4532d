"""Lists the files of one package on an index, in a folder, or on a page of links.

requests handles HTTP: timeouts, proxies, certificates, and credentials from the URL or
``~/.netrc``. pypi-simple parses pages. Local folders are read here; pypi-simple does not read them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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

from moediag.lab.stacks.indexes import IndexConfig, redacted
from moediag.records import dataclass

if TYPE_CHECKING:
    import requests

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5, */*;q=0.1"
RETRIES = 1  # after a lost connection or one of _BUSY
_BUSY = (429, 500, 502, 503, 504)


class Unreachable(Exception):
    """A place that could not be queried; it may still have the package."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """A wheel or source archive of the package."""

    name: str
    version: str
    uploaded: datetime | None = None  # in UTC, if the index gives it
    yanked: str | None = None  # the reason, perhaps empty, if the file is yanked
    requires_python: str | None = None


def read_index(url: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """Returns the files of ``package`` on the index ``url``; empty without the package."""
    folder = _local_path(url)
    if folder is not None:
        return _local(folder / package / "index.html", package) or _local(folder / package, package)
    return _remote(f"{url.rstrip('/')}/{package}/", package, config)


def read_links(place: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """Returns the files of ``package`` in a find-links folder or page."""
    path = _local_path(place)
    return _remote(place, package, config) if path is None else _local(path, package)


def _local_path(place: str) -> Path | None:
    """Returns the local path of ``place``; None for an HTTP URL."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in {"http", "https"} else Path(place).expanduser()


def _local(path: Path, package: str) -> list[IndexFile]:
    """Reads a folder of files or a page of links; empty if neither exists."""
    if path.is_dir():
        return [found for file in sorted(path.iterdir()) for found in _file(file.name, package)]
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return list(_links(text, path.absolute().as_uri(), package))


def _remote(url: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """Reads a page; empty if it does not exist. Raises Unreachable for any other failure."""
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
    except Exception as error:  # parsers raise many kinds for a broken page
        problem = f"not a simple-API page ({type(error).__name__}: {error})"
    raise Unreachable(f"{redacted(url)}: {problem}")


def _get(url: str, config: IndexConfig) -> requests.Response:
    """Returns the server's response, using the user's proxy and certificates.

    As in pip, certificates of hosts in ``trusted-host`` are not checked.
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
            # Arguments of the request, because REQUESTS_CA_BUNDLE and HTTPS_PROXY override those of
            # the session; pip's configuration must win.
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
    """Returns the links of an HTML page. Some indexes add non-standard upload times."""
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
    """Yields one file, or none if the name is not a distribution of ``package``."""
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
    """Parses an ISO time in UTC. Python 3.10 parses neither "Z" nor every fraction of a second."""
    try:
        return datetime.fromisoformat(text[:19]).replace(tzinfo=timezone.utc)
    except ValueError:
        return None

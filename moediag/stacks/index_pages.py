"""One page of an index or one folder of files, as a list of files.

Standard library only, with timeouts, proxies, the user's certificates and credentials
(in the URL or in ``~/.netrc``).
"""

from __future__ import annotations

import base64
import html.parser
import json
import netrc
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from moediag.stacks.indexes import IndexConfig, redacted

ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5, */*;q=0.1"
ATTEMPTS = 2


class Unreachable(Exception):
    """A place that could not be asked (not: a place that does not have the package)."""


@dataclass(frozen=True, slots=True)
class IndexFile:
    """``url``: absolute, without fragment; ``uploaded`` UTC; ``yanked``: the reason, perhaps
    empty, of a withdrawn file, else None; ``sha256``: hex, where the index gives it."""

    name: str
    version: str
    url: str
    uploaded: datetime | None = None
    yanked: str | None = None
    requires_python: str | None = None
    sha256: str | None = None


def read_index(url: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """The files of ``package`` on the index ``url``; empty where it has none of it."""
    folder = local_path(url)
    if folder is not None:
        page = folder / package / "index.html"
        if page.is_file():
            body = page.read_text(encoding="utf-8", errors="replace")
            return list(parse_html(body, page.as_uri(), package))
        return list(_folder(folder / package, package))
    if config.offline:
        raise Unreachable(f"{redacted(url)}: the network is switched off")
    address = f"{url.rstrip('/')}/{package}/"
    answer = fetch(address, config)
    return [] if answer is None else list(parse(*answer, package))


def read_links(place: str, package: str, config: IndexConfig) -> list[IndexFile]:
    """The files of ``package`` in a find-links folder or page."""
    path = local_path(place)
    if path is not None:
        if path.is_dir():
            return list(_folder(path, package))
        if path.is_file():
            body = path.read_text(encoding="utf-8", errors="replace")
            return list(parse_html(body, path.as_uri(), package))
        return []
    if config.offline:
        raise Unreachable(f"{redacted(place)}: the network is switched off")
    answer = fetch(place, config)
    return [] if answer is None else list(parse(*answer, package))


def fetch(url: str, config: IndexConfig) -> tuple[bytes, str, str] | None:
    """Body, content type and final URL; None where the server answers that it has no such page.

    Raises Unreachable after ATTEMPTS.
    """
    opener = _opener(config, urlsplit(url).hostname or "")
    plain, authorization = _credentials(url)
    headers = {"Accept": ACCEPT, "User-Agent": "moediag"}
    if authorization:
        headers["Authorization"] = authorization
    problem = ""
    for _ in range(ATTEMPTS):
        request = urllib.request.Request(plain, headers=headers)  # noqa: S310 - user's own index
        try:
            with opener.open(request, timeout=min(config.timeout, 60.0)) as response:
                content_type = response.headers.get("Content-Type", "text/html")
                return response.read(), content_type, response.geturl()
        except urllib.error.HTTPError as error:
            if error.code in {404, 410}:
                return None
            problem = f"HTTP {error.code} {error.reason}"
            error.close()
            if error.code < 500 and error.code != 429:
                break
        except (OSError, ValueError) as error:  # URLError, timeouts, reset connections
            problem = str(getattr(error, "reason", error)) or type(error).__name__
    raise Unreachable(f"{redacted(url)}: {problem}")


def parse(body: bytes, content_type: str, url: str, package: str) -> Iterator[IndexFile]:
    text = body.decode("utf-8", "replace")
    if "json" in content_type.partition(";")[0]:
        return parse_json(text, url, package)
    return parse_html(text, url, package)


def parse_json(text: str, url: str, package: str) -> Iterator[IndexFile]:
    """PEP 691. Raises Unreachable where the page is not what its header says."""
    try:
        entries = json.loads(text)["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{redacted(url)}: not a simple-API page ({error})") from error
    for entry in entries:
        yanked = entry.get("yanked", False)
        yield from _file(
            entry.get("filename", ""),
            urljoin(url, entry.get("url", "")),
            package,
            uploaded=entry.get("upload-time"),
            yanked=(yanked if isinstance(yanked, str) else "") if yanked else None,
            requires_python=entry.get("requires-python"),
            sha256=(entry.get("hashes") or {}).get("sha256"),
        )


def parse_html(text: str, url: str, package: str) -> Iterator[IndexFile]:
    """PEP 503. Upload times are not part of it; some indexes add ``data-upload-time``."""
    page = _Anchors()
    page.feed(text)
    base = urljoin(url, page.base) if page.base else url
    for attributes in page.anchors:
        target, fragment = urldefrag(urljoin(base, attributes["href"]))
        yield from _file(
            unquote(urlsplit(target).path.rpartition("/")[2]),
            target,
            package,
            uploaded=attributes.get("data-upload-time"),
            yanked=attributes.get("data-yanked"),
            requires_python=attributes.get("data-requires-python"),
            sha256=fragment[7:] if fragment.startswith("sha256=") else None,
        )


def local_path(place: str) -> Path | None:
    """The folder or file that ``place`` names, None for a real URL."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in {"http", "https"} else Path(place).expanduser()


class _Anchors(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.anchors: list[Mapping[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v or "" for k, v in attrs}
        if tag == "base" and not self.base:
            self.base = values.get("href", "")
        elif tag == "a" and "href" in values:
            self.anchors.append(values)


def _folder(folder: Path, package: str) -> Iterator[IndexFile]:
    try:
        names: Iterable[Path] = sorted(folder.iterdir())
    except OSError:
        return
    for path in names:
        yield from _file(path.name, path.absolute().as_uri(), package)


def _file(name: str, url: str, package: str, **known: Any) -> Iterator[IndexFile]:
    """At most one file: nothing where the name is not a distribution of ``package``."""
    try:
        if name.endswith(".whl"):
            distribution, version, _, _ = parse_wheel_filename(name)
        else:
            distribution, version = parse_sdist_filename(name)
    except (InvalidWheelFilename, InvalidSdistFilename):
        return
    if distribution == canonicalize_name(package):
        known["uploaded"] = _time(known.get("uploaded"))
        yield IndexFile(name, str(version), url, **known)


def _time(text: str | None) -> datetime | None:
    if not text:
        return None
    try:
        # Python 3.10 reads neither "Z" nor a fraction of other than 3 or 6 digits.
        moment = datetime.fromisoformat(text.replace("Z", "+00:00").strip())
    except ValueError:
        try:
            moment = datetime.fromisoformat(text[:19])
        except ValueError:
            return None
    return moment.replace(tzinfo=timezone.utc) if moment.tzinfo is None else moment


def _opener(config: IndexConfig, host: str) -> urllib.request.OpenerDirector:
    """Proxies from the environment unless pip's own ``proxy`` is set; a certificate is not
    checked only for hosts that the user's ``trusted-host`` names, as in pip."""
    context = ssl.create_default_context(cafile=config.cert)
    if host in {h.partition(":")[0] for h in config.trusted_hosts}:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if config.client_cert:
        context.load_cert_chain(config.client_cert)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if config.proxy:
        proxies = {"http": config.proxy, "https": config.proxy}
        handlers.append(urllib.request.ProxyHandler(proxies))
    return urllib.request.build_opener(*handlers)


def _credentials(url: str) -> tuple[str, str | None]:
    """``url`` without user and password, and the header that carries them."""
    parts = urlsplit(url)
    user, password = parts.username, parts.password
    plain = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    if user is None:
        try:
            entry = netrc.netrc().authenticators(parts.hostname or "")
        except (OSError, netrc.NetrcParseError):
            entry = None
        if entry is None:
            return plain, None
        user, password = entry[0], entry[2]
    token = f"{unquote(user or '')}:{unquote(password or '')}".encode()
    return plain, "Basic " + base64.b64encode(token).decode()

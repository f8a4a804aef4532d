"""Removes secrets from text before it is written: one place, for every file and page.

Secrets are known by the shape of a token, by the name before a value (``--api-key X``,
``PASSWORD=X``, ``"token": "X"``), as a login in a URL, and as a header. The replacement keeps the
name, so a reader sees that something was set. ``redacted`` replaces names of hosts, users and
folders as well, always the same name by the same word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path

from moediag.records import dataclass

HIDDEN = "***"
# Tokens that their issuers made recognisable.
_SHAPES = re.compile(
    r"""\b(?:
    hf_[A-Za-z0-9]{20,} | api_org_[A-Za-z0-9]{20,}            # Hugging Face
    | gh[oprsu]_[A-Za-z0-9]{20,} | github_pat_\w{20,}         # GitHub
    | glpat-[\w-]{16,} | pypi-[\w-]{32,} | npm_[A-Za-z0-9]{30,}
    | sk-[\w-]{16,} | sk_(?:live|test)_\w{16,} | wandb_v1_\w{16,}
    | xox[abeoprs]-[\w-]{10,}                                  # Slack
    | (?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}                      # AWS
    | AIza[\w-]{30,} | ya29\.[\w-]{20,}                        # Google
    | nvapi-[\w-]{20,} | dckr_pat_[\w-]{20,} | dop_v1_\w{30,}
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}                       # a JSON web token
    )""",
    re.VERBOSE,
)
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_WEBHOOK = re.compile(
    r"(https://(?:hooks\.slack\.com/(?:services|workflows)|discord(?:app)?\.com/api/webhooks"
    r"|[\w.-]+\.webhook\.office\.com/webhookb2)/)[^\s\"'<>]+"
)
_LOGIN = re.compile(r"(?<=://)[^/@\s\"']+@")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)[^\"'\r\n]+")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[\w+/=.~-]{8,}")
_COOKIE = re.compile(r"(?i)\b((?:set-)?cookie\s*:\s*)[^\r\n]+")
# A name, what separates it from its value, and the value: quoted, or up to the next blank.
_NAMED = re.compile(
    r"""(?P<name>[A-Za-z][\w.-]*)(?P<sign>["']?\s*(?:=>|:=|=|:(?!//))\s*)"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[^\s,;&"'}\])]+)"""
)
_QUOTED = re.compile(
    r"""(?P<name>[A-Za-z_][\w.-]*)(?P<sign>["']?\]?\s*(?:: *[\w.|\[\] ]+)?(?:[=!]=|=|:)\s*)"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
# The default of a variable or an option: ``getenv("HF_TOKEN", "X")``.
_DEFAULT = re.compile(
    r"""(?P<name>\b(?:get|getenv|setdefault|add_argument)\(\s*["'][\w.-]+)"""
    r"""(?P<sign>["']\s*,(?:[^()\n]*?\bdefault\s*=)?\s*)"""
    r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
)
_OPTION = re.compile(r"(?P<name>(?<!\S)--?[A-Za-z][\w.-]*)(?P<sign>\s+)(?P<value>[^\s-]\S*)")
_LITERAL = re.compile(r"""\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'""")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(r"password|passwd|passphrase|pwd|secrets?|credentials?|apikey|cookie")
_OF_KEYS = re.compile(
    r"api|access|secret|private|auth|account|encryption|signing|subscription|storage|ssh|wandb"
)
# Before "token": text of a language model.
_OF_TEXT = re.compile(
    r"pad|padding|eos|bos|unk|sep|cls|mask|special|next|image|audio|video|first|last|max|min|num"
    r"|per|new|stop|end|start|prefix|suffix|each|every|of"
)


def is_secret(name: str) -> bool:
    """Whether a variable, an option or a field of this name holds a secret: ``HF_TOKEN``,
    ``--wandb-api-key``, ``dbPassword``; not ``pad_token``, ``num_tokens`` or ``key``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "notify":  # the URL of a webhook
        return True
    if words[-1] in ("token", "auth"):
        return not _OF_TEXT.fullmatch(before)
    if words[-1] in ("key", "keys"):
        return bool(_OF_KEYS.fullmatch(before))
    return any(map(_ALWAYS.fullmatch, words))


def masked(text: str) -> str:
    """``text`` without secrets."""
    text = _OPTION.sub(_if_secret, _shapes(text))
    return _NAMED.sub(_if_secret, text)


def masked_source(text: str) -> str:
    """Python source without the secrets in its string literals; its statements stay as they are."""
    text = _DEFAULT.sub(_if_secret, _QUOTED.sub(_if_secret, text))
    return _LITERAL.sub(lambda found: found[0][0] + masked(found[0][1:-1]) + found[0][0], text)


def _shapes(text: str) -> str:
    """``text`` without what is recognised as a secret whatever its name is."""
    text = _KEY_BLOCK.sub(HIDDEN, text)
    text = _WEBHOOK.sub(rf"\1{HIDDEN}", text)
    text = _LOGIN.sub(f"{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1{HIDDEN}", text)
    text = _COOKIE.sub(rf"\1{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    return _SHAPES.sub(HIDDEN, text)


def _if_secret(found: re.Match[str]) -> str:
    value = found["value"]
    quote = value[0] if value[:1] in "\"'" else ""
    inside = value[1:-1] if quote else value
    # Empty, on or off, or a placeholder: nothing to hide.
    plain = inside.lower() in ("", "none", "null", "true", "false", HIDDEN)
    if plain:
        return found[0]
    if not is_secret(found["name"]):  # "failed: api_key=X": the value has a name of its own
        return f"{found['name']}{found['sign']}{_NAMED.sub(_if_secret, value)}"
    return f"{found['name']}{found['sign']}{quote}{HIDDEN}{quote}"


def masked_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a command line without secrets: those after ``--api-key`` as well as those in
    ``--api-key=X``."""
    found: list[str] = []
    for at, word in enumerate(words):
        named = at > 0 and words[at - 1].startswith("-") and "=" not in words[at - 1]
        hide = named and is_secret(words[at - 1]) and not word.startswith("-")
        found.append(HIDDEN if hide else masked(word))
    return tuple(found)


@dataclass
class Redaction:
    """Replaces names of hosts, users and folders; the same name always by the same word."""

    hosts: Iterable[str] = ()
    users: Iterable[str] = ()
    _words: dict[str, str] = field(default_factory=dict)
    _folders: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, names in (("host", self.hosts), ("user", self.users)):
            for name in sorted({one for one in names if len(one) > 1}):
                self._words.setdefault(name, f"{kind}_{self._count(kind) + 1}")

    @classmethod
    def of_machine(cls, hosts: Iterable[str] = ()) -> Redaction:
        """That of this machine and its user, and of ``hosts``. root's name is a word of many
        programs, so it stays."""
        name = os.uname().nodename
        users = {os.environ.get(one, "") for one in ("USER", "LOGNAME")} | {Path.home().name}
        return cls([name, name.partition(".")[0], *hosts], users - {"", "root"})

    def folder(self, folder: Path) -> list[Path]:
        """Replaces the names in every file below ``folder``, whose modification times stay.
        Returns the files with paths that are no text, such as pickles, and were left as they
        are."""
        left = []
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file():
                continue
            seen, data = path.stat(), path.read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                left += [path] * bool(_FOLDERS.search(data))
                continue
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(self.text(text).encode())
            os.utime(temporary, ns=(seen.st_atime_ns, seen.st_mtime_ns))
            temporary.replace(path)
        return left

    def _count(self, kind: str) -> int:
        return sum(word.startswith(f"{kind}_") for word in self._words.values())

    def text(self, text: str) -> str:
        """``text`` without these names, and without secrets. Of a path the installed package and
        the file's own name stay: they tell what ran."""
        text = _PATH.sub(self._path, masked(text))
        for name, word in sorted(self._words.items(), key=lambda item: -len(item[0])):
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", word, text)
        return text

    def _path(self, found: re.Match[str]) -> str:
        path = found[0]
        installed = _INSTALLED.search(path)
        if installed is not None:
            return path[installed.start() :]
        if path.startswith(_SYSTEM):
            return path
        folder, _, name = path.rpartition("/")
        word = self._folders.setdefault(folder, f"/path-{len(self._folders) + 1}")
        return f"{word}/{name}"


_PATH = re.compile(r"(?<![\w:/.-])/(?:[\w.@+~-]+/)+[\w.@+~-]*")
_FOLDERS = re.compile(rb"/[\w.@+~-]{2,}/[\w.@+~-]{2,}")
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d[\d.]*/(?!site-|dist-)")
_SYSTEM = ("/usr/", "/lib/", "/lib64/", "/proc/", "/dev/", "/sys/", "/bin/")

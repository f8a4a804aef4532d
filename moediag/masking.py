"""Removes secrets from text before it is written: one place, for every file and page.

Secrets are known by the shape of a token, by the name before a value (``--api-key X``,
``PASSWORD=X``, ``"token": "X"``), as a login in a URL, as a header, and by characters that look
random. The replacement keeps the name, so a reader sees that something was set. ``redacted``
replaces names of hosts, users and folders as well, always the same name by the same word.
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
    r"""(?<![A-Za-z0-9])(?:
    (?:hf|api_org|gh[oprsu]|npm|rpa|gsk|r8|tfp|figd|shpat|lin_api|glsa)_[A-Za-z0-9]{20,}
    | github_pat_\w{20,} | gl(?:pat|dt|rt|cbt)-[\w-]{16,} | pypi-[\w-]{32,}
    | sk-(?=[\w-]{0,60}\d)[\w-]{16,} | sk_(?:live|test)_\w{16,} | wandb_v1_\w{16,}
    | (?:pplx|xai|nvapi|GOCSPX|sq0csp)-[\w-]{20,}
    | xox[abeoprs](?:\.xox[bp])?-[\w-]{10,} | xapp-\d-[\w-]{10,}    # Slack
    | (?:AKIA|ASIA|ABIA|ACCA|LTAI|GOOG1E)[A-Za-z0-9]{16,}           # AWS, Alibaba, Google
    | AIza[\w-]{30,} | ya29\.[\w-]{20,} | 1//0[\w-]{30,}            # Google
    | dckr_pat_[\w-]{20,} | dop_v1_\w{30,} | dapi[0-9a-f]{32} | hv[bsr]\.[\w-]{20,}
    | SG\.[\w-]{16,}\.[\w-]{16,} | ATATT3[\w=-]{20,} | AGE-SECRET-KEY-1[A-Z0-9]{20,}
    | (?:bot)?\d{8,10}:AA[\w-]{32,}                                 # Telegram
    | eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{4,}                            # a JSON web token
    )""",
    re.VERBOSE,
)
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
    r".*?(?:-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)
# A text in front of a secret that ends where the next such thing begins.
_AFTER = [
    re.compile(pattern)
    for pattern in (
        r"(https://(?:hooks\.slack\.com/(?:services|workflows|triggers)"
        r"|discord(?:app)?\.com/api/webhooks|[\w.-]+\.webhook\.office\.com/webhookb2)/)[^\s\"'<>]+",
        r"(://)[^/?#\s\"']+(?=@)",  # a login
        r"((?:^|\s)(?:-u|--(?:proxy-|http-)?user)[ =]?[^\s:=]+:)(?!\d+\b)[^\s\"']+",  # of curl
        # me:X@host.org, without a scheme
        r"((?<![\w/.+-])(?!mailto)[\w.+-]{1,80}:)[^\s:@/\"']{8,}(?=@[a-z][\w-]*\.[a-z])",
        r"(?i)([?&;](?:[\w-]{1,40}-)?(?:sig|signature|key|code)=)[\w%+/=.~-]{12,}",
        r"(?i)\b((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?)[^\"'\r\n]+",
        r"(?i)\b((?:set-)?cookie\s*:\s*)[^\r\n]+",
        r"(\b(?:\w*(?:BasicAuth|DigestAuth|SecretStr|SecretBytes|Credentials?)|login)\()"
        r"(?=[^()\n]*[\"'])[^()\n]+",
        r"(?i)\b((?:bearer|basic)\s+)[\w+/=.~-]{8,}",
        # A sentence with what looks random: "invalid token X", "wandb login X".
        r"(?i:\b((?:token|secret|passphrase|(?:api|access|with|secret) key|wandb login)"
        r"(?: is| was| provided| given)?:?\s[\"'`]?))"
        r"(?=[\w+/=-]{0,40}\d[A-Za-z+/=-]{1,40}\d)[A-Za-z0-9+/=-]{20,}(?![\w.])",
        r"(?i)\b(passw(?:or)?d(?: is| was)?\s[\"'`]?)(?=\S{0,40}\d)(?=\S{0,40}[a-z])"
        r"[^\s\"'`=(]{8,}",
    )
]
_STRING = r"""[bBrRuUfF]{0,2}(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
_INSIDE = r"[^\[\](){}\n]"
# A name and what separates it from its value: "--name", "<name>" of XML, "name: NAME, value:" of
# Kubernetes, "name=".
_NAMES = (
    re.compile(
        r"""(?P<name>(?<![^\s"'\[(])--?[A-Za-z][\w.-]*)(?:["'],[ ]*(?=["'])|\s+)(?!["']?-)"""
    ),
    re.compile(r"<(?P<name>[A-Za-z][\w.-]*)>\s*"),
    re.compile(
        r"""(?i:\b(?:name|key)\\*["']?\s*[:=]\s*\\*["']?)(?P<name>[\w.-]{1,80})\\*["']?,?\s+"""
        r"""\\*["']?(?i:value)\\*["']?\s*[:=]\s*"""
    ),
    re.compile(
        r"""(?<![\w.])(?P<name>\w[\w.-]{0,80})(?:\\*["'])?\]?[ \t]*(?:=>|:=|=|:(?!//)|%3D)[ \t]*"""
        r"""(?:\n[ \t]+(?:-[ \t]+)?)?"""
    ),
)
# Quoted, quoted within a quoted text, in brackets, a block of YAML, or up to the next blank.
_VALUE = re.compile(
    rf"""{_STRING}|\\+["'][^"'\\\n]*|["'][^"'\n]*"""
    rf"""|[A-Za-z_.]*[\[({{](?:{_INSIDE}|[\[({{]{_INSIDE}*[\])}}])*[\])}}]?"""
    r"""|[|>][+-]?[ \t]*(?:\n[ \t]+\S[^\n]*)+|[^\s,;&<"'}\])]+"""
)
_QUOTES = re.compile(r"""[bBrRuUfF]{0,2}(\\*["'])""")
_PROSE = re.compile(r"[A-Za-z]{1,20}(?:[,;]?[ _-][A-Za-z]{1,20})*[.…]?")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(
    r"\w*passwords?|passwd|passphrase|passcode|otp|pwd|secrets?|credentials?|apikeys?|cookies?"
    r"|sessionid"
    r"|(?:access|auth|api|csrf|bearer|refresh)token"
)
_OF_KEYS = re.compile(
    r"api|access|secret|private|auth|account|encryption|signing|subscription|storage|ssh|wandb"
    r"|openai|anthropic|azure|aws|gcp|comet|mistral|cohere|ngc|hf|master|license"
)
_OF_PASS = re.compile(r"db|user|smtp|ftp|mysql|postgres|redis|mongo|admin|root|mail|ssh|proxy")
# Not a part of a path.
_LONG = re.compile(r"(?<![A-Za-z0-9+/])(?!0x)[A-Za-z0-9]{20,128}(?![A-Za-z0-9+/]|\.\w)")
_ESCAPED = "\x1f"  # blank for a pattern: the two characters of a newline in quoted text
_RUNS = re.compile(r"[A-Z]+|[a-z]+|\d+")
# Before "token": text of a language model.
_OF_TEXT = re.compile(
    r"pad|padding|eos|bos|unk|sep|cls|mask|special|next|image|audio|video|first|last|max|min|num"
    r"|per|new|stop|end|start|prefix|suffix|each|every|of"
)


def is_secret(name: str) -> bool:
    """Whether a variable, an option or a field of this name holds a secret: ``HF_TOKEN``,
    ``--wandb-api-key``, ``dbPassword``; not ``pad_token``, ``num_tokens``, ``key`` or ``PWD``."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or name in ("PWD", "OLDPWD"):
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "notify" or "webhook" in words[-2:]:  # its URL
        return True
    if words[-1] in ("token", "auth"):
        return not _OF_TEXT.fullmatch(before)
    if words[-1] in ("key", "keys", "tokens"):
        return bool(_OF_KEYS.fullmatch(before))
    if words[-1] == "pass":
        return bool(_OF_PASS.fullmatch(before))
    return any(map(_ALWAYS.fullmatch, words))


def masked(text: str) -> str:
    """``text`` without secrets."""
    text = _KEY_BLOCK.sub(HIDDEN, text)
    text = text.replace(r"\n", _ESCAPED)  # else its "n" belongs to the word behind it
    for pattern in _AFTER:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    text = _SHAPES.sub(HIDDEN, text)
    for pattern in _NAMES:
        text = _without_values(text, pattern)
    text = _LONG.sub(lambda found: HIDDEN if _looks_random(found[0]) else found[0], text)
    return text.replace(_ESCAPED, r"\n")


def _looks_random(word: str) -> bool:
    """Whether digits and letters of both cases alternate as in three of four random words of 24
    characters and nine of ten of 40, but not in identifiers and in digests, which have one case."""
    runs = _RUNS.findall(word)
    alternates, digits = len(runs) / len(word), sum(map(str.isdigit, runs))
    mixed = not word.isupper() and not word.islower()
    return mixed and (alternates > 0.5 if digits > 2 else alternates > 0.6 and digits > 0)


def _without_values(text: str, names: re.Pattern[str]) -> str:
    """``text`` without the values behind names of secrets."""
    parts, at = [], 0
    for found in names.finditer(text):
        if found.start() >= at and is_secret(found["name"]):
            value = _VALUE.match(text, found.end())
            if value is not None:
                parts += [text[at : found.end()], _hidden(found["name"], value[0])]
                at = value.end()
    return "".join((*parts, text[at:]))


def is_plain(name: str, value: str) -> bool:
    """Whether the value of a name is nothing to hide: empty, on or off, hidden already; or words
    without a digit, which no token is: "gets no token: set starve"."""
    if value.lower() in ("", "none", "null", "true", "false", HIDDEN):
        return True
    last = _WORDS.findall(name)[-1].lower()
    return last in ("token", "auth", "notify", "webhook") and bool(_PROSE.fullmatch(value))


def _hidden(name: str, value: str) -> str:
    """``***`` in the value's quotes; a plain value stays."""
    quoted = _QUOTES.match(value)
    start = quoted[0] if quoted else ""
    end = quoted[1] if quoted and value[len(start) :].endswith(quoted[1]) else ""
    plain = is_plain(name, value[len(start) : len(value) - len(end)])
    return value if plain else f"{start}{HIDDEN}{end}"


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

"""Which options and plugins of the user's pytest reach the ranks of a test."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping

import pytest

# Plugins that repeat or end a test, or write files for a session: on one of several ranks they
# would break the test or overwrite the files of the session. Their options and marks stay known.
NOT_IN_RANKS = (
    *("rerunfailures", "timeout", "xdist", "pytest_cov", "split"),
    *("lfplugin", "nfplugin", "stepwiseplugin"),
)
# Options that choose tests, end or repeat the session, or write its reports, by their destination.
# Not compiled before a test needs it: every session of pytest would wait for that.
_OF_SESSION = (
    r"file_or_dir|keyword|markexpr|maxfail|deselect|usepdb|usepdb_cls|trace|lf|failedfirst|newfirst"
    r"|last_failed_no_failures|stepwise\w*|cacheshow|cacheclear|xmlpath|junitprefix|durations\w*"
    r"|verbose|collectonly|pastebin|basetemp|log_file|color|reportchars|ranks_out|inifilename"
    r"|rootdir|numprocesses|maxprocesses|maxworkerrestart|dist|distload|tx|px|loadgroup|looponfail"
    r"|rsync\w+|testrunuid|reruns\w*|only_rerun|rerun_except|force_reruns|fail_on_flaky"
    r"|(no_)?cov|(no_)?cov_\w+|timeout|timeout_\w+|session_timeout|htmlpath|css|self_contained_html"
    r"|json_report\w*|report_log|allure_\w+|splits|store_durations|testmon\w*|forked|randomly_\w+"
    r"|benchmark_(json|save\w*|autosave|compare\w*|storage)"
)


def options(config: pytest.Config, parser: pytest.Parser) -> list[str]:
    """The user's options, as typed, that concern the test and not the session."""
    typed = shlex.split(os.environ.get("PYTEST_ADDOPTS", "")) + list(config.getini("addopts"))
    kept = _of_test([*typed, *map(str, config.invocation_params.args)], parser)
    kept += ["-o", "addopts=", f"--rootdir={config.rootpath}"]
    kept += ["-c", str(config.inipath)] if config.inipath is not None else []
    seed = config.getoption("randomly_seed", None)  # of pytest-randomly: equal on all ranks
    if isinstance(seed, int):
        kept.append(f"--randomly-seed={seed}")
    return kept


def _of_test(typed: Iterable[str], parser: pytest.Parser) -> list[str]:
    """Those of ``typed`` that are options of a test. The parser tells where the values of an option
    end, because conftest files and plugins define options, too."""
    words, kept = list(typed), []
    none = vars(parser.parse_known_args([]))
    while words and words[0] != "--":
        word = words.pop(0)
        if not word.startswith("-"):
            continue
        if re.fullmatch(r"-[a-zA-Z]{2,}", word) and _set_by(["-" + word[1]], parser, none):
            words.insert(0, "-" + word[2:])  # -xvs
            word = word[:2]
        option = [word]
        while (changed := _set_by(option, parser, none)) is None and words:
            option.append(words.pop(0))
        if changed and not any(re.fullmatch(_OF_SESSION, name) for name in changed):
            kept += option
    return kept


def _set_by(
    option: list[str], parser: pytest.Parser, none: Mapping[str, object]
) -> set[str] | None:
    """What ``option`` sets, None if a value is missing."""
    try:
        found = vars(parser.parse_known_args(option))
    except pytest.UsageError:
        return None
    return {name for name, value in found.items() if value != none.get(name)}

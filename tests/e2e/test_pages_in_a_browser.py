"""Pages in headless Chromium, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moediag.report import html
from moediag.result import read_result
from tests.unit.report.test_charts import GOLDEN, of_many_ranks

pytestmark = pytest.mark.wide
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize("sample", ["charts", "hang", "dumps", "tables", "of 1024 ranks"])
def test_no_page_is_wider_than_a_phone(sample: str, tmp_path: Path) -> None:
    known = GOLDEN / f"{sample}.json"
    result = read_result(known) if known.exists() else of_many_ranks(1024)
    (tmp_path / "page.html").write_text(html.render([result]), encoding="utf-8")
    # A window has a smallest width, a frame does not.
    (tmp_path / "phone.html").write_text(
        '<iframe src="page.html" width="375" height="800" style="border: 0" onload="'
        "document.title = this.contentDocument.documentElement.scrollWidth + ' wide'\"></iframe>"
    )
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--dump-dom",  "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
         (tmp_path / "phone.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert re.findall(r"<title>(.*?)</title>", done.stdout) == ["375 wide"]

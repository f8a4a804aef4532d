"""Secrets are removed from text, and nothing else is."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from moediag.masking import (
    HIDDEN,
    Redaction,
    is_secret,
    masked,
    masked_command,
    masked_source,
)

SECRET = "Zq8vR2mK5xT7pL9wN4bD6hJ1"

PLANTED = (
    f"login failed: api_key={SECRET}",
    f"hf_{SECRET}", f"ghp_{SECRET}", f"github_pat_{SECRET}", f"glpat-{SECRET}", f"sk-{SECRET}",
    f"xoxb-1234-{SECRET}", "AKIAIOSFODNN7EXAMPLE", f"AIza{SECRET}{SECRET[:11]}", f"nvapi-{SECRET}",
    f"eyJhbGciOiJIUzI1NiJ9.{SECRET}.{SECRET}", f"wandb_v1_{SECRET}", f"npm_{SECRET}{SECRET[:12]}",
    f"WANDB_API_KEY={SECRET}", f"export HF_TOKEN='{SECRET}'", f"password: {SECRET}",
    f'"api_key": "{SECRET}"', f"{{'secret': '{SECRET}'}}", f"--wandb-api-key {SECRET}",
    f"--token={SECRET}", f"AWS_SECRET_ACCESS_KEY={SECRET}", f"dbPassword={SECRET}",
    f"https://me:{SECRET}@host/x", f"postgresql://me:{SECRET}@db:5432/runs",
    f"https://host/x?access_token={SECRET}&y=1", f"Authorization: Bearer {SECRET}",
    f"authorization: Basic {SECRET}==", f"Bearer {SECRET}", f"Cookie: session={SECRET}",
    f"https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"https://discord.com/api/webhooks/1/{SECRET}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
)  # fmt: skip


@pytest.mark.parametrize("text", PLANTED)
def test_a_secret_is_removed(text: str) -> None:
    found = masked(f"before {text} after")
    assert SECRET not in found
    assert "AKIAIOSFODNN7EXAMPLE" not in found
    assert HIDDEN in found
    assert found.startswith("before ")


@pytest.mark.parametrize(
    "text",
    [
        "pad_token=</s> eos_token_id=2 num_tokens: 4096 max_new_tokens=16",
        "--tokenizer gpt2 --key value --seed 0",
        'File "/home/me/train.py", line 12, in step',
        "KeyError: 'token'",
        "all_reduce, called by main (train.py:8)",
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "https://github.com/pytorch/pytorch/issues/56297",
        "password: None, token=None, api_key=''",
        "tcp://10.0.0.1:29500",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert masked(text) == text


def test_a_program_stays_one() -> None:
    program = (
        "token = os.environ['HF_TOKEN']\n"
        f"api_key = '{SECRET}'\n"
        f"os.environ['WANDB_API_KEY'] = \"{SECRET}\"\n"
        f"login(token='hf_{SECRET}')\n"
        "password = getpass()\n"
    )
    found = masked_source(program)
    assert SECRET not in found
    ast.parse(found)
    assert found.count(HIDDEN) == 3
    assert "token = os.environ['HF_TOKEN']" in found


def test_masking_again_changes_nothing() -> None:
    for text in PLANTED:
        assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True), ("--wandb-api-key", True), ("dbPassword", True), ("apikey", True),
        ("SSH_PRIVATE_KEY", True), ("token", True), ("client_secret", True),
        ("pad_token", False), ("tokens", False), ("tokenizer", False), ("key", False),
        ("cache_key", False), ("MASTER_PORT", False), ("author", False), ("", False),
    ],
)  # fmt: skip
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) == secret


def test_command_lines() -> None:
    words = ("train.py", "--api-key", SECRET, f"--token={SECRET}", "--token", "--lr", "0.1")
    assert masked_command(words) == (
        "train.py", "--api-key", HIDDEN, f"--token={HIDDEN}", "--token", "--lr", "0.1",
    )  # fmt: skip


def test_source_stays_python() -> None:
    source = (
        "api_key = 'planted0planted0'\ntoken = get_token(kind=key)\n"
        'url = f"https://me:planted1@host/{token}"\nopen_secret(password="planted2", user=name)\n'
        "raise E('login failed: api_key=planted3planted3')\nif secret == rank: pass\n"
        "if password == 'planted4': pass\nself.api_key: str | None = 'planted5'\n"
        "token = os.environ.get('HF_TOKEN', 'planted6')\n"
        "add('x'); parser.add_argument('--api-key', type=str, default='planted7')\n"
        "name = os.getenv('MODEL', 'gpt2')\n"
        "def f(password: str) -> None:\n    access_token = 'planted8'\n"
    )
    shown = masked_source(source)
    assert "planted" not in shown
    assert [type(node) for node in ast.walk(ast.parse(shown))] == [
        type(node) for node in ast.walk(ast.parse(source))
    ]
    assert "token = get_token(kind=key)" in shown and "if secret == rank: pass" in shown
    assert "os.getenv('MODEL', 'gpt2')" in shown


def test_a_folder_is_redacted_and_binary_files_with_paths_are_told(tmp_path: Path) -> None:
    made = Redaction(hosts=("gpu-17",), users=("alice",))
    (tmp_path / "deep").mkdir()
    result = tmp_path / "deep" / "result.json"
    result.write_text(json.dumps({"host": "gpu-17", "file": "/home/alice/x/train.py"}))
    os.utime(result, (1, 1))
    (tmp_path / "dump").write_bytes(b"\x80\xff/home/alice/x")
    (tmp_path / "beat").write_bytes(b"\x80\xff\x00")
    assert made.folder(tmp_path) == [tmp_path / "dump"]
    assert json.loads(result.read_text()) == {"host": "host_1", "file": "/path-1/train.py"}
    assert result.stat().st_mtime == 1
    assert (tmp_path / "dump").read_bytes().endswith(b"alice/x")


def test_redaction_replaces_the_same_name_by_the_same_word() -> None:
    made = Redaction(hosts=("gpu-17", "gpu-18"), users=("alice",))
    text = made.text(
        "gpu-17: alice runs /home/alice/exp/train.py and /home/alice/exp/model.py on gpu-18; "
        "/home/alice/venv/lib/python3.11/site-packages/torch/nn/x.py /usr/lib/libc.so.6"
    )
    assert text == (
        "host_1: user_1 runs /path-1/train.py and /path-1/model.py on host_2; "
        "/site-packages/torch/nn/x.py /usr/lib/libc.so.6"
    )
    assert made.text("gpu-17 at /home/alice/exp/data.py") == "host_1 at /path-1/data.py"
    assert "gpu-170" in made.text("gpu-170")

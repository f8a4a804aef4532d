"""Secrets are removed from text, and nothing else is."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from moediag.evidence.exits import elastic_error
from moediag.evidence.model import RankError
from moediag.launch.capture.masked_source import masked_source
from moediag.masking import (
    HIDDEN,
    Redaction,
    is_secret,
    masked,
    masked_command,
)
from moediag.ranks.entry import error_content

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
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{SECRET}\n-----END PGP PRIVATE KEY BLOCK-----",
    f"postgres://user:{SECRET}@host", f"postgres://user:p@{SECRET}@host/db", f"redis://:{SECRET}@h",
    f"oauth2:{SECRET}@gitlab.com", f"curl -u me:{SECRET} x", f"auth=('me', '{SECRET}')",
    f"HTTPBasicAuth('me', '{SECRET}')", f"basic dXNlcjpwYXNz{SECRET}", f"login x password {SECRET}",
    f"AccountKey={SECRET}==;EndpointSuffix=x", f"https://x/c?sv=1&sig={SECRET}%3D",
    f"https://s3/x?X-Amz-Signature={SECRET}", f"'SecretAccessKey': '{SECRET}'",
    f"GOCSPX-{SECRET}", f"1//0{SECRET}{SECRET}", f"xapp-1-A-{SECRET}", f"gsk_{SECRET}",
    f"hvs.{SECRET}", f"dapi0123456789abcdef0123456789abcdef {SECRET * 0}hf_{SECRET}",
    f"ckpt_hf_{SECRET}.pt", f"OPENAI_KEY={SECRET}", f"PGPASSWORD={SECRET}", f"db_pass={SECRET}",
    f"wandb login {SECRET}", f"invalid token {SECRET}", f"API key provided: {SECRET}",
    f"the password '{SECRET}' is wrong", f"wandb.login(key='{SECRET}')", f"SecretStr('{SECRET}')",
    f"os.environ['X_TOKEN']='{SECRET}'", f"password=b'{SECRET}'", f"secrets = {{'a': '{SECRET}'}}",
    f"api_keys=['x1', '{SECRET}']", f'"{{\\"api_key\\": \\"{SECRET}\\"}}"', f"token%3D{SECRET}%26",
    f"wandb:\n  api_key: {SECRET}", f"api_key: |\n    {SECRET}", f"api_key:\n  {SECRET}",
    f'password: "{SECRET}', f"<password>{SECRET}</password>", f"webhook=https://x/{SECRET}",
    f"- name: HF_TOKEN\n  value: {SECRET}", f'{{"name": "DB_PASSWORD", "value": "{SECRET}"}}',
    f'<add key="ApiKey" value="{SECRET}"/>', f"['train', '--password', '{SECRET}']",
    f"token:\n    - {SECRET}", f"passwords: [a, {SECRET}]", f"otp={SECRET}", f"NGC_KEY={SECRET}",
    f"'x\\nhvs.{SECRET}'", f"'x\\nsecrets={SECRET}'", f"mysql -p{SECRET}", f"pat_{SECRET}",
    f"s.{SECRET}", f"?sig={SECRET}", f"pass: {SECRET}", f"set X {SECRET}", f"--pat {SECRET}",
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
        "one-token: each rank repeats one token; an expert gets no token: set starve",
        "token 128256 of Qwen3MoeForConditionalGeneration in /data/tokens_4096_x2.bin",
        "PWD=/home/me OLDPWD=/ key=layers.0.self_attn.q_proj.weight cache_key: 3f786850e387550f",
        "pip install sk-learn-intelligence-extension; sha256:9f86d081884c7d659a2feaa0c55ad015",
        "docker run -u 1000:1000 python:3.11-slim; forward_pass: 3 ms; --notify needs --follow",
        "model.layers.3.mlp.experts.17.gate_proj.weight 0x7f3a2b4c5d6e optimizer.state[12]['step']",
        "ssh node-12:22 gives rank0@node12, mailto:someone1234@example.com; first_token: 3.2 s",
        "no checkpoint at runs/2026-11-26T06_11_05-a1b2c3d4/step_001000/rank-0.pt",
        "runs/Zq8vR2mK5xT7pL9wN4bD6hJ1/log Zq8vR2mK5xT7pL9wN4bD6hJ1.pt Wav2Vec2ForSequenceClassify",
        "cudaD3D10GetDirect3DDevice GPU-6f1D5c2b 0x1950A86A20F9469CFC6C ZN5torch8autograd6Engine4",
        "{'name': 'lr', 'value': 0.1} - name: OMP_NUM_THREADS\n  value: 1",
        "parser.add_argument('--hf-token', type=str) ['--token', '--lr', '0.1'] a\\nb\\tc",
        "Credentials are not needed. The password is asked for twice. Its token is empty.",
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


def test_secrets_of_several_literals_and_comments() -> None:
    source = (
        "# export WANDB_API_KEY=planted0\n"
        "api_key = ('planted1'\n           'planted2')\n"
        "url = 'postgres://me:plan' 'ted3@host'; t = 'hf_planted4planted4' + 'planted5'\n"
        "t = ''.join(['hf_planted6planted6', 'planted7'])\n"
        "run(['train', '--api-key', 'planted8', '--lr', '0.1'])\n"
        'KEY = """-----BEGIN PRIVATE KEY-----\nplanted9\n-----END PRIVATE KEY-----"""\n'
        "os.environ['HF_TOKEN'] = 'plan' \\\n    'ted10'\n"
        "pairs = [('api_key', 'planted11'), ('lr', '0.1')]; secrets = {'a': ['planted12']}\n"
        "token = f'planted13{rank}'; password = b'planted14'.decode()\n"
        "def f(password='planted15', *, token='planted16'): pass\n"
        "f('planted17'); client.login('planted18'); Credentials('planted19')\n"
        'conf = """\nwandb:\n  api_key: planted20\n"""\n'
    )
    innocent = (
        "token = cfg['wandb']['token_name']; token = open('/run/secrets/hf').read()\n"
        "raise E('gets no token: set starve'); pair = ('zero-token', 'no token, on some ranks')\n"
        "run(['torchrun', '--nproc-per-node', '2', 'train.py'])  # token by token\n"
    )
    shown = masked_source(source + innocent)
    assert "planted" not in shown and "ted3" not in shown and "ted10" not in shown
    assert shown.endswith(innocent)
    assert "'--lr', '0.1'" in shown and "('lr', '0.1')" in shown
    assert [node.lineno for node in ast.parse(shown).body] == [
        node.lineno for node in ast.parse(source + innocent).body
    ]
    assert "planted" not in masked_source("match x:\n api_key = 'planted'\n else")  # not Python


def test_errors_have_no_secrets() -> None:
    text = "cannot read\n  api_key: planted0\n  db: postgres://me:planted1@host"
    try:
        raise ValueError(text)
    except ValueError as error:
        content = error_content(error)
    assert "planted" not in json.dumps(content)
    read = elastic_error(content)
    assert read is not None and (read.type, read.message) == ("ValueError", masked(text))
    assert "planted" not in RankError("ValueError", text, after=text).message


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

"""Environments of real releases, built from the machine's own index with the real uv.

They need the index (or ``MOEDIAG_WHEELS``), a minute and some 300 MB of disk.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moediag.lab.stacks import environment, offline, releases, uv
from moediag.lab.stacks.environment import Stack
from moediag.lab.stacks.first_import import import_once

pytestmark = [pytest.mark.stack, pytest.mark.wide]

PROGRAM = """
import importlib.util, torch, transformers, accelerate, moediag.protocol
print(torch.__version__, transformers.__version__, accelerate.__version__)
tool = ("typer", "rich", "pydantic", "ruamel", "platformdirs", "pytest", "hypothesis", "deepspeed")
print([name for name in tool if importlib.util.find_spec(name)])
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
config = Qwen3MoeConfig(hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    num_experts=4, num_experts_per_tok=2, vocab_size=32)
ids = torch.arange(8)[None]
print(float(Qwen3MoeForCausalLM(config)(input_ids=ids, labels=ids).loss) > 0)
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEDIAG_CACHE", str(folder))
        patch.delenv("MOEDIAG_BASE_PYTHON", raising=False)
        yield folder


def output(stack: Stack, program: str = PROGRAM) -> list[str]:
    done = subprocess.run(
        [stack.python, "-c", program],
        env=stack.environ(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_a_real_overlay_trains_on_the_torch_in_use() -> None:
    stack = environment.ensure({"transformers": "4.53.2"})
    assert stack.kind == "overlay"
    assert stack.cutoff is None or stack.cutoff.date().isoformat() == "2025-07-12"
    versions, leaked, works = output(stack)
    torch = importlib.metadata.version("torch")
    assert versions == f"{torch} 4.53.2 {stack.versions['accelerate']}"
    assert leaked == "[]"
    assert works == "True"


def test_companions_are_older_than_the_cutoff() -> None:
    old = environment.ensure({"transformers": "4.53.2"})
    if old.cutoff is None:
        pytest.skip("this index gives no upload dates")
    release = releases.find("accelerate", str(old.versions["accelerate"]))
    assert release.uploaded is not None and release.uploaded < old.cutoff


def test_built_environments_have_bytecode(cache: Path) -> None:
    stack = environment.ensure({"transformers": "4.53.2"})
    import_once(stack)
    package = stack.python.parent.parent / "lib"
    compiled = list(package.glob("python3*/site-packages/transformers/__pycache__/*.pyc"))
    assert compiled
    again = environment.ensure({"transformers": "4.53.2"})
    assert again.key == stack.key


def test_a_bundle_installs_and_builds_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    bundle = offline.make_bundle([{"transformers": "4.53.2"}], version, tmp_path / "bundle")
    assert any(name.startswith("moediag-") for name in bundle.wheels)
    assert not any(name.startswith("torch-") for name in bundle.wheels)
    # Another machine: empty caches and no network.
    monkeypatch.setenv("MOEDIAG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("MOEDIAG_WHEELS", str(bundle.folder))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    stack = environment.ensure({"transformers": "4.53.2"})
    assert output(stack)[2] == "True"


def test_the_install_script_of_a_bundle_works(tmp_path: Path) -> None:
    version = ".".join(map(str, sys.version_info[:2]))
    bundle = offline.make_bundle([], version, tmp_path / "bundle")
    target = tmp_path / "venv"
    command = [uv.find_uv(), "venv", "-q", "--no-project", "--python", sys.executable, target]
    subprocess.run([*map(str, command)], check=True)
    script = ["sh", str(bundle.folder / "install.sh"), str(target / "bin" / "python")]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environ["HTTPS_PROXY"] = "http://127.0.0.1:9"
    refused = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode != 0 and "no torch" in refused.stderr
    (site,) = target.glob("lib/python3*/site-packages")
    info = site / "torch-2.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    subprocess.run(script, env=environ, check=True)
    program = "import moediag.lab.stacks.environment, moediag; print(moediag.__file__)"
    done = subprocess.run(
        [target / "bin" / "python", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(site) in done.stdout

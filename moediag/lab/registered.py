"""What the laboratory adds to the job tool, see `moediag.extension`. Imports nothing of it."""

from moediag.extension import Command

# Packages of the extra `run`, as they are imported, beside the ranks' own.
NEEDED = (
    "pydantic", "ruamel", "packaging", "filelock", "platformdirs", "pypi_simple", "requests",
)  # fmt: skip

_CLI = "moediag.lab.cli"

COMMANDS = (
    Command(
        "Releases",
        "run",
        f"{_CLI}.run:run",
        "run expert-starvation --cpu 4 --set model.family=mixtral",
    ),
    Command(
        "Releases",
        "check",
        f"{_CLI}.check:check",
        "check ./Qwen3-30B-A3B --layout dp_shard=64,ep=8",
    ),
    Command(
        "Releases", "bisect", f"{_CLI}.bisect:bisect", "bisect expert-starvation --window --cpu 2"
    ),
    Command(
        "Releases",
        "matrix",
        f"{_CLI}.matrix:matrix",
        "matrix expert-starvation --family all --cpu 2",
    ),
    Command("Releases", "hunt", f"{_CLI}.hunt:hunt", "hunt --release newest --cpu 2"),
    Command(
        "Releases",
        "nightly",
        f"{_CLI}.nightly:nightly",
        "nightly --cpu 2 --track pinned --track newest --minutes 30",
    ),
    Command(
        "Scenarios",
        "export",
        f"{_CLI}.export:export",
        "export expert-starvation --variant unfixed --file starvation.py",
    ),
    Command(
        "Scenarios", "init", f"{_CLI}.init:init", "init my-failure.yaml --from expert-starvation"
    ),
    Command("Scenarios", "list", f"{_CLI}.scenarios:list_", "list tensor parallel"),
    Command("Scenarios", "show", f"{_CLI}.scenarios:show", "show expert-starvation"),
    Command("Scenarios", "schema", f"{_CLI}.scenarios:schema", "schema > scenario.schema.json"),
    Command("Setup", "stacks", f"{_CLI}.stacks:app", ""),
)

# Name -> what `moediag.extension.provided` returns.
PROVIDED = {
    "run": "moediag.lab.api:run",
    "check": "moediag.lab.api:check",
    "scenario names": "moediag.lab.scenario.catalogue:names",
    "scenario entry": "moediag.lab.scenario_entries:scenario",
    "citing": "moediag.lab.pipeline.citations:citing",
    "machine checks": "moediag.lab.machine_checks:checks",
    "judged again": "moediag.lab.pipeline.judged_again:judged_again",
    "draft": "moediag.lab.upstream.draft_evidence:of_runs",
    "stack": "moediag.lab.upstream.stack_information:of_request",
    "packages": "moediag.lab.cli.completions:packages",
}

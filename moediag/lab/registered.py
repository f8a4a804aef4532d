"""What the laboratory adds to the job tool, see `moediag.extension`. Imports nothing of it."""

from moediag.extension import Command

# Packages of the extra `run`, as they are imported, beside the ranks' own.
NEEDED = (
    "pydantic", "ruamel", "packaging", "filelock", "platformdirs", "pypi_simple", "requests",
)  # fmt: skip

COMMANDS = tuple(
    Command(section, name, f"moediag.lab.cli.{place}", example)
    for section, name, place, example in (
        ("Releases", "run", "run:run", "run expert-starvation --cpu 4 --set model.family=mixtral"),
        ("Releases", "check", "check:check",
         "check ./Qwen3-30B-A3B --layout dp_shard=64,ep=8"),
        ("Releases", "bisect", "bisect:bisect", "bisect expert-starvation --window --cpu 2"),
        ("Releases", "matrix", "matrix:matrix",
         "matrix expert-starvation --family all --cpu 2"),
        ("Releases", "hunt", "hunt:hunt", "hunt --release newest --cpu 2"),
        ("Releases", "nightly", "nightly:nightly",
         "nightly --cpu 2 --track pinned --track newest --minutes 30"),
        ("Scenarios", "export", "export:export",
         "export expert-starvation --variant unfixed --file starvation.py"),
        ("Scenarios", "init", "init:init", "init my-failure.yaml --from expert-starvation"),
        ("Scenarios", "list", "scenarios:list_", "list tensor parallel"),
        ("Scenarios", "show", "scenarios:show", "show expert-starvation"),
        ("Scenarios", "schema", "scenarios:schema", "schema > scenario.schema.json"),
        ("Setup", "stacks", "stacks:app", ""),
    )
)  # fmt: skip

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

"""Entries of the scenarios of the catalogue."""

from __future__ import annotations

from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.lab.scenario.schema import Scenario
from moediag.reference.word_entry import Entry


def scenario(name: str) -> Entry:
    """The entry of one scenario of the catalogue."""
    return entry(load(catalogue.find(name)), name)


def entry(found: Scenario, name: str) -> Entry:
    """The entry of a scenario that commands call ``name``."""
    ranks = f"--cpu {found.world.default}"
    return Entry(
        "scenario",
        name,
        (f"{found.title}.", " ".join(found.description.split()), _setting(found)),
        tuple((_variant(found, key), _expected(found, key)) for key in found.variants),
        "Variants, and the verdict that each must have",
        (f"moediag run {name} {ranks}", f"moediag show {name}"),
        tuple(found.sources),
    )


def _setting(found: Scenario) -> str:
    """``transformers 4.53.2. Mesh dp_shard=world. 2 ranks by default.``"""
    stack = ", ".join(f"{package} {version}" for package, version in found.stack.items())
    mesh = ", ".join(f"{axis}={size}" for axis, size in found.layout.items())
    ranks = f"{found.world.default} ranks by default"
    return ". ".join(part for part in (stack, f"Mesh {mesh}" * bool(mesh), ranks) if part) + "."


def _variant(found: Scenario, name: str) -> str:
    return f"{name} ({found.variants[name].role})"


def _expected(found: Scenario, name: str) -> str:
    """``clean: the same batch on every rank``."""
    variant = found.variants[name]
    words = variant.expect.words()
    shows = variant.expect.shows
    if shows:
        words = f"{words}, at least once {shows}"
    if variant.expect.judgement == "wrong":
        words = f"{words}, a fix that does not fix it"
    return f"{words}: {variant.title}" if variant.title else words

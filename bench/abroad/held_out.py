"""Cases that nobody who works on the diagnosis has seen a page of. They are written before the
first of them is run under moediag; once their pages are read, they belong into a module of their
own, as ``third_round.py``."""

from __future__ import annotations

from bench.abroad.cases import Case

HELD_OUT: tuple[Case, ...] = ()  # Case(…, held_out=True)

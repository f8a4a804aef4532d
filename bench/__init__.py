"""Measures what moediag costs, as ratios within one run: ``python -m bench``."""

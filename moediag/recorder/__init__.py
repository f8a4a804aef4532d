"""What one rank does, written down while it does it: collectives with the parameters they carry,
tokens per expert, gradients that never came. No change to the job's source, no effect on its
numbers, and nothing that the job could trip over."""

from __future__ import annotations

from moediag.recorder.core import Recorder
from moediag.recorder.start import install

__all__ = ["Recorder", "install"]

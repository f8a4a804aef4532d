"""Simulates jobs: Megatron-like schedules over pipeline, data, tensor and expert groups, healthy or
with faults, and the Flight Recorder dumps that such a job leaves on NCCL."""

from bench.jobs.device import Run
from bench.jobs.dimensions import DIMENSIONS, HEALTHY, Dimension
from bench.jobs.faults import FAULTS, another, faulty, running
from bench.jobs.recorded import dumps
from bench.jobs.schedules import Job, Layout, Op, healthy
from bench.jobs.written import Folder, folder_of, write

__all__ = [
    "DIMENSIONS", "FAULTS", "HEALTHY", "Dimension", "Folder", "Job", "Layout", "Op", "Run",
    "another", "dumps", "faulty", "folder_of", "healthy", "running", "write",
]  # fmt: skip

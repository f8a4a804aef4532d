"""The commands of one process, and of a comparison with it, that are made from a job's."""

from __future__ import annotations

import pytest

from moediag.pipeline.single_command import one_process, verify_command


@pytest.mark.parametrize(
    ("command", "alone"),
    [
        ("torchrun --nproc-per-node 8 train.py -n 4", "torchrun --nproc-per-node 1 train.py -n 4"),
        ("torchrun --nnodes=2 --nproc_per_node=gpu t.py",
         "torchrun --nnodes=1 --nproc_per_node=1 t.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 t.py",
         "python -m torch.distributed.run --nproc-per-node 1 t.py"),
        ("/opt/bin/accelerate launch --num_processes 4 t.py",
         "/opt/bin/accelerate launch --num_processes 1 t.py"),
        ("mpirun -np 4 python t.py", "mpirun -np 1 python t.py"),
        ("torchrun --nproc-per-node=2 t.py --world-size=2",
         "torchrun --nproc-per-node=1 t.py --world-size=1"),
        ("torchrun --nproc-per-node 4 t.py --dp 2 --tp_size=2 --ep 3 --lr 2 --dp-rate 2",
         "torchrun --nproc-per-node 1 t.py --dp 1 --tp_size=1 --ep 3 --lr 2 --dp-rate 2"),
        ("torchrun --nnodes 2 --nproc-per-node 4 t.py --tensor-model-parallel-size 8 --cp",
         "torchrun --nnodes 1 --nproc-per-node 1 t.py --tensor-model-parallel-size 1 --cp"),
        ("torchrun --nproc-per-node gpu t.py --parallelism.tensor_parallel_degree=2 mesh.pp=2",
         "torchrun --nproc-per-node 1 t.py --parallelism.tensor_parallel_degree=1 mesh.pp=1"),
        ("torchrun --nproc-per-node 2 -m some.train --tp 2",
         "torchrun --nproc-per-node 1 -m some.train --tp 1"),
        ("python train.py --nnodes 2", ""),
        ("torchrun train.py --nproc-per-node 2 --world-size 2", ""),
    ],
)  # fmt: skip
def test_the_launcher_is_told_one_process(command: str, alone: str) -> None:
    assert one_process(command.split()) == alone.split()


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("torchrun --nproc-per-node 2 t.py --api-key hush",
         "moediag verify -- torchrun --nproc-per-node 2 t.py --api-key '***'"),
        ("bash run.sh", "moediag verify --reference 'COMMAND IN ONE PROCESS' -- bash run.sh"),
    ],
)  # fmt: skip
def test_a_comparison_is_filled_in(command: str, typed: str) -> None:
    assert verify_command(command.split()) == typed


def test_a_comparison_names_its_reference() -> None:
    typed = verify_command(["mpirun", "-n", "2", "t.py"], ["python", "t.py"])
    assert typed == "moediag verify --reference 'python t.py' -- mpirun -n 2 t.py"

"""The programs of the fourth round, and how each is started on CPU ranks. They run unmodified but
for the edits here, which remove GPUs, launchers and downloads; ``scripts/stand_ins`` has a tiny
torchvision, text, log and metrics for them."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.abroad.programs import SCRIPTS, Program, for_llmc, on_cpu

_RANK = "int(os.environ['RANK'])"


def _stand_ins(folder: Path) -> None:
    for path in (SCRIPTS / "stand_ins").glob("*.py"):
        shutil.copy(path, folder)
    for name in ("checkpoint", "sample"):
        (folder / name).mkdir(exist_ok=True)


def _with_tokens(folder: Path) -> None:
    _stand_ins(folder)
    for_llmc(folder)


LATER_PROGRAMS = (
    Program(  # 28c65cd
        "raschka-ddp", "LLMs-from-scratch/appendix-A/01_main-chapter-code",
        "DDP-script-torchrun.py", prepare=_stand_ins, prints=r"Loss: [0-9.]+",
        adapt=on_cpu(
            "DDP-script-torchrun.py",
            ('init_process_group(backend="nccl"',
             'init_process_group(backend="gloo", rank=rank, world_size=world_size)'),
            ("torch.cuda.set_device(rank)", ""),
            ("# factor = 4", "factor = 8"),
            ("# X_train = torch.cat",
             "X_train = torch.cat([X_train + torch.randn_like(X_train) for _ in range(factor)])"),
            ("# y_train = y_train.repeat", "y_train = y_train.repeat(factor)"),
            ("# X_test = torch.cat", "X_test = torch.cat([X_test for _ in range(factor)])"),
            ("# y_test = y_test.repeat", "y_test = y_test.repeat(factor)"),
            ("pin_memory=True", ""),
            ("model.to(rank)", ""),
            ("model = DDP(model", "model = DDP(model)"),
            ("features, labels = features.to(rank)", ""),
            ("features, labels = features.to(device)", ""),
        ),
    ),
    Program(  # a552567
        "dist-tuto", "dist_tuto.pth", "train_dist.py", ranks=3, prepare=_stand_ins,
        adapt=on_cpu(
            "train_dist.py",
            ("bsz = 128 // size", "bsz = 24 // size"),
            ("if type(param) is torch.Tensor", "if param.grad is not None:"),
            ("dist.all_reduce(param.grad.data, op=", "dist.all_reduce(param.grad.data)"),
            ("for epoch in range(10)", "for epoch in range(3):"),
            ("os.environ['MASTER_ADDR']", ""),
            ("os.environ['MASTER_PORT']", ""),
            ("    size = 2", "size = int(os.environ['WORLD_SIZE'])"),
            ("for rank in range(size):", f"init_processes({_RANK}, size, run)"),
            ("p = Process(target=", ""), ("p.start()", ""), ("processes.append(p)", ""),
        ),
    ),
    Program(  # e6d2beb
        "mnist-trainer", "pytorch-distributed-example/mnist", "main.py",
        ("--epochs=3", "--batch-size=16", "--world-size=2"), prepare=_stand_ins,
        prints=r"test loss: [0-9.]+",
        adapt=on_cpu(
            "main.py",
            ("import argparse", "import argparse\nimport os\nimport on_cpu"),
            ("init_method=args.init_method", ""),
            ("rank=args.rank,", f"rank={_RANK},"),
        ),
    ),
    Program(  # ef5f67c
        "vqvae", "vq-vae-2-pytorch", "train_vqvae.py",
        ("--size=16", "--epoch=2", "--n_gpu=2", "data"), needs=("tqdm",), prepare=_stand_ins,
        adapt=(
            *on_cpu(
                "train_vqvae.py",
                ("out, _ = model(sample)", "out, _ = model.module(sample)"),
                ('device = "cuda"', 'device = "cpu"'),
                ("batch_size=128 // args.n_gpu",
                 "dataset, batch_size=8, sampler=sampler, num_workers=1"),
                ("model = VQVAE()", "model = VQVAE(channel=8, n_res_channel=4, n_embed=8)"),
                ("device_ids=[dist.get_local_rank()]", ""),
                ("output_device=dist.get_local_rank()", ""),
                ("dist.launch(main",
                 "dist.distributed_worker(int(os.environ['RANK']), main, args.n_gpu, args.n_gpu, "
                 "0, 'env://', (args,))"),
            ),
            *on_cpu("distributed/__init__.py", ("from .launch import",
                                               "from .launch import distributed_worker, launch")),
            *on_cpu(
                "distributed/launch.py",
                ("if not torch.cuda.is_available()", "if False:"),
                ('backend="NCCL"', 'backend="gloo",'),
                ("if n_gpu_per_machine > torch.cuda.device_count()", "if False:"),
                ("torch.cuda.set_device(local_rank)", ""),
            ),
            *on_cpu(
                "distributed/distributed.py",
                ("storage = torch.ByteStorage", ""),
                ("tensor = torch.ByteTensor(storage)",
                 "tensor = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)"),
                ("local_size = torch.IntTensor", "local_size = torch.IntTensor([tensor.numel()])"),
                ("size_list = [torch.IntTensor([1])",
                 "size_list = [torch.IntTensor([1]) for _ in range(world_size)]"),
                ("tensor_list.append(torch.ByteTensor",
                 "tensor_list.append(torch.ByteTensor(size=(max_size,)))"),
                ("padding = torch.ByteTensor",
                 "padding = torch.ByteTensor(size=(max_size - local_size,))"),
            ),
        ),
    ),
    Program(  # a2bdb16
        "summer-ddp", "pytorch-ddp", "train_ddp.py", ranks=4, prepare=_stand_ins,
        adapt=on_cpu(
            "train_ddp.py",
            ("import torchvision", "import on_cpu\n{line}"),
            ('backend="nccl"', 'backend="gloo",'),
            ("batch_size = 256", "batch_size = 8"),
            ("sampler=train_sampler, num_workers=16", "sampler=train_sampler)"),
            ("sampler=test_sampler, num_workers=16", "shuffle=False, sampler=test_sampler)"),
            ("net = nn.SyncBatchNorm", ""),
            ("net = nn.parallel.DistributedDataParallel(", "net = nn.parallel."
             "DistributedDataParallel(net)"),
            ("epochs = 1", "epochs = 3"),
        ),
    ),
    Program(  # 8e8d284
        "barlowtwins", "barlowtwins", "main.py",
        ("data", "--workers=0", "--epochs=2", "--batch-size=16", "--projector=16-16-16",
         "--print-freq=4"), ranks=3, prepare=_stand_ins, prints=r'"loss": [0-9.]+',
        adapt=on_cpu(
            "main.py",
            ("from PIL import", "import on_cpu\nImage = type('Image', (), {'BICUBIC': 0})"),
            ("args.ngpus_per_node = torch.cuda", "args.ngpus_per_node = "
             "int(os.environ['WORLD_SIZE'])"),
            ("args.dist_url = 'tcp://localhost", "args.dist_url = 'env://'"),
            ("torch.multiprocessing.spawn(", f"main_worker({_RANK}, args)"),
            ("backend='nccl'", "backend='gloo', init_method=args.dist_url,"),
            ("model = nn.SyncBatchNorm", ""),
            ("model = torch.nn.parallel.Dist",
             "model = torch.nn.parallel.DistributedDataParallel(model)"),
            ("assert args.batch_size % args.world", ""),
            ("pin_memory=True", "sampler=sampler)"),
            ("with torch.cuda.amp.autocast()", "if True:"),
            ("scaler = torch.cuda.amp", ""),
            ("scaler.scale(loss).backward()", "loss.backward()"),
            ("scaler.step(optimizer)", "optimizer.step()"),
            ("scaler.update()", ""),
        ),
    ),
    Program(  # f411b3d
        "modded-nanogpt", "modded-nanogpt/records/track_1_short/2024-10-10_Muon",
        "train_gpt2.py", needs=("numpy",), prepare=_with_tokens,
        prints=r"(train|val)_loss:[0-9.]+",
        adapt=on_cpu(
            "train_gpt2.py",
            ("import torch._inductor.config", "import on_cpu\nconfig = None"),
            ("@torch.compile", ""),
            ("'data/fineweb10B/fineweb_train", "input_bin : str = 'train.bin'"),
            ("'data/fineweb10B/fineweb_val", "input_val_bin : str = 'val.bin'"),
            ("batch_size : int = 8*64", "batch_size : int = 8"),
            ("device_batch_size : int = 64", "device_batch_size : int = 2"),
            ("sequence_length : int = 1024", "sequence_length : int = 32"),
            ("num_iterations : int = 6200", "num_iterations : int = 16"),
            ("warmdown_iters : int = 1800", "warmdown_iters : int = 8"),
            ("val_loss_every : int = 125", "val_loss_every : int = 4"),
            ("val_tokens : int = 10485760", "val_tokens : int = 256"),
            ("assert torch.cuda.is_available()", ""),
            ("dist.init_process_group(backend", "dist.init_process_group(backend='gloo')"),
            ("device = f'cuda:", "device = 'cpu'"),
            ("num_vocab = 50257", "num_vocab = 256"),
            ("model = GPT(GPTConfig(", "model = GPT(GPTConfig(vocab_size=num_vocab, n_layer=2, "
                                       "n_head=2, n_embd=32))"),
            ("model = torch.compile(model)", ""),
            ("model = DDP(model", "model = DDP(model)"),
            ("ctx = torch.amp.autocast", "import contextlib\nctx = contextlib.nullcontext()"),
            ("result = subprocess.run(['nvidia-smi']",
             "result = subprocess.run(['true'], stdout=subprocess.PIPE, text=True)"),
            ("dist.all_reduce(val_loss, op", "dist.all_reduce(val_loss)"),
            ('print(f"peak memory', "pass"),
        ),
    ),
    Program(  # f73abd3
        "translation", "pytorch-transformer-distributed", "train.py",
        ("--batch_size=4", "--num_epochs=2", "--seq_len=16", "--d_model=16"), ranks=3,
        needs=("tokenizers", "tqdm"), prepare=_stand_ins,
        adapt=on_cpu(
            "train.py",
            ("from datasets import load_dataset", "import on_cpu\n"
             "from tiny_text import load_dataset, torchmetrics, wandb"),
            ("import wandb", ""), ("import torchmetrics", ""),
            ("assert torch.cuda.is_available()", ""),
            ('device = torch.device("cuda")', 'device = torch.device("cpu")'),
            ("model = DistributedDataParallel(", "model = DistributedDataParallel(model)"),
            ("init_process_group(backend='nccl')", "init_process_group(backend='gloo')"),
            ("tokenizer_path = Path(config", "{line}\ntokenizer_path = tokenizer_path.with_name("
             "f\"{os.environ['RANK']}-{tokenizer_path.name}\")"),
            ("model = build_transformer(", "model = build_transformer(vocab_src_len, "
             "vocab_tgt_len, config.seq_len, config.seq_len, d_model=config.d_model, N=1, h=2, "
             "d_ff=32)"),
            ("'wandb_run_id': wandb.run.id", ""),
        ),
    ),
    Program(  # cd12856
        "imagenet", "pytorch-distributed", "distributed.py",
        ("--data=data", "--epochs=2", "--batch-size=24", "--arch=resnet18", "--print-freq=4"),
        prepare=_stand_ins, prints=r"Loss [0-9.e+]+",
        adapt=on_cpu(
            "distributed.py",
            ("import torchvision.transforms", "import on_cpu\n{line}"),
            ("args.nprocs = torch.cuda.device", "args.nprocs = int(os.environ['WORLD_SIZE'])\n"
             "args.local_rank = int(os.environ['RANK'])"),
            ("dist.init_process_group(backend='nccl')", "dist.init_process_group(backend='gloo')"),
            ("model = torch.nn.parallel.DistributedDataParallel(model",
             "model = torch.nn.parallel.DistributedDataParallel(model)"),
            ("device_ids=[local_rank]", ""),
            ("correct_k = correct[:k].view(-1)",
             "correct_k = correct[:k].reshape(-1).float().sum(0, keepdim=True)"),
            ("num_workers=2", "num_workers=1,"), ("num_workers=2", "num_workers=1,"),
            ("pin_memory=True", ""), ("pin_memory=True", ""),
        ),
    ),
)  # fmt: skip

"""Data-parallel training in which rank 0 alone, or each rank, is slow for a reason: ``torchrun
slow.py KIND SECONDS``. Nothing is wrong with it."""

import contextlib
import http.server
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

KIND, SECONDS = sys.argv[1], float(sys.argv[2])
RANK = int(os.environ["RANK"])
FOLDER = tempfile.mkdtemp()
STEPS = 10


def until(seconds=SECONDS):
    """Yields for that time, with a pause of a fifth of a second between."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
        time.sleep(0.2)


class Slow:
    """A file on a disk that takes 40 kB in a fifth of a second."""

    def __init__(self, path):
        self.file = open(path, "wb")

    def write(self, part):
        for at in range(0, len(part), 40_000):
            self.file.write(part[at : at + 40_000])
            self.file.flush()
            time.sleep(0.2)
        return len(part)

    def flush(self):
        self.file.flush()


class Trickle(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in until():
                self.wfile.write(bytes(4_000))
                self.wfile.flush()

    def log_message(self, *words):
        pass


# ------------------------------------------------------------------------ what rank 0 does


def saves(model):
    size = int(SECONDS * 200_000 / 4)
    torch.save({"model": model.state_dict(), "moments": torch.zeros(size)}, Slow(f"{FOLDER}/a.pt"))


def syncs(model):
    with open(f"{FOLDER}/a.bin", "wb") as file:
        for _ in until():
            file.write(bytes(2_000_000))
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)


def copies(model):
    with open(f"{FOLDER}/a.bin", "wb") as file:
        file.write(bytes(int(SECONDS * 200_000)))
    with open(f"{FOLDER}/a.bin", "rb") as file:
        shutil.copyfileobj(file, Slow(f"{FOLDER}/b.bin"), 40_000)


def copies_by_a_child(model):
    """As rsync with a limited rate: the child sleeps for most of the time."""
    child = (
        "import sys, time\nwith open(sys.argv[1], 'wb') as file:\n"
        "    for _ in range(int(float(sys.argv[2]) / 0.2)):\n"
        "        file.write(bytes(40_000)); file.flush(); time.sleep(0.2)"
    )
    subprocess.run([sys.executable, "-c", child, f"{FOLDER}/a.bin", str(SECONDS)], check=True)


def downloads(model):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlretrieve(f"http://127.0.0.1:{server.server_port}/a", f"{FOLDER}/a")
    server.shutdown()


def tokenize(text):
    for _ in until(SECONDS / 4):
        sum(hash(word) for word in text.split())
    return len(text)


def tokenizes(model):
    """Two child processes take four texts each."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(tokenize, ["a few words " * 2000] * 8, chunksize=1)


def evaluates(model):
    with torch.no_grad():
        for _ in until():
            model.module.eval()(torch.randn(64, 64))
    model.train()


def computes(model):
    """One native call after another, without a line of output."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        torch.linalg.svd(torch.randn(300, 300))


def compiles(model):
    def fresh(number):
        return torch.compile(lambda x: (x * number).sin().cumsum(0).softmax(0) @ x.T)

    for number, _ in enumerate(until(), 2):
        torch._dynamo.reset()
        fresh(number)(torch.randn(8 + number, 8))


def builds(model):
    """The compiler of C++ runs as a child."""
    source = '#include <regex>\n#include <map>\nint at(){std::regex r("a+");return r.mark_count();}'
    with open(f"{FOLDER}/a.cpp", "w") as file:
        file.write(source)
    for _ in until():
        subprocess.run(["g++", "-O2", "-c", f"{FOLDER}/a.cpp", "-o", f"{FOLDER}/a.o"], check=True)


def uploads(model):
    """To a server that takes 20 kB a second."""
    import socket

    server = socket.create_server(("127.0.0.1", 0))

    def take():
        got, _ = server.accept()
        while got.recv(4_000):
            time.sleep(0.2)

    threading.Thread(target=take, daemon=True).start()
    with socket.create_connection(server.getsockname()) as to:
        to.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        for _ in until():
            to.send(bytes(4_000))


def pauses(model):
    """Shorter than the patience."""
    time.sleep(min(SECONDS, 20))


ON_RANK_0 = {
    one.__name__: one
    for one in (
        saves, syncs, copies, copies_by_a_child, downloads, tokenizes, evaluates, computes,
        compiles, builds, uploads, pauses,
    )
}  # fmt: skip


# ------------------------------------------------------------------------ what each rank does


class Rows(Dataset):
    def __len__(self):
        return STEPS * 4

    def __getitem__(self, at):
        if KIND == "first-batch" and at == 0:
            time.sleep(SECONDS + 5 * RANK)
        if KIND == "slow-loader":
            time.sleep(SECONDS / STEPS / 4 * (RANK + 1))
        torch.manual_seed(100 * at + RANK)
        return torch.randn(64)


def main():
    if KIND == "late" and RANK:
        time.sleep(SECONDS)
    dist.init_process_group("gloo")
    if KIND == "reads-late" and RANK:
        downloads(None)
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    for step, batch in enumerate(DataLoader(Rows(), batch_size=4, num_workers=1), 1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if step == 6 and RANK == 0 and KIND in ON_RANK_0:
            ON_RANK_0[KIND](model)
        if step == 6 and KIND == "all-compute":
            computes(model)
    if KIND == "uploads-at-the-end" and RANK == 0:
        uploads(model)
    dist.barrier()
    print("done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Two ranks that hang, in a program full of secrets: in its text, its locals, its messages, and the
arguments and the environment that `tests/e2e/test_secrets.py` gives it. Each has the word planted.
"""

from __future__ import annotations

import logging
import sys

import torch
import torch.distributed as dist

API_KEY = "planted00AAAAAAAAAAAAAAAA"
CONFIG = {"secret": "planted01BBBBBBBBBBBBBBBB", "url": "https://me:planted02CCCC@host/x"}
HEADERS = {"Authorization": "Bearer planted03DDDDDDDD", "Cookie": "session=planted04EEEEEEEE"}
TOKENS = ["hf_planted05AAAAAAAAAAAAAAAA", "ghp_planted06AAAAAAAAAAAAAAAA"]
KEY = "-----BEGIN PRIVATE KEY-----\nplanted07AAAA\n-----END PRIVATE KEY-----"


class LoginError(Exception):
    pass


def waits(password: str) -> None:
    access_token = "planted08FFFFFFFFFFFFFFFF"
    if password == "planted09GGGGGGGGGGGGGGGG" and access_token:
        print(f"connected with --api-key {API_KEY} and {HEADERS}", flush=True)
    try:
        if dist.get_rank() == 0:
            raise LoginError(
                "no answer from https://me:planted10@db:5432/runs with api_key=planted11, "
                "token: planted12planted12, Authorization: Bearer planted13planted13"
            )
    except LoginError:
        logging.exception("Set-Cookie: session=planted14; wandb_v1_planted15planted15")
        logging.exception("https://hooks.slack.com/services/T0/B0/planted16")
        dist.all_reduce(torch.ones(1))
    if access_token != "" and dist.get_rank() == 1:
        dist.barrier()
    raise LoginError(
        "password=planted17 in https://host/x?access_token=planted18&y=1 xoxb-1-planted19"
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    waits(sys.argv[sys.argv.index("--password") + 1])

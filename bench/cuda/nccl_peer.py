#!/usr/bin/env python3
"""The peer of gpu_bench's mode gpus: NCCL's all_to_all_single, through torch, moves rows of the same
number and size between two GPUs, already sorted by rank. What a dispatch does beside that (finding the
places, gathering the rows, telling which token is where) is not in these times.

    torchrun --nproc-per-node 2 bench/cuda/nccl_peer.py FILE.json
"""

import json
import os
import sys

import torch
import torch.distributed as dist

REPLAYS = 30
# name, rows that a rank sends to each rank, bytes of a row. 4096 tokens of top-8 of 256 make 4080 rows for
# each rank when a token travels once to a rank, 16384 when it travels once for each choice.
CASES = [
    ("4096 tokens, a row per (token, rank), bf16", 4080, 14336),
    ("4096 tokens, a row per choice, bf16", 16384, 14336),
    ("128 tokens, a row per choice, e4m3 and scales", 512, 7392),
    ("128 tokens, a row per choice, bf16", 512, 14336),
]


def median_us(send, receive):
    for _ in range(5):
        dist.all_to_all_single(receive, send)
    times = []
    for _ in range(REPLAYS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(10):
            dist.all_to_all_single(receive, send)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 10)
    slowest = torch.tensor(sorted(times)[len(times) // 2], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    results = []
    for name, rows, row_bytes in CASES:
        send = torch.randint(0, 255, (ranks * rows, row_bytes), dtype=torch.uint8, device="cuda")
        receive = torch.empty_like(send)
        us = median_us(send, receive)
        results.append({"peer": name, "rows": rows, "row_bytes": row_bytes, "ranks": ranks,
                        "median_us": round(us, 2),
                        "gbps": round((ranks - 1) * rows * row_bytes / us / 1e3, 1)})
    if dist.get_rank() == 0:
        about = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                 "commit": os.environ.get("WHERRY_COMMIT", "unknown"),
                 "command": "torchrun --nproc-per-node 2 bench/cuda/nccl_peer.py"}
        text = json.dumps({**about, "results": results}, indent=1) + "\n"
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(text)
        print(text)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's scaled_dot_product_attention; run by compare.py.

Reads a shape a line, as JSON, and answers a line: milliseconds of every way there is to ask for it, each the median of
some runs. K and V are contiguous, [sequence, kv head, token, dim], which suits PyTorch best. The ways:

    gqa       enable_gqa, K and V as they are
    expanded  K and V repeated for every query head beforehand; the repeating is not timed
    folded    the query heads of a kv head as further query rows: the same sums where every row sees the same tokens
    + mask    a chunk behind other tokens has no flag, only a mask: of bool, or of the queries' type, made beforehand
"""
import json
import os
import statistics
import sys
import time

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages, as kvcache's pools have them

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

KV_HEADS = 8
THREADS = 2
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
LARGER_THAN_CACHES = torch.zeros(1 << 26, dtype=torch.int64)


def masks(queries, kv_len, dtype):
    """How a causal chunk that ends at kv_len is said, as arguments by name."""
    if queries == kv_len:
        return {"": {"is_causal": True}}
    seen = torch.ones(queries, kv_len, dtype=torch.bool).tril(kv_len - queries)
    bias = torch.zeros(queries, kv_len, dtype=dtype).masked_fill(~seen, float("-inf"))
    return {" + bool mask": {"attn_mask": seen}, " + mask": {"attn_mask": bias}}


def ways(shape):
    """Name to function; each gives the same numbers, laid out by (sequence, query head, query, dim)."""
    dtype, group, dim = DTYPES[shape["dtype"]], shape["group"], shape["head_dim"]
    sequences, kv_len, queries = shape["sequences"], shape["kv_len"], shape["queries"]
    generator = torch.Generator().manual_seed(7)

    def normal(heads, tokens):
        return torch.randn(sequences, heads, tokens, dim, generator=generator).to(dtype)

    k, v, q = normal(KV_HEADS, kv_len), normal(KV_HEADS, kv_len), normal(KV_HEADS * group, queries)
    wide_k, wide_v = (k, v) if group == 1 else (x.repeat_interleave(group, 1) for x in (k, v))
    out = {}
    if queries == 1:
        rows = q.view(sequences, KV_HEADS, group, dim)
        out["folded"] = lambda: attend(rows, k, v).view(q.shape)
    for name, mask in ({"": {}} if queries == 1 else masks(queries, kv_len, dtype)).items():
        out["gqa" + name] = lambda mask=mask: attend(q, k, v, enable_gqa=True, **mask)
        out["expanded" + name] = lambda mask=mask: attend(q, wide_k, wide_v, **mask)
        if "attn_mask" in mask:
            rows = q.view(sequences, KV_HEADS, group * queries, dim)
            tall = mask["attn_mask"].repeat(group, 1)
            out["folded" + name] = lambda tall=tall, rows=rows: attend(rows, k, v, attn_mask=tall).view(q.shape)
    return out


def milliseconds(run, runs):
    times = []
    for _ in range(runs):
        LARGER_THAN_CACHES.sum()
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


@torch.inference_mode()
def answer(shape):
    functions = ways(shape)
    outputs = [run().float() for run in functions.values()]  # warms up, too
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=0.02, rtol=0.02)
    return {name: milliseconds(run, shape["runs"]) for name, run in functions.items()}


def main():
    torch.set_num_threads(THREADS)
    print(json.dumps({"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes dequantised.json: quantised blocks of random bytes and what the `gguf` package makes of them, bit for bit.

    venv/bin/python make_dequantised.py dequantised.json        (see requirements.txt)
"""

import json
import sys

import gguf
import numpy as np

BLOCKS = 3
# Where the 16-bit floats of a block lie: random bits there would mostly be huge, NaN or infinite.
HALVES = {
    "F16": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "BF16": [],
}


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    random = np.random.default_rng(20240229)
    result = {}
    for name, halves in HALVES.items():
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        count = BLOCKS if elements > 1 else 64
        blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
        for at in halves:
            scales = random.normal(0, 0.02, count).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
        if name == "BF16":
            blocks[:, 1] = np.where((blocks[:, 1] & 0x7F) == 0x7F, 0x3F, blocks[:, 1])  # no NaN, no infinity
        values = gguf.quants.dequantize(blocks.reshape(1, -1), kind).astype(np.float32).reshape(-1)
        result[name] = {"bytes": blocks.tobytes().hex(), "bits": values.view(np.uint32).astype(">u4").tobytes().hex()}
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        rows = ",\n".join(f'"{name}": {json.dumps(row, separators=(",", ":"))}' for name, row in result.items())
        out.write("{\n" + rows + "\n}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests bench/peers as far as it goes without its peers.   usage: peers_test.py FOLDER BENCH_ATTENTION_CPU"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

BENCH = sys.argv.pop()
FOLDER = pathlib.Path(sys.argv.pop())
sys.path.insert(0, str(FOLDER))

import compare
import report


def measured(tokens, prefill_s, decode_s):
    return {"prompt_tokens": tokens, "prefill_s": prefill_s, "decode_s": decode_s}


def engine_row(tokens, llama, ours):
    """Seconds of prefill and decode of one round."""
    return {"tokens": tokens, "prompt_tokens": tokens, "new_tokens": 50,
            "llama": {kv: [measured(tokens, *times)] for kv, times in llama.items()},
            "ours": {kv: [measured(tokens, *times)] for kv, times in ours.items()}}


ENGINES = [
    engine_row(100, {"f16": (0.5, 1.0), "f16, other": (0.5, 1.0), "q8_0": (0.5, 1.0)}, {"f16": (0.5, 1.0)}),
    engine_row(1000, {"f16": (5, 1.1), "f16, other": (5, 1.2), "q8_0": (5, 1.2)}, {"f16": (10, 1.05)}),
    engine_row(8100, {"f16": (100.5, 1.8), "f16, other": (60.5, 3), "q8_0": (50.5, 2)}, {"f16": (91, 1.4)}),
]
SHAPE = {"dtype": "bf16", "head_dim": 64, "group": 4, "sequences": 1, "kv_len": 32768, "queries": 1}
REPORT = {
    "date": "2026-01-01", "machine": {"processor": "slow", "processors": 2},
    "attention": {"peer": {"torch": "9"}, "rounds": 3,
                  "rows": [{**SHAPE, "torch_ms": {"gqa": [9, 8, 99], "folded": [2, 70, 6]},
                            "ours_ms": {"blocks of 16": [3, 1, 2], "blocks of 64": [4, 4, 4]}}]},
    "engines": {"peer": {"llama_cpp_python": "8"}, "rounds": 1, "rows": ENGINES},
}


class peers_test(unittest.TestCase):
    def test_every_shape_has_its_rows_in_the_bench(self):
        names = subprocess.run([BENCH, "--benchmark_list_tests"], capture_output=True, text=True, check=True).stdout
        shapes = list(compare.shapes())
        self.assertGreater(len(shapes), 8)
        for shape in shapes:
            rows = re.findall(compare.bench_rows(shape), names, re.MULTILINE)
            self.assertEqual(len(rows), len(compare.BLOCK_SIZES), shape)

    def test_medians_and_the_fastest_way_count(self):
        self.assertEqual(report.best_way(REPORT["attention"]["rows"][0]), ("folded", 6))
        self.assertIn("| decode 1 x 32,768 | bf16 | 64 | 4 | folded | 6.0 | 2.00 | 4.00 | 3.0 | 1.5 |",
                      report.text(REPORT))

    def test_what_context_adds(self):
        self.assertAlmostEqual(report.decode_ns(ENGINES, "llama", "f16"), 2000)
        self.assertAlmostEqual(report.prefill_extra_s(ENGINES, "llama", "f16"), 100.5 - 40.5)
        text = report.text(REPORT)
        self.assertIn("| llama.cpp | q8_0 | 200 / 200 / 160 | 50.0 / 41.7 / 25.0 |", text)
        self.assertIn("| kvcache | f16 | 1000 | 10.00 | 2.00 (f16) | 2.00 (f16, other) |", text)

    def test_prompts_that_differ_are_refused(self):
        row = engine_row(100, {"f16": (1, 1)}, {"f16": (1, 1)})
        compare.same_prompt(row)
        row["ours"]["f16"][0]["prompt_tokens"] = 101
        with self.assertRaisesRegex(SystemExit, "100, 101"):
            compare.same_prompt(row)

    def test_help_and_earlier_reports_need_no_peers(self):
        run = [sys.executable, "-B", str(FOLDER / "compare.py")]
        self.assertIn("--rounds", subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "report.json"
            path.write_text(json.dumps(REPORT))
            shown = subprocess.run([*run, "--show", str(path)], capture_output=True, text=True, check=True).stdout
        self.assertEqual(shown, report.text(REPORT) + "\n")


if __name__ == "__main__":
    unittest.main()

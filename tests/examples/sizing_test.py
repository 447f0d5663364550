#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs examples/sizing as a user does.   usage: sizing_test.py EXECUTABLE"""
import json
import subprocess
import sys
import unittest

EXECUTABLE = sys.argv.pop()


def run(*arguments):
    return subprocess.run([EXECUTABLE, *arguments], capture_output=True, text=True)


def models(*arguments):
    return {entry["model"]: entry for entry in json.loads(run("--json", *arguments).stdout)["models"]}


class sizing_test(unittest.TestCase):
    def test_values_of_the_known_classes(self):
        table = models("--dtype", "f16")
        self.assertEqual(table["Llama-3-8B"]["bytes_per_token"], 131_072)
        self.assertEqual(table["Llama-3-70B"]["bytes_per_token_and_layer"], 4_096)
        self.assertEqual(table["Llama-3-70B"]["bytes_per_token"], 327_680)
        self.assertEqual(table["Llama-3-70B-MHA"]["bytes_per_token"], 2_621_440)

    def test_f32_takes_twice_as_much(self):
        self.assertEqual(models("--dtype", "f32")["Llama-3-8B"]["bytes_per_token"], 262_144)

    def test_codes_and_scales_are_counted(self):
        # 8 heads in 32 layers, K and V of 128 elements: bytes of one of these vectors.
        for dtype, k, v in [
            ("fp8_e4m3", 128, 128),
            ("int8_per_token", 130, 130),
            ("rotated_int4_grouped_32", 72, 72),
            ("bf16:int4_grouped_asymmetric_128", 256, 68),
            ("rotated_bf16:fp8_e5m2", 256, 128),
        ]:
            with self.subTest(dtype=dtype):
                entry = models("--model", "Llama-3-8B", "--dtype", dtype)["Llama-3-8B"]
                self.assertEqual(entry["bytes_per_token"], 32 * 8 * (k + v))
                self.assertNotIn("tail_pool_bytes", entry)
                self.assertNotIn("tail_pool_percent", entry["block_sizes"][0])
        self.assertEqual(json.loads(run("--json", "--dtype", "f16:bf16").stdout)["dtype"], "f16:bf16")
        self.assertIn("KV in f16:bf16,", run("--dtype", "f16:bf16").stdout)

    def test_every_format_has_a_name(self):
        listed = run("--dtype", "nothing").stderr.split("choose one of ")[1].split(", or ")[0].split(", ")
        self.assertIn("int2_per_channel", listed)
        for name in [*listed, *("rotated_" + name for name in listed)]:
            with self.subTest(name=name):
                self.assertEqual(json.loads(run("--json", "--dtype", name).stdout)["dtype"], name)
        shown = " ".join(run("--help").stdout.split())
        for name in listed:
            self.assertIn(name, shown)

    def test_the_tail_pool_is_counted(self):
        # Keys per channel: 16 tokens have 64 bytes of codes each and 512 of scales. They wait as bf16, values too.
        chosen = ["--model", "Llama-3-8B", "--dtype", "int4_per_channel:int8_per_token", "--tokens", "2000"]
        memory = 10 << 30
        entry = models(*chosen, "--memory", "10GiB")["Llama-3-8B"]
        block = 32 * 8 * (16 * 64 + 512 + 16 * 130)
        tail = 32 * 8 * 16 * (256 + 256)
        self.assertEqual(entry["bytes_per_token"], block // 16)
        self.assertEqual(entry["bytes_per_request"], 125 * block + tail)
        self.assertEqual(entry["requests_at_once"], (memory - block) // (125 * block + tail))
        self.assertEqual(entry["tail_pool_bytes"], entry["requests_at_once"] * tail)
        self.assertAlmostEqual(entry["tail_pool_percent"], 100 * entry["tail_pool_bytes"] / memory)
        self.assertEqual(entry["blocks"], (memory - entry["tail_pool_bytes"]) // block - 1)
        self.assertGreaterEqual(entry["blocks"], 125 * entry["requests_at_once"])
        for row in entry["block_sizes"]:
            size = row["block_size"]
            block = 32 * (8 * (size * 64 + 512 + size * 128) + max(64, 8 * size * 2))  # planes end on 64 bytes
            tail = 32 * 8 * size * (256 + 256)
            requests = (memory // block - 1) / (row["table_entries"] + tail / block)
            self.assertAlmostEqual(row["requests_at_once"], requests)
            self.assertAlmostEqual(row["tail_pool_percent"], 100 * requests * tail / memory)
        shown = run(*chosen, "--memory", "10GiB").stdout
        self.assertEqual(shown.count("tail pool"), 3)  # what it is, and a column of each table
        self.assertIn(f"{entry['tail_pool_percent']:.1f} %\n", shown)
        self.assertNotIn("tail pool", run("--model", "Llama-3-8B").stdout)

    def test_bytes_a_token_depend_on_the_block_size_where_scales_are_of_blocks(self):
        for size in (16, 64):
            entry = models("--model", "Llama-3-8B", "--dtype", "int8_per_channel", "--block-size", str(size))
            self.assertEqual(entry["Llama-3-8B"]["bytes_per_token"], 32 * 8 * 2 * (128 + 256 // size))

    def test_requests_that_a_memory_holds(self):
        # 256 MiB a request, less the null block: 24 GiB hold 95, and one more block makes it 96.
        entry = models("--model", "Llama-3-8B", "--tokens", "2048", "--memory", "24GiB")["Llama-3-8B"]
        self.assertEqual((entry["bytes_per_request"], entry["requests_at_once"]), (256 << 20, 95))
        memory = f"{(24 << 30) + 16 * 131_072}B"
        entry = models("--model", "Llama-3-8B", "--tokens", "2048", "--memory", memory)["Llama-3-8B"]
        self.assertEqual(entry["requests_at_once"], 96)

    def test_ranks_share_heads_and_then_replicate_them(self):
        for ranks, heads in [(1, 8), (2, 4), (8, 1), (16, 1)]:
            entry = models("--model", "Llama-3-8B", "--ranks", str(ranks))["Llama-3-8B"]
            self.assertEqual(entry["kv_heads_on_rank"], heads)
            self.assertEqual(entry["bytes_per_token"], 131_072 * heads // 8)

    def test_the_table_shows_what_cannot_be_split(self):
        table = models("--ranks", "2")
        self.assertIn("3 kv heads", table["SmolLM2-135M"]["refused"])
        self.assertEqual(table["Llama-3-8B"]["bytes_per_token"], 65_536)

    def test_block_size_trades_waste_against_table_length(self):
        # Counted out, length by length.
        entry = models("--model", "Mistral-7B", "--tokens", "500")["Mistral-7B"]
        lengths = range(1, 1000)
        for row in entry["block_sizes"]:
            size = row["block_size"]
            blocks = sum(-(-n // size) for n in lengths) / len(lengths)
            unused = sum(-n % size for n in lengths) / len(lengths)
            self.assertAlmostEqual(row["table_entries"], blocks)
            self.assertAlmostEqual(row["unused_slots"], unused)
            self.assertAlmostEqual(row["unused_percent"], 100 * unused / (blocks * size))
            self.assertAlmostEqual(row["table_bytes"], 4 * blocks)
        by_size = {row["block_size"]: row for row in entry["block_sizes"]}
        self.assertEqual(by_size[1]["unused_slots"], 0)
        self.assertLess(by_size[16]["unused_percent"], 4)

    def test_a_shape_of_ones_own(self):
        entry = models("--layers", "2", "--kv-heads", "3", "--head-dim", "64", "--dtype", "bf16")["(given)"]
        self.assertEqual(entry["bytes_per_token"], 2 * 2 * 3 * 64 * 2)

    def test_the_tables_name_every_model(self):
        shown = run().stdout
        for name in models():
            self.assertIn(f"\n{name} ", shown)
        self.assertIn("block_size", shown)

    def test_bad_input_ends_with_2_and_one_sentence(self):
        shape = ["--layers", "2", "--kv-heads", "3", "--head-dim", "64"]
        for arguments, parts in [
            (["--layers", "2", "--kv-heads", "0", "--head-dim", "64"], ["--kv-heads is 0", "1 to 4096"]),
            (["--layers", "5000", "--kv-heads", "1", "--head-dim", "64"], ["--layers is 5000", "4096"]),
            (["--layers", "2", "--kv-heads", "1", "--head-dim", "-64"], ["--head-dim is -64", "4096"]),
            (["--model", "Llama-9"], ["'Llama-9'", "Llama-3-8B", "SmolLM2-135M"]),
            (["--block-size", "0"], ["--block-size is 0", "1048576"]),
            (["--tokens", "0"], ["--tokens is 0", "16777216"]),
            (["--tokens", "many"], ["--tokens", "many"]),
            (["--ranks", "0"], ["--ranks is 0", "4096"]),
            (["--ranks", "2", *shape], ["3 kv heads", "2 ranks"]),
            (["--dtype", "f8"], ["'f8'", "bf16", "int4_per_channel", "rotated_", "K:V"]),
            (["--dtype", "unknown"], ["'unknown'", "bf16"]),
            (["--dtype", "rotated_"], ["'rotated_'", "bf16"]),
            (["--dtype", "bf16:"], ["''", "bf16"]),
            (["--dtype", "bf16:f16:f32"], ["'f16:f32'", "bf16"]),
            (
                ["--layers", "2", "--kv-heads", "1", "--head-dim", "1025", "--dtype", "bf16:rotated_f16"],
                ["(given) is 1025", "rotated_f16", "1024"],
            ),
            (["--memory", "24 apples"], ["'24 apples'", "GiB"]),
            (["--memory", "16777216TiB"], ["'16777216TiB'", "2^64-1"]),
            (["--layers", "2"], ["--layers", "--kv-heads"]),
            (["--nonsense"], ["--nonsense"]),
        ]:
            with self.subTest(arguments=arguments):
                ended = run(*arguments)
                self.assertEqual(ended.returncode, 2, ended.stderr)
                self.assertEqual(ended.stdout, "")
                self.assertEqual(ended.stderr.count("\n"), 1, ended.stderr)
                for part in parts:
                    self.assertIn(part, ended.stderr)


if __name__ == "__main__":
    unittest.main()

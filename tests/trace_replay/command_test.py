#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs trace_replay as a user does.   usage: command_test.py EXECUTABLE"""
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

EXECUTABLE = sys.argv.pop(1)
MAKE_TRACE = pathlib.Path(__file__).parents[2] / "examples" / "trace_replay" / "make_trace.py"
LINES = '{"hash_ids": [1, 2]}\n{"hash_ids": [3]}\n{"hash_ids": [1, 2]}\n'


class TraceReplay(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.trace = self.folder / "trace.jsonl"
        self.trace.write_text(LINES, encoding="utf-8")

    def run_it(self, *arguments):
        return subprocess.run([EXECUTABLE, *map(str, arguments)], capture_output=True, text=True, check=False)

    def refused(self, why, *arguments):
        done = self.run_it(*arguments)
        self.assertEqual(done.returncode, 2, done)
        self.assertEqual(done.stdout, "")
        self.assertIn(why, done.stderr)

    def test_json_has_one_object_a_line(self):
        done = self.run_it("--trace", self.trace, "--eviction", "lru,optimal", "--blocks", "2,3", "--json")
        self.assertEqual(done.returncode, 0, done)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual([(r["eviction"], r["blocks"], r["hits"]) for r in rows],
                         [("lru", 2, 1), ("lru", 3, 2), ("optimal", 2, 2), ("optimal", 3, 2)])
        for row in rows:
            self.assertEqual(row["references"], 5)
            self.assertAlmostEqual(row["hit_ratio"], row["hits"] / 5)

    def test_table_and_help(self):
        done = self.run_it("--trace", self.trace, "--blocks", "3")
        self.assertEqual(done.returncode, 0, done)
        self.assertIn("gittins", done.stdout)
        self.assertIn("hit ratio", done.stdout)
        self.assertIn("--eviction", self.run_it("--help").stdout)

    @unittest.skipUnless(shutil.which("gnuplot"), "gnuplot is not installed")
    def test_plot(self):
        picture = self.folder / "it's.png"
        done = self.run_it("--trace", self.trace, "--eviction", "lru,optimal", "--blocks", "1,2,3", "--plot", picture)
        self.assertEqual(done.returncode, 0, done)
        self.assertEqual(picture.read_bytes()[:4], b"\x89PNG")

    def test_what_is_printed_is_whole_or_the_program_fails(self):
        for arguments in (["--trace", self.trace, "--blocks", "3"], ["--trace", self.trace, "--json"], ["--help"]):
            with open("/dev/full", "w", encoding="utf-8") as full:
                done = subprocess.run([EXECUTABLE, *map(str, arguments)], stdout=full, stderr=subprocess.PIPE,
                                      text=True, check=False)
            self.assertEqual(done.returncode, 2, done)
            self.assertIn("cannot write to the standard output: No space left on device", done.stderr)

    def test_a_picture_that_cannot_be_written_is_a_fault_and_named(self):
        nowhere = self.folder / "nowhere" / "it.png"
        self.refused(f"cannot write {nowhere}: No such file", "--trace", self.trace, "--plot", nowhere)
        if not shutil.which("gnuplot"):
            self.skipTest("gnuplot is not installed")
        done = self.run_it("--trace", self.trace, "--blocks", "1,2", "--plot", "/dev/full")
        self.assertEqual(done.returncode, 2, done)
        self.assertIn("cannot write /dev/full: No space left on device", done.stderr)
        self.assertNotIn("PNG", done.stdout)

    def test_numbers_are_decimal(self):
        done = self.run_it("--trace", self.trace, "--eviction", "lru", "--blocks", "010", "--json")
        self.assertEqual(json.loads(done.stdout)["blocks"], 10)
        for bad in ("99999999999999999999", "16777217", "-1", "0x10", "1.5"):
            self.refused(f"--blocks has '{bad}', it has to be a number from 1 to 16777216",
                         "--trace", self.trace, "--blocks=" + bad)

    def test_generated_loads_are_the_same_every_time_and_whole(self):
        def generated(*arguments):
            return subprocess.run([sys.executable, MAKE_TRACE, *arguments], capture_output=True, text=True, check=True)

        for workload in ("agent", "chat", "shared", "scan", "drift", "mix"):
            text = generated(workload, "--minutes", "3", "--block-tokens", "16").stdout
            self.assertEqual(text, generated(workload, "--minutes", "3", "--block-tokens", "16").stdout)
            self.assertNotEqual(text, generated(workload, "--minutes", "3", "--block-tokens", "16", "--seed", "2").stdout)
            lines = [json.loads(line) for line in text.splitlines()]
            self.assertGreater(len(lines), 50)
            self.assertEqual(lines, sorted(lines, key=lambda line: line["timestamp"]))
            parents = {}  # an id stands for a block and all before it
            for line in lines:
                whole = line["hash_ids"] + line["output_hash_ids"]
                self.assertEqual(len(line["hash_ids"]), line["input_length"] // 16)
                self.assertEqual(len(whole), (line["input_length"] + line["output_length"]) // 16)
                for parent, block in zip([None, *whole], whole):
                    self.assertEqual(parents.setdefault(block, parent), parent)
            trace = self.folder / workload
            trace.write_text(text, encoding="utf-8")
            done = self.run_it("--trace", trace, "--block-tokens", "16", "--eviction", "gittins,optimal",
                               "--blocks", "1000", "--json")
            found, best = (json.loads(line)["hits"] for line in done.stdout.splitlines())
            self.assertLessEqual(found, best)
            self.assertGreater(found, 0)

    def test_bad_input(self):
        self.refused("'clock'", "--trace", self.trace, "--eviction", "clock")
        self.refused("--block-tokens has 15, it has to be even", "--trace", self.trace, "--block-tokens", "15")
        self.refused("--blocks has '0'", "--trace", self.trace, "--blocks", "0")
        self.refused("cannot open", "--trace", self.folder / "nothing.jsonl")
        self.refused("--trace is required")
        self.trace.write_text(LINES + '{"hash_ids": [1', encoding="utf-8")
        self.refused("line 4: it is no JSON", "--trace", self.trace)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures kvcache and its peers in turns and prints how they compare; run.sh sets up what it needs.

Needs the standard library only; the peers run in processes of their own, with the Python of --venv.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import report

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BLOCK_SIZES = (16, 64)
BENCH_RUNS = 5  # of bench_attention_cpu, fixed there for these rows
NEW_TOKENS = 64
LENGTHS = (128, 1024, 4096, 8000)  # the model knows 8,192 positions
CHUNK = 512
CHAT_TOKENS = 40  # about so many surround a prompt
OURS = ("f32", "f16", "bf16", "int8_per_token")
LLAMA = ("f16", "f16, no flash attention", "q8_0")

started = time.monotonic()


def tell(text):
    seconds = int(time.monotonic() - started)
    print(f"[{seconds // 60}:{seconds % 60:02d}] {text}", file=sys.stderr, flush=True)


class runner:
    """Starts what is measured: both sides with two threads and, where asked for, before all other programs."""

    def __init__(self, realtime):
        self.prefix = ["chrt", "-f", "1"] if realtime else []
        self.environment = os.environ | {"OMP_NUM_THREADS": "2"}

    def output(self, *command):
        command = [*self.prefix, *map(str, command)]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if done.returncode:
            sys.exit(f"compare.py: {' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout


class worker:
    """A peer in its own process: a line of JSON in, a line out."""

    def __init__(self, run, venv, *command):
        self.process = subprocess.Popen([*run.prefix, str(venv / "bin/python"), *map(str, command)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=run.environment)
        self.facts = self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"compare.py: a peer ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def shapes():
    """What attention is measured on; 8 kv heads."""
    for dtype in ("bf16", "f32"):
        for head_dim in (64, 128):
            for group in (1, 4, 8):
                for sequences, kv_len in ((1, 32768), (8, 4096)):
                    yield {"dtype": dtype, "head_dim": head_dim, "group": group, "sequences": sequences,
                           "kv_len": kv_len, "queries": 1}
            for kv_len in (1024, 4096):
                yield {"dtype": dtype, "head_dim": head_dim, "group": 4, "sequences": 1, "kv_len": kv_len,
                       "queries": 1024}


def bench_rows(shape):
    """The shape's rows of bench_attention_cpu, as a regular expression."""
    size = "(" + "|".join(map(str, BLOCK_SIZES)) + ")"
    last = shape["sequences"] if shape["queries"] == 1 else shape["queries"]
    name = "decode_batch" if shape["queries"] == 1 else "prefill"
    return f"^{name}<{shape['dtype']}>/{shape['group']}/{shape['head_dim']}/{size}/{shape['kv_len']}/{last}/"


def measure_ours(run, build, shape):
    text = run.output(build / "bench/bench_attention_cpu", f"--benchmark_filter={bench_rows(shape)}",
                      "--benchmark_format=json")
    rows = {f"blocks of {int(row['block_size'])}": row["median_ms"] for row in json.loads(text)["benchmarks"]}
    if len(rows) != len(BLOCK_SIZES):
        sys.exit(f"compare.py: bench_attention_cpu has no rows {bench_rows(shape)} for each block size")
    return rows


def add(samples, values):
    for name, value in values.items():
        samples.setdefault(name, []).append(value)


def attention(run, options):
    """Yields what is measured so far after each round."""
    peer = worker(run, options.venv, HERE / "torch_worker.py")
    rows = [{**shape, "torch_ms": {}, "ours_ms": {}} for shape in shapes()]
    for turn in range(options.rounds):
        for index, row in enumerate(rows):
            shape = {k: v for k, v in row.items() if not k.endswith("_ms")}
            tell(f"attention, round {turn + 1} of {options.rounds}, shape {index + 1} of {len(rows)}: "
                 f"{report.work(shape)}, {shape['dtype']}, head_dim {shape['head_dim']}, group {shape['group']}")
            add(row["torch_ms"], peer.ask({**shape, "runs": BENCH_RUNS}))
            add(row["ours_ms"], measure_ours(run, options.build, shape))
        yield {"peer": peer.facts, "rounds": turn + 1, "rows": rows}
    peer.close()


def chat(prompt):
    """What the engine makes of one message of a user."""
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def measure_engine(run, options, prompt, dtype):
    requests = options.json.parent / "prompt.jsonl"
    asked = {"id": "peer", "prompt": prompt, "max_tokens": NEW_TOKENS + 1, "ignore_end": True}
    requests.write_text(json.dumps(asked) + "\n")
    text = run.output(options.build / "examples/engine/engine", "--model", options.model, "--requests", requests,
                      "--kv-dtype", dtype, "--chunk", CHUNK, "--threads", 2, "--max-sequences", 1, "--json", "-")
    answer = json.loads(text)["answers"][0]
    return {"prompt_tokens": answer["prompt_tokens"], "prefill_s": answer["first_token_s"],
            "decode_s": answer["last_token_s"] - answer["first_token_s"]}


def engines(run, options):
    """Yields what is measured so far after each round."""
    peer = worker(run, options.venv, HERE / "llama_worker.py", options.model)
    text = options.text.read_text()
    rows = [{"tokens": length, "new_tokens": NEW_TOKENS, "llama": {}, "ours": {}} for length in LENGTHS]
    prompts = [peer.ask({"cut": text, "tokens": length - CHAT_TOKENS}) for length in LENGTHS]
    for turn in range(options.rounds):
        for row, prompt in zip(rows, prompts):
            for kv in LLAMA:
                tell(f"engines, round {turn + 1} of {options.rounds}: {row['tokens']} tokens, llama.cpp, {kv}")
                add(row["llama"], {kv: peer.ask({"prompt": chat(prompt), "kv": kv, "new_tokens": NEW_TOKENS})})
            for kv in OURS:
                tell(f"engines, round {turn + 1} of {options.rounds}: {row['tokens']} tokens, kvcache, {kv}")
                add(row["ours"], {kv: measure_engine(run, options, prompt, kv)})
            same_prompt(row)
        yield {"peer": peer.facts, "rounds": turn + 1, "rows": rows}
    peer.close()


def same_prompt(row):
    """Both read the same tokens; else their times mean nothing beside each other."""
    counts = {m["prompt_tokens"] for side in ("llama", "ours") for kv in row[side].values() for m in kv}
    if len(counts) != 1:
        sys.exit(f"compare.py: the prompt of {row['tokens']} tokens was read as {sorted(counts)} tokens")
    row["prompt_tokens"] = counts.pop()


def read_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("attention", "engines"), help="only this one; both unless told")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring everything; medians count (%(default)s)")
    parser.add_argument("--realtime", action="store_true", help="before all other programs: chrt -f 1, as root")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "build/peers/report.json", help="%(default)s")
    parser.add_argument("--show", type=pathlib.Path, metavar="JSON", help="measure nothing, print this report")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release", help=argparse.SUPPRESS)
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "build/peers/venv", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--text", type=pathlib.Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    options = read_options()
    if options.show:
        print(report.text(json.loads(options.show.read_text())))
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    run = runner(options.realtime)
    result = {"date": time.strftime("%Y-%m-%d"), "machine": report.machine()}
    for part, measure in (("attention", attention), ("engines", engines)):
        if options.part in (None, part):
            for result[part] in measure(run, options):
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(report.text(result))
    tell(f"written to {options.json}")


if __name__ == "__main__":
    main()

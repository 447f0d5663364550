# SPDX-License-Identifier: Apache-2.0
"""Times llama.cpp by way of llama-cpp-python; run by compare.py as llama_worker.py MODEL.

Reads a request a line, as JSON, and answers a line.

    {"cut": TEXT, "tokens": N}                       the beginning of TEXT that has N tokens or few less
    {"prompt": TEXT, "kv": KV, "new_tokens": N}      tokens of the prompt, seconds until the first token and for N more

KV is f16 or q8_0, or f16 without llama.cpp's flash attention; q8_0 values need that.
"""
import json
import sys
import time

import llama_cpp
import numpy

CONTEXT = 8192
CHUNK = 512
THREADS = 2
KINDS = {
    "f16": {"flash_attn": True},
    "f16, no flash attention": {"flash_attn": False},
    "q8_0": {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0},
}


class models:
    """The model with each kind of KV, opened when it is first asked for."""

    def __init__(self, path):
        self.path = path
        self.open = {}

    def __getitem__(self, kind):
        if kind not in self.open:
            self.open[kind] = llama_cpp.Llama(
                self.path, n_ctx=CONTEXT, n_batch=CHUNK, n_ubatch=CHUNK, n_threads=THREADS, n_threads_batch=THREADS,
                verbose=False, **KINDS[kind])
            self.open[kind].eval(list(range(64, 96)))  # warms up
        return self.open[kind]


def tokens_of(model, text):
    return model.tokenize(text.encode(), add_bos=False, special=True)


def cut(model, text, count):
    return model.detokenize(tokens_of(model, text)[:count]).decode(errors="ignore")


def likeliest(model):
    """The token after what has been computed; waits for it."""
    logits = llama_cpp.llama_get_logits(model.ctx)
    return int(numpy.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())


def measure(model, prompt, new_tokens):
    tokens = tokens_of(model, prompt)
    model.reset()
    begin = time.perf_counter()
    model.eval(tokens)
    token = likeliest(model)
    first = time.perf_counter()
    for _ in range(new_tokens):
        model.eval([token])
        token = likeliest(model)
    return {"prompt_tokens": len(tokens), "prefill_s": first - begin, "decode_s": time.perf_counter() - first}


def main():
    opened = models(sys.argv[1])
    system = llama_cpp.llama_print_system_info().decode().strip()
    print(json.dumps({"llama_cpp_python": llama_cpp.__version__, "system": system}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "cut" in asked:
            answer = cut(opened["f16"], asked["cut"], asked["tokens"])
        else:
            answer = measure(opened[asked["kv"]], asked["prompt"], asked["new_tokens"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

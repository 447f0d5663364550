#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the library's #include <kvcache/...> lines against the one direction rooms may include each other in,
and keeps tests, examples and benchmarks on the public headers.   usage: layers.py ROOT"""
import re
import sys

import tree

CONTRACTS = {"concepts.hpp", "policies.hpp", "dispatch.hpp"}
FILE_ROOMS = {"kvcache.hpp": "umbrella", "version.hpp": "version", "cache.hpp": "cache", "storage.hpp": "storage",
              "any_storage.hpp": "storage", "append.hpp": "storage", "copy.hpp": "storage", "seal.hpp": "storage"}
FOLDER_ROOMS = {"eviction", "memory", "layout", "blocks", "attention", "tier", "schedule", "observe", "cuda", "detail"}
VOCABULARY_FOLDERS = {"quantise"}

BASE = {"version", "config", "detail", "vocabulary"}
POLICIES = {"eviction", "memory", "layout"}
MIDDLE = {"blocks", "storage", "attention", "tier"}
TOP = {"cache", "schedule", "observe"}

# room -> the rooms it may include. A room's own name stands there when its files may include each other.
ALLOWED = {
    "version": set(),
    "config": {"version"},
    "detail": {"version", "config", "detail", "vocabulary"},
    "vocabulary": BASE,
    "contracts": BASE | {"contracts"},
    **{room: BASE | {"contracts"} for room in POLICIES},
    **{room: BASE | {"contracts", room} | POLICIES for room in MIDDLE},
    "cache": BASE | {"contracts", "cache"} | POLICIES | MIDDLE,
    "schedule": BASE | {"contracts", "schedule", "blocks"} | POLICIES,
    "observe": BASE | {"contracts", "observe"} | POLICIES | MIDDLE,
    "cuda": BASE | {"contracts", "layout", "storage", "attention", "cuda"},
    "umbrella": {"version"} | BASE | {"contracts"} | POLICIES | MIDDLE | TOP,
}

# Narrower than its room.
ONLY = {"kvcache/policies.hpp": {"kvcache/fwd.hpp", "kvcache/dtype.hpp"}}

# The umbrella leaves these to whoever asks for them.
OUTSIDE_UMBRELLA = re.compile(r"kvcache/(attention/cpu|cuda|detail)/|kvcache/eviction/(?!lru\.)|kvcache/tier/(redis|uring)\.hpp|\.(inl|cuh)$")
THREADS = {"thread", "mutex", "shared_mutex", "condition_variable", "future", "barrier", "latch", "semaphore",
           "stop_token", "atomic"}
# What a program must not lean on in the library's insides.
INSIDES = re.compile(r"kvcache/detail\b|\bdetail\s*::")


def room(name):
    """The room of a header named as in an #include line."""
    parts = name.split("/")[1:]
    if parts == ["detail", "config.hpp"]:
        return "config"
    if len(parts) > 1:
        if parts[0] in VOCABULARY_FOLDERS:
            return "vocabulary"
        if parts[0] not in FOLDER_ROOMS:
            raise KeyError(f"{name}: no room named '{parts[0]}'; add it to layers.py with the rooms it may include")
        return parts[0]
    if parts[0] in FILE_ROOMS:
        return FILE_ROOMS[parts[0]]
    return "contracts" if parts[0] in CONTRACTS else "vocabulary"


def edges(texts):
    for name, text in texts.items():
        for target in tree.includes(text):
            if target.startswith("kvcache/"):
                yield name, target


def check_edges(texts):
    for name, target in edges(texts):
        if target not in texts:
            yield f"{name} includes {target}, which does not exist"
            continue
        if name in ONLY and target not in ONLY[name]:
            yield f"{name} includes {target}; it may include only {', '.join(sorted(ONLY[name]))}"
        if room(target) not in ALLOWED[room(name)]:
            allowed = ", ".join(sorted(ALLOWED[room(name)])) or "nothing"
            yield f"{name} ({room(name)}) includes {target} ({room(target)}); this room may include {allowed}"


def check_cycles(texts):
    targets = {name: [t for n, t in edges({name: texts[name]}) if t in texts] for name in texts}
    done, path = set(), []

    def walk(name):
        if name in path:
            yield "headers include each other: " + " -> ".join(path[path.index(name):] + [name])
            return
        if name in done:
            return
        path.append(name)
        for target in targets[name]:
            yield from walk(target)
        path.pop()
        done.add(name)

    for name in texts:
        yield from walk(name)


def reached(texts, start):
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name in texts and name not in seen:
            seen.add(name)
            todo += tree.includes(texts[name])
    return seen


def check_umbrella(texts):
    umbrella = "kvcache/kvcache.hpp"
    if umbrella not in texts:
        yield f"{umbrella} does not exist"
        return
    inside = reached(texts, umbrella)
    for name, text in texts.items():
        threads = sorted(THREADS & set(tree.includes(text)))
        if name in inside and threads:
            yield f"{umbrella} reaches {name}, which includes <{threads[0]}>; the umbrella brings no threads"
        if name in inside and OUTSIDE_UMBRELLA.search(name) and room(name) not in ("config", "detail"):
            yield f"{umbrella} reaches {name}; this header is only for those who ask for it"
        if name not in inside and not threads and not OUTSIDE_UMBRELLA.search(name):
            yield f"{umbrella} leaves out {name}"


def check_cuda_macro(texts):
    for name, text in texts.items():
        if name != "kvcache/detail/config.hpp" and "__CUDACC__" in text:
            yield f"{name} names __CUDACC__; only kvcache/detail/config.hpp asks about the compiler"


def check_users(texts):
    for name, text in texts.items():
        found = INSIDES.search(tree.without_comments(text))
        if found:
            yield f"{name} names '{found.group()}'; tests, examples and benchmarks use the public headers only"


def check(root):
    library = dict(tree.headers(root))
    users = dict(tree.sources(root, ["tests", "examples", "bench"]))
    return [*check_edges(library), *check_cycles(library), *check_umbrella(library), *check_cuda_macro(library),
            *check_users(users)]


if __name__ == "__main__":
    tree.finish(check(sys.argv[1]))

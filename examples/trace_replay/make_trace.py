#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints a trace of requests that nobody sent, JSON lines as trace_replay reads them: equal arguments, equal lines.

A conversation is a prompt that grows by what is answered and what is said next; its full blocks have ids, the system
prompt's those that all its conversations share. `hash_ids` are the full blocks of the prompt, `output_hash_ids` those
that the answer fills, the one among them that began in the prompt. Requests are ordered by the time they arrive at."""
import argparse
import json
import random
import signal

COUNTER = iter(range(1 << 62))


class System:
    """A system prompt of so many tokens."""

    def __init__(self, tokens, block):
        self.tokens = tokens
        self.ids = [next(COUNTER) for _ in range(tokens // block)]


class Conversation:
    def __init__(self, system, block):
        self.tokens, self.ids, self.block = system.tokens, list(system.ids), block

    def grow(self, tokens):
        self.tokens += tokens
        self.ids += [next(COUNTER) for _ in range(self.tokens // self.block - len(self.ids))]

    def turn(self, time, said, answered):
        self.grow(said)
        prompt = list(self.ids)
        length = self.tokens
        self.grow(answered)
        return {"timestamp": int(1000 * time), "input_length": length, "output_length": answered, "hash_ids": prompt,
                "output_hash_ids": self.ids[len(prompt):]}


class Load:
    """Each kind of request is a method that yields lines from a time on."""

    def __init__(self, rng, block):
        self.rng, self.block = rng, block
        self.chat_systems = [self.system(200, 2000) for _ in range(4)]
        self.agent_systems = [self.system(3000, 9000) for _ in range(3)]
        self.shared_systems = [self.system(1000, 8000) for _ in range(200)]

    def system(self, least, most):
        return System(self.rng.randint(least, most), self.block)

    def about(self, median, spread=0.7):
        return max(1, int(self.rng.lognormvariate(0, spread) * median))

    def chosen(self, systems):
        """The first is asked for most: Zipf."""
        return self.rng.choices(systems, [1 / (i + 1) for i in range(len(systems))])[0]

    def conversation(self, time, system, turns, said, answered, pause):
        c = Conversation(system, self.block)
        for i in range(turns):
            output = self.about(answered)
            yield c.turn(time, said(i), output)
            time += output * 0.02 + pause()

    def agent(self, time):
        """Tools answer after one to two seconds, some dozens of times."""
        return self.conversation(time, self.chosen(self.agent_systems), self.rng.randint(5, 40),
                                 lambda i: self.about(600), 150, lambda: self.rng.uniform(1, 2))

    def chat(self, time):
        """A person reads and answers after some two minutes, or does not; now and then with a document."""
        turns = 1
        while turns < 20 and self.rng.random() < 0.65:
            turns += 1
        document = self.rng.random() < 0.3
        return self.conversation(time, self.chosen(self.chat_systems), turns,
                                 lambda i: self.about(6000 if document and i == 0 else 150), 400,
                                 lambda: self.about(120, 0.6))

    def shared(self, time):
        """One question behind one of two hundred system prompts."""
        return self.conversation(time, self.chosen(self.shared_systems), 1, lambda i: self.about(250), 200, lambda: 0)

    def scan(self, time):
        """A long document, once."""
        return self.conversation(time, System(0, self.block), 1, lambda i: self.about(12000), 300, lambda: 0)


# How many conversations of a kind begin in a second.
WORKLOADS = {
    "agent": lambda share: {"agent": 0.4},
    "chat": lambda share: {"chat": 1.2},
    "shared": lambda share: {"shared": 5},
    "scan": lambda share: {"chat": 0.6, "scan": 2},
    # A third each, and new system prompts with it.
    "drift": lambda share: [{"chat": 1.2}, {"agent": 0.2}, {"shared": 5}][min(2, int(3 * share))],
    "mix": lambda share: {"agent": 0.05, "chat": 0.5, "shared": 1, "scan": 0.3},
}


def lines(workload, minutes, block, seed):
    rng = random.Random(seed)
    out = []
    load, before = Load(rng, block), None
    end = 60 * minutes
    for second in range(end):
        rates = workload(second / end)
        if before not in (None, rates):
            load = Load(rng, block)
        before = rates
        for kind, rate in rates.items():
            time = second + rng.expovariate(rate)
            while time < second + 1:
                out += getattr(load, kind)(time)
                time += rng.expovariate(rate)
    # What is said after the end is not heard.
    return sorted((line for line in out if line["timestamp"] < 1000 * end), key=lambda line: line["timestamp"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    if asked.block_tokens < 1 or asked.minutes < 1:
        parser.error(f"{asked.minutes} minutes and blocks of {asked.block_tokens} tokens, at least 1 each is needed")
    for line in lines(WORKLOADS[asked.workload], asked.minutes, asked.block_tokens, asked.seed):
        print(json.dumps(line))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main()

# SPDX-License-Identifier: Apache-2.0
"""What compare.py measured, as text: Markdown tables whose figures are medians over the rounds."""
import os
import statistics

# Which KV of ours is held against which of llama.cpp's.
RIVALS = {"f32": "f16", "f16": "f16", "bf16": "f16", "int8_per_token": "q8_0"}


def machine():
    name = "an unknown processor"
    try:
        with open("/proc/cpuinfo") as lines:
            name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"processor": name, "processors": os.cpu_count()}


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def medians(samples):
    return {name: statistics.median(values) for name, values in samples.items()}


def best_way(row):
    """PyTorch's fastest way to ask for the shape, and its milliseconds."""
    return min(medians(row["torch_ms"]).items(), key=lambda way: way[1])


def work(shape):
    if shape["queries"] == 1:
        return f"decode {shape['sequences']} x {shape['kv_len']:,}"
    return f"prefill {shape['queries']:,} on {shape['kv_len']:,}"


def attention_text(part):
    rows = []
    for row in part["rows"]:
        way, torch_ms = best_way(row)
        ours = medians(row["ours_ms"])
        rows.append([work(row), row["dtype"], str(row["head_dim"]), str(row["group"]), way, f"{torch_ms:.1f}",
                     *(f"{ms:.2f}" for ms in ours.values()), *(f"{torch_ms / ms:.1f}" for ms in ours.values())])
    sizes = list(part["rows"][0]["ours_ms"])
    return table(["work", "dtype", "head_dim", "group", "PyTorch's best way", "PyTorch ms",
                  *(f"kvcache ms, {size}" for size in sizes), *(f"ratio, {size}" for size in sizes)], rows)


def seconds(row, side, kv, what):
    return statistics.median(measured[what] for measured in row[side][kv])


def decode_ns(rows, side, kv):
    """Nanoseconds that one more token of context adds to a decoded token: from the shortest to the longest prompt."""
    first, last = rows[0], rows[-1]
    more = seconds(last, side, kv, "decode_s") / last["new_tokens"] - \
        seconds(first, side, kv, "decode_s") / first["new_tokens"]
    return 1e9 * more / (last["prompt_tokens"] - first["prompt_tokens"])


def prefill_extra_s(rows, side, kv):
    """Seconds that the longest prompt takes beyond its share by the second shortest's rate: what grows with context."""
    short, last = rows[1], rows[-1]
    share = last["prompt_tokens"] / short["prompt_tokens"]
    return seconds(last, side, kv, "prefill_s") - share * seconds(short, side, kv, "prefill_s")


def fastest(rows, kinds, measure):
    """Of llama.cpp's ways to keep such KV the one with the least of `measure`."""
    return min(kinds, key=lambda kv: measure(rows, "llama", kv))


def engines_text(part):
    rows = part["rows"]
    kinds = [(side, kv) for side in ("llama", "ours") for kv in rows[0][side]]
    names = {"llama": "llama.cpp", "ours": "kvcache"}
    rates = [[names[side], kv,
              " / ".join(f"{r['prompt_tokens'] / seconds(r, side, kv, 'prefill_s'):.0f}" for r in rows),
              " / ".join(f"{r['new_tokens'] / seconds(r, side, kv, 'decode_s'):.1f}" for r in rows)]
             for side, kv in kinds]
    added = []
    for side, kv in kinds:
        measured = [measure(rows, side, kv) for measure in (decode_ns, prefill_extra_s)]
        line = [names[side], kv, f"{measured[0]:.0f}", f"{measured[1]:.2f}", "", ""]
        if side == "ours":
            rivals = [name for name in rows[0]["llama"] if name.startswith(RIVALS[kv])]
            for column, measure in ((4, decode_ns), (5, prefill_extra_s)):
                rival = fastest(rows, rivals, measure)
                line[column] = f"{measure(rows, 'llama', rival) / measure(rows, side, kv):.2f} ({rival})"
        added.append(line)
    lengths = " / ".join(f"{r['prompt_tokens']:,}" for r in rows)
    return "\n\n".join([
        table(["engine", "KV", f"prefill, tokens/s: {lengths} tokens", f"decode, tokens/s: after {lengths}"], rates),
        table(["engine", "KV", "decode: ns for a token of context", "prefill: s for the growing context",
               "ratio, decode", "ratio, prefill"], added)])


def text(result):
    """All tables of a report. Ratios are the peer's time over ours: above 1, ours is faster."""
    machine_text = f"{result['machine']['processor']}, {result['machine']['processors']} processors"
    out = [f"{machine_text}, {result['date']}. Medians; ratios are the peer's time over ours."]
    for part, peer, tables in (("attention", "torch", attention_text), ("engines", "llama_cpp_python", engines_text)):
        if part in result:
            measured = result[part]
            out += [f"{peer} {measured['peer'][peer]}, rounds: {measured['rounds']}", tables(measured)]
    return "\n\n".join(out)

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes expected.json: what an independent implementation says of the model the engine is tested with.

Hugging Face transformers loads the same GGUF file, dequantises it and runs it in float32 on the CPU. For each prompt
the file holds the prompt's token ids, the tokens of greedy decoding (end-of-sequence tokens do not end it), the gap
between the two largest logits at each step, and some logits of the first and the last step. It also holds token ids
of text samples.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python make_expected.py SmolLM2-135M-Instruct.Q4_1.gguf expected.json
"""

import json
import os
import sys

import torch
import transformers
from tokenizers import pre_tokenizers

STEPS = 64
TOP = 64
FIXED_IDS = [0, 1, 2, 17, 198, 216, 1000, 9999, 31337, 49151]

LONG_NOTE = (
    "The harbour office opened at six. By then the fog had come in so thick that the pilots could not see the end of "
    "the pier, and the three ships that had waited outside since midnight sounded their horns in turn. Marta, who kept "
    "the log, wrote down the time of each signal and the depth at the bar: four metres and a half at low water, rising. "
    "The first ship carried timber from the north, the second carried salt, and the third, the smallest, carried "
    "nothing but letters and two passengers who had missed the ferry. At half past seven the fog lifted for ten "
    "minutes. The salt ship went in at once, touched the sand bank, and came free again with the tide. The timber ship "
    "waited. The small ship slipped past both of them along the northern side, where nobody had thought there was "
    "enough water, and tied up at the fish market. When the harbour master asked its captain how he had known the "
    "channel, he said that his grandmother had drawn it for him on the back of a letter forty years ago, and that the "
    "sand moves but the rock does not."
)

SYSTEM = "You are a terse assistant. Answer in one sentence."

CHATS = [
    [("user", "What is the capital of France?")],
    [("user", "Write a haiku about the sea.")],
    [("user", "Explain what a hash table is to a ten year old.")],
    [("system", SYSTEM), ("user", "Why is the sky blue?")],
    [("user", "List the first 12 prime numbers and say how you found them: 2, 3, 5, ...")],
    [("user", "Complete this function:\n```python\ndef fibonacci(n):\n    \"\"\"Return the n-th number.\"\"\"\n    if n < 2:\n```")],
    [("user", "Read this note.\n\n" + LONG_NOTE + "\n\nWho knew the channel, and why?")],
    [
        ("user", "I have 3 apples and buy 4 more. How many do I have?"),
        ("assistant", "You have 7 apples."),
        ("user", "I give away 2. How many are left?"),
    ],
    [("user", "Übersetze ins Englische: „Der Zug fährt um 17:45 Uhr ab, nicht später.“ 🙂")],
    [("user", "Hi")],
    [("system", SYSTEM), ("user", "Name a fruit, a river and a metal.")],
    [("user", "It's raining, and I can't go out. What could we've done if we'd known? Don't say \"nothing\".")],
    [("user", "Summarise in two sentences.\n\n" + LONG_NOTE[:520])],
]

SAMPLES = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  leading and trailing  ",
    "a\tb\t\tc \t d",
    "line one\nline two\r\nline three\n\n\n  indented\n",
    "I'm, you're, he'd, she'll, they've, it's, can't; I'M YOU'RE 'tis ''s 'S",
    "0 1 12 123 1234567890 3.14159 1e-9 0x7fff 1,000,000 v2.0.1 a1b2c3",
    "  5 and   6\t7\n8",
    "½ ² ³ Ⅷ ① ٣ ४ 一二三",
    "naïve café résumé Ångström façade e\u0301 n\u0303",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया",
    "你好，世界。こんにちは世界。안녕하세요 세계",
    "🙂👍🏽👨‍👩‍👧‍👦🇩🇪 ☃️ ♥",
    "a\u00a0b\u2003c\u3000d\u200be\u2028f\u2029g\ufeffh\u0085i\u180ej",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }  // dot product\n",
    "def f(x):\n    return {'k': [x ** 2, None, True]}  # comment\n\n\tif x!=3: pass\n",
    "<html><body class=\"x\">&amp; &lt;tag&gt;</body></html>",
    "https://example.org/path?q=1&r=%20#frag user@example.org",
    "x = a*b/c-d+e^f|g&h~i!j@k#l$m%n(o)p[q]r{s}t;u:v,w.x<y>z?`\\\"'",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "ALLCAPS MixedCase camelCase snake_case kebab-case SCREAMING_SNAKE",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β = ¬(¬α ∨ β), √2 ≠ 1.5, 10⁻³",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                                                x",
    "\u0000\u0001\u0002\u001f\u007f control",
    "....!!!???----====____~~~~",
    "ﬁ ﬂ Ａｂｃ １２３ ｶﾅ ǅ ʰ ª º",
    "\U0001D400\U0001D7D8 \U00020000 \U0001F600\U0010FFFD",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <|im_end|> c<|im_start|>",
    LONG_NOTE,
]


def load(path):
    folder, name = os.path.split(os.path.abspath(path))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The file's tokenizer.ggml.pre is "smollm": digits one by one, then byte level. The conversion from GGUF does not
    # read that key, so it is said here.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    )
    return tokenizer, model.eval()


def some_logits(logits):
    ids = sorted(set(logits.topk(TOP).indices.tolist()) | set(FIXED_IDS))
    return {"ids": ids, "values": [float(f"{logits[i].item():.7g}") for i in ids]}


@torch.no_grad()
def greedy(model, prompt):
    tokens, gaps, slices = [], [], {}
    past, ids = None, torch.tensor([prompt])
    for step in range(STEPS):
        out = model(ids, past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        tokens.append(int(logits.argmax()))
        gaps.append(float(f"{first - second:.4g}"))
        if step in (0, STEPS - 1):
            slices[str(step)] = some_logits(logits)
        ids = torch.tensor([[tokens[-1]]])
    return tokens, gaps, slices


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    torch.set_num_threads(2)
    tokenizer, model = load(sys.argv[1])
    prompts = []
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False).input_ids
        tokens, gaps, slices = greedy(model, prompt)
        prompts.append({"messages": messages, "prompt": prompt, "tokens": tokens, "gaps": gaps, "logits": slices})
        print(f"{len(prompt)} tokens, smallest gap {min(gaps)}: {tokenizer.decode(tokens)!r}", file=sys.stderr)
    samples = [
        {"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids} for text in SAMPLES
    ]
    result = {
        "model": os.path.basename(sys.argv[1]),
        "bytes": os.path.getsize(sys.argv[1]),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "prompts": prompts,
        "samples": samples,
    }
    with open(sys.argv[2], "w", encoding="utf-8") as out:
        # One line a prompt or sample keeps the file small and its changes readable.
        lines = [f'"{key}": {json.dumps(result[key])}' for key in ("model", "bytes", "made_with")]
        for key in ("prompts", "samples"):
            rows = ",\n".join(json.dumps(row, ensure_ascii=True, separators=(",", ":")) for row in result[key])
            lines.append(f'"{key}": [\n{rows}\n]')
        out.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Draws what the dtypes of KV do to a model over the bytes that a token takes: mean KL divergence from f32. Points are
# numbered; the list beside has names, and the change of perplexity. Reads what `engine --perplexity TEXT --json
# REPORT.json` has written, several reports of one text as well; gnuplot draws.
# usage: plot_quality.sh REPORT.json... PICTURE.svg
set -euo pipefail

fail() { # SENTENCE
  printf 'plot_quality.sh: %s\n' "$1" >&2
  exit 1
}

[ $# -ge 2 ] || fail "usage: plot_quality.sh REPORT.json... PICTURE.svg"
command -v gnuplot >/dev/null || fail "gnuplot is not installed (Debian: gnuplot-nox)"
reports=("${@:1:$#-1}")
picture=${!#}
for report in "${reports[@]}"; do
  [ -r "$report" ] || fail "cannot read $report"
done

# gnuplot's lines: the points, and the list. Of points with equal bytes every other number stands on the left.
drawing=$(python3 - "${reports[@]}" <<'PYTHON'
import json, math, sys
points = {}
for path in sys.argv[1:]:
    with open(path) as file:
        report = json.load(file)
    for record in report["dtypes"]:
        if record["kv_dtype"] != report["baseline"] and record["mean_kl"] > 0:
            points[record["kv_dtype"]] = record
lines, right, left = [], [], []
ordered = sorted(points.values(), key=lambda r: (r["bytes_per_token"], -r["mean_kl"]))
for number, record in enumerate(ordered, 1):
    place = f'{record["bytes_per_token"]} {record["mean_kl"]} {number}'
    (right if number % 2 else left).append(place)
    text = f'{number:2}  {record["kv_dtype"]}  {100 * math.expm1(record["log_change"]):+.2f} %'
    lines.append(f"set label {number} '{text}' at graph 1.03, graph {1.0 - 0.045 * (number - 1):.3f} left")
if not points:
    sys.exit(1)
all_kl = [record["mean_kl"] for record in ordered]
lines.append(f"set yrange [{min(all_kl) / 2}:{max(all_kl) * 2}]")
for name, places in (("right", right), ("left", left)):
    lines += [f"${name} <<END", *(places or ["NaN NaN 0"]), "END"]
print("\n".join(lines))
PYTHON
) || fail "${reports[*]}: not what --perplexity writes, or no dtype but the one that all are compared with"

# gnuplot does not look whether its picture could be written, so the shell writes it.
gnuplot >"$picture" <<GNUPLOT || fail "gnuplot could not draw $picture"
$drawing
set terminal svg noenhanced size 980,520 background rgb 'white' fontscale 0.8
set grid
set rmargin at screen 0.57
set title 'mean KL divergence from f32; in the list, change of perplexity'
set xlabel 'bytes per token'
set xrange [0:*]
set offsets graph 0, graph 0.05, 0, 0
unset key
set logscale y
set format y '%.0e'
plot \$right using 1:2 with points linecolor 1 pointtype 7 pointsize 0.5, \
  '' using 1:2:3 with labels left offset 0.5,0, \
  \$left using 1:2 with points linecolor 1 pointtype 7 pointsize 0.5, '' using 1:2:3 with labels right offset -0.5,0
GNUPLOT

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Draws what the dtypes of KV do to a model over the bytes that a token takes: mean KL divergence from f32, and the
# change of perplexity. Reads what `engine --perplexity TEXT --json REPORT.json` has written; gnuplot draws.
# usage: plot_quality.sh REPORT.json PICTURE.svg
set -euo pipefail

fail() { # SENTENCE
  printf 'plot_quality.sh: %s\n' "$1" >&2
  exit 1
}

[ $# -eq 2 ] || fail "usage: plot_quality.sh REPORT.json PICTURE.svg"
command -v gnuplot >/dev/null || fail "gnuplot is not installed (Debian: gnuplot-nox)"
[ -r "$1" ] || fail "cannot read $1"

data=$(python3 - "$1" <<'PYTHON'
import json, math, sys
with open(sys.argv[1]) as file:
    report = json.load(file)
for record in report["dtypes"]:
    if record["kv_dtype"] != report["baseline"]:
        change = 100 * math.expm1(record["log_change"])
        error = 100 * record["log_change_error"]
        print(record["kv_dtype"], record["bytes_per_token"], record["mean_kl"], change, error)
PYTHON
) || fail "$1 is no report of --perplexity"
[ -n "$data" ] || fail "$1 holds no dtype but the one it compares with"

# gnuplot does not look whether its picture could be written, so the shell writes it.
gnuplot >"$2" <<GNUPLOT || fail "gnuplot could not draw $2"
\$data <<END
$data
END
set terminal svg noenhanced size 900,420 background rgb 'white'
set multiplot layout 1,2
set grid
set xlabel 'bytes per token'
set xrange [0:*]
set offsets graph 0, graph 0.15, graph 0.05, graph 0.05
unset key
set title 'mean KL divergence from f32'
set logscale y
set format y '%.0e'
plot \$data using 2:3:1 with labels point pointtype 7 pointsize 0.4 left offset 0.6,0.3
set title 'change of perplexity, %, and its standard error'
unset logscale y
set format y '%g'
plot \$data using 2:4:5 with yerrorbars pointtype 7 pointsize 0.4, '' using 2:4:1 with labels left offset 0.6,0.3
GNUPLOT

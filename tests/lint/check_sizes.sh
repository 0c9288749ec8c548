#!/bin/bash
# check_sizes.sh - lengths of source files: 1,000 lines are the hard stop, the median stays under 350. usage: check_sizes.sh [ROOT]
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2
hard_stop=1000 median_limit=350
find shared kernels kvtransfer prefill decode scheduler deploy tests -name '*.c' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.py' -o -name '*.sh' |
    xargs wc -l | grep -v ' total$' | sort -n |
    awk -v stop=$hard_stop -v limit=$median_limit '
    { n++; lines[n] = $1; name[n] = $2; sum += $1 }
    $1 > stop { print $2 ": " $1 " lines, over " stop; bad++ }
    END {
        if (!n) { print "no files"; exit 1 }
        median = lines[int((n + 1) / 2)]
        print n " files, " sum " lines, median " median
        print "longest:"
        for (i = n; i > n - 8 && i > 0; i--) print "  " lines[i] "  " name[i]
        if (median >= limit) { print "the median is not under " limit; bad++ }
        exit bad > 0
    }'

#!/bin/bash
# check_words.sh - finds words that do not belong in the tree: marks of unfinished work, paths of one machine, vague file names.
# usage: check_words.sh [ROOT]
set -u
cd "${1:-$(dirname "$0")/../..}" || exit 2
bad=0

# The patterns are written in halves so that this file does not match itself. Test data, corpora and saved documents are not checked.
marks='\b(TO''DO|FIX''ME|X''XX|HA''CK|TB''D)\b|not imple''mented|\bplace''holder (implementation|function|value)'
paths='/wo''rk/|/ro''ot/\.|/home/[a-z]+/(?!workspace)'
files() {
    git ls-files -co --exclude-standard -- . ':!tests/data' ':!tests/seeds/data' ':!tests/fuzz/corpus' ':!LICENSE' 2>/dev/null ||
        find . -type f -not -path './.git/*' -not -path './build*' -not -path './tests/data/*' -not -path './tests/seeds/data/*' -not -path './tests/fuzz/corpus/*'
}
# look WHY PATTERN [grep option...]
look() {
    local why=$1 pattern=$2 hits
    shift 2
    hits=$(files | tr '\n' '\0' | xargs -0 grep -HnIP "$@" -e "$pattern" 2>/dev/null)
    [ -z "$hits" ] && return
    echo "$why:"
    echo "$hits" | cut -c1-160
    bad=$((bad + $(echo "$hits" | wc -l)))
}
look "marks of unfinished work" "$marks"
look "paths of one machine" "$paths"

vague=$(files | grep -E '(^|/)(util|utils|common|misc|helper|helpers|types)\.(c|h|py|sh)$')
[ -z "$vague" ] || { echo "vague file names:"; echo "$vague"; bad=$((bad + $(echo "$vague" | wc -l))); }
typedefs=$(files | grep -E '\.[ch]$' | tr '\n' '\0' | xargs -0 grep -HnE '^typedef (struct|union|enum)\b[^(]*$')
[ -z "$typedefs" ] || { echo "typedefs of structs:"; echo "$typedefs"; bad=$((bad + $(echo "$typedefs" | wc -l))); }
top=$(files | grep / | cut -d/ -f1 | sort -u | grep -vE '^(prefill|decode|kvtransfer|scheduler|kernels|shared|deploy|tests|docs|\..*)$')
[ -z "$top" ] || { echo "folders that do not belong at the top: $top"; bad=$((bad + 1)); }

echo "$bad found"
[ $bad = 0 ]

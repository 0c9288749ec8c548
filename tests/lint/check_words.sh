#!/bin/bash
# check_words.sh - finds words that do not belong in the tree: marks of unfinished work, paths of one machine, vague file names, and words for which
# the field has another one.
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

# Words that the tree once used for something that vLLM, CUDA, NCCL, UCX, ggml or BLAS call otherwise. Each is refused only in the folders, and with the
# neighbours, in which it had that sense: rows of a matrix, lanes of a warp and KV slots stay. docs/glossary.md has the words that are ours.
# retired "OLD: NEW" PATTERN PATHS [NOT_PATHS]   (PATHS: extended regular expressions of file names)
retired() {
    local why=$1 pattern=$2 paths=$3 not=${4:-^$} hits
    hits=$(files | sed 's|^\./||' | grep -vE '^(tests/lint/check_(words|planted)\.sh|docs/glossary\.md)$' | grep -E "$paths" | grep -vE "$not" |
        tr '\n' '\0' | xargs -0 grep -HnIP -e "$pattern" 2>/dev/null)
    [ -z "$hits" ] && return
    echo "a retired word ($why):"
    echo "$hits" | cut -c1-160
    bad=$((bad + $(echo "$hits" | wc -l)))
}
retired 'card: GPU, device; a network card is a NIC' "(?<![A-Za-z])[Cc]ards?(?![a-z])(?!': machine)" .
retired 'made up: dummy' '\b[Mm]a(de|kes|king)[ -]up\b|made_up|\bMADE UP\b' . '^tests/text/'
retired 'taken apart: parsed, unpacked, split' '\b[Tt](ake|akes|aken|aking|ook) (it |them )?apart\b' .
retired 'take off: launch' '\b[Tt](ake|akes|aken|aking|ook)[ _-]off\b' .
retired 'run ahead: asynchronous scheduling, one step ahead' '\b[Rr](un|uns|unning|an)[ -]ahead\b' .
retired 'live rows: real rows' '\b[Ll]ive rows?\b|\brows? (that|which) (is|are) (not )?live\b' .
retired 'wish: sampling request' '(?<![A-Za-z])[Ww]ish(es|ed)?(?![a-z])|\bsample_ask\b' .
retired 'incident: transport event' '(?<![A-Za-z])[Ii]ncidents?(?![a-z])' .
retired 'condemned, buried, homeless, greeted: marked for close, reaped, unassigned, handshaken' '\b([Cc]ondemn(ed|s)?|[Bb]ur(y|ies|ied)|[Hh]omeless|[Gg]reet(s|ed))\b' .
retired 'befall: inject' '(?<![A-Za-z])[Bb]ef[ae]ll(s|en)?(?![a-z])' .
retired 'packed copy: weight cache' '\b[Pp]acked cop(y|ies)\b' .
retired 'under way: in flight, running' '\b[Uu]nder[ -]way\b' .
retired 'meters: metrics; a meter counts what tenants use' '(?<![A-Za-z])[Mm]eters(?![a-z])' '\.(c|h|md)$'
retired 'thoughts: reasoning' '(?<![A-Za-z])[Tt]houghts(?![a-z])' '^(shared|deploy|docs|tests)/'
retired 'row: transport' "\b[Rr]ows?('s|s')?\b(?! of)(?! bytes)(?!\[)" '^(kvtransfer/|docs/kv-transfer)' '^kvtransfer/(convert|plan|gpu_jobs)'
retired 'form: layout (of weights), path (of attention)' "\b(weights?|packed|block|widened|plain|two|both|absorbed|naive|decode|latent|unpacked|channel) forms?\b|\bforms? of (attention|latent|the weights?|a weight|packed)\b|\bform's\b" '^(kernels/|shared/(engine|model|kv)/|kvtransfer/|prefill/|decode/|docs/)'
retired 'ready rows: prequantised activations' '\bready rows?\b|\bx_ready\b|\by_for\b|\brows (are )?made ready\b' '^(kernels/|docs/(kernels|gpu|performance)|tests/(conformance|cuda|gpu|perf|unit/kernels)/)'
retired 'loops: micro-kernels' '\bcpu_loops\b|\b(sets of|tile|amx|avx\w*) loops\b|\bloops (for|of) (the )?(processor|CPU|isa|every)' '^kernels/cpu|^docs/kernels|^tests/(conformance|unit/kernels)'
retired 'owed: remaining' '\b(n_)?owed\b' '^(shared/(engine|model)|kernels|tests/unit/engine)'
retired 'naming blocks: publishing them in the prefix cache' "\b[Nn]am(e|es|ed|ing) (a|its|full|whole|every|each|all) (\w+ )?blocks?\b|\bblocks? (is|are|was|were) (not )?(yet )?named\b|\b(un)?named blocks?\b|\bblock'?s? names?\b|\bnames of (KV )?blocks\b" '^(shared/(kv|engine|model)|scheduler|decode|prefill|docs|tests/unit/(kv|engine))'
retired 'answer rows, generated rows: decode tokens' "\b([Aa]nswer|[Gg]enerated)('s)? rows?\b|\brows? of (the |an )?answers?\b" '^(kernels|shared|docs|tests)/'
retired 'holder: directory server' '\b[Hh]olders?\b' '^(scheduler|deploy|docs|tests)/'
retired 'places: scatter' '\b(receiver|row|transport|rows) (that )?places\b' '^kvtransfer/|^docs/kv|^tests/(conformance|unit/kvtransfer)'
retired 'span: block range; runs: segments' '\b[Ss]pans?\b|\b[Rr]uns? of (a |the |its )?(block|piece|head|valid)\w*' '^kvtransfer/|^shared/kv|^docs/kv|^tests/(conformance/test_kv|unit/(kv|kvtransfer))'
retired 'work, works: GPU job, GPU jobs' "\b[Ww]orks of\b|\ba work (that|is|given|of|before)\b|\bworks (and|come|before|are)\b" '^kvtransfer/|^tests/unit/kvtransfer'
retired 'box: mailbox; kick: wake' '\b([Kk]ick(s|ed|ing)?|[Bb]ox(es)?)\b' '^(kvtransfer|shared/(base|net|cluster|engine)|scheduler|prefill|decode)'
retired 'processor: CPU, SM' '(?<![A-Za-z_-])[Pp]rocessors?(?![A-Za-z_"])(?!\\")' . '^shared/text/tokenizer/'
retired 'row of a table of implementations: backend, transport, family, option' "\b[Tt]he rows? (rdma|ucx|tcp|ipc|mem|redis|http|local|self|peer|nccl|ref|amx|avx\w*)\b|\b(rdma|ucx|tcp|ipc|redis|nccl|amx|avx\w*)('s)? rows?\b|\b(kernel|transport|directory|wrapped|inner|fault|registry) rows?\b|\brows? of (the )?(kernel|device|directory|transport|option|registry|ep\.h|kernels\.h|KERNEL)" .
retired 'widen: upconvert, dequantise' '(?<![A-Za-z])[Ww]iden(s|ed|ing)?(?![a-z])' .
retired 'land: complete, arrive' '(?<![A-Za-z])[Ll]and(s|ed|ing|ings)?(?![A-Za-z])' .
retired 'face: API server' '(?<!Hugging )(?<![\w"])[Ff]ace(?![a-z])(?! of)' .
retired 'lane: copy stream' '\b[Ll]anes?\b(?! rate)(?! times)' '^(kvtransfer/|shared/(engine/[a-rt-z]|kv|model|base)|prefill/|decode/|docs/(kv|arch)|kernels/[^/]*\.[ch]$|kernels/host/|kernels/(cpu|cuda)/(copy_stream|device_)|tests/conformance/test_(device|kv_|transp))' '^kvtransfer/(rdma/(device|gid)|ucx/)'
retired 'mark: event' '\b[Mm]arks?\b(?!s? (the|whose|which|it|bytes|as))' '^(shared/engine/|prefill|decode|kvtransfer/[^/]*\.[ch]$|kernels/(device|copy_stream|step|kernels)|kernels/(cpu|cuda)/(copy_stream|device_)|tests/(conformance/test_(device|transp|kv)|unit/(engine|decode|prefill)))' '^shared/engine/batch\.c'
retired 'chain: accumulation order, sum' '\b[Cc]hains?\b' '^(kernels/|docs/kernels|tests/(conformance/test_(matmul|attention|experts)|cuda/))' '^kernels/ep/'
retired 'soften, weigh: softmax update, weight V' '\b([Ss]often(s|ed|ing)?|[Ww]eigh(s|ed|ing)?)\b' '^kernels/'
retired 'turned: transposed, rotated' '\bturn16\b|\b[Tt]urned\b' '^kernels/|^tests/(conformance/test_(att|kern|mat)|cuda)'
retired 'recording: captured CUDA graph' '\b[Rr]ecord(ed|ing) (step|launch|graph)s?\b|\brecordings\b' '^(kernels/|shared/(engine|model)/|docs/gpu|tests/(cuda|gpu|unit/engine))'
retired 'late tokens: future tokens' "\blate (tokens?|ids?)\b|\b(n_late|late_row)\b" '^(kernels/|shared/(engine|model)/|docs/gpu|tests/(cuda|gpu|unit/engine))'
retired 'visitor: client' '\b[Vv]isitors?\b' '^deploy/(probe|bench|doctor|cli)/|^tests/(unit/deploy|fuzz/fuzz_probe)'
retired 'slot of an ops table: op' '\b[Ss]lots?\b(?! of \(row)' '^(kernels/cpu/cpu_backend|kernels/cuda/cuda_(ops|backend)|kvtransfer/transport\.|docs/gpu|tests/(gpu/bench|conformance/kernel_))'
retired 'row in a log: backend' '"row=%' '\.c$'
retired 'row of a backend' '\b(CUDA|CPU|GPU) rows?\b(?! of)|\btable of rows\b' '^(kernels/|scheduler/|shared/|kvtransfer/|docs/)'
retired 'slot of an ops table: op' '\b[Ss]lots? of (the|a|an|this) (\w+ )?table\b|\b(each|all|any|every) slots?\b(?! of the batch)' '^(kernels/[^/]*\.h|shared/model)'
retired 'form: layout, path' "\b[Ff]orms? of (a|the) (matri|weight|pack|attention)|\b(every|whatever the|of the) forms?\b" '^(kernels|shared/model)/'
retired 'given away: freed, sent' '\b([Gg]iven|[Gg]ives?|[Gg]iving|[Gg]ave) (\w+ )?away\b|\b[Kk]ept blocks?\b' '^(shared|decode|prefill|kernels)/'
retired 'flight: step in flight' '(?<![iI]n )(?<!in-)(?<!in_)\b[Ff]lights?\b' '^(shared|decode|prefill)/|^kernels/[^/]*\.h'
retired 'agent: probe server' '\b[Aa]gents?\b' '^(deploy/|shared/cluster/|tests/(unit|e2e)/)'
retired 'angles: RoPE table' '\b[Aa]ngles_|\b[Tt]ables? of angles\b|\bangle tables?\b' .
retired 'lane: copy stream' "\b[Ll]anes?\b(?! (of|'s|with))" '^kernels/cuda/(weight_upload|cuda_weight_pack|cuda_ctx)'
retired 'mark: event' '\b[Mm]arks?\b' '^docs/gpu|^shared/model/(decoder|attention|model)|^kernels/cuda/weight_upload'
retired 'asks, wants: requests' '\b(n_)?(asks|wants)\b(?= \[|;)' '^(shared/engine|kernels)/'

vague=$(files | grep -E '(^|/)(util|utils|common|misc|helper|helpers|types)\.(c|h|py|sh)$')
[ -z "$vague" ] || { echo "vague file names:"; echo "$vague"; bad=$((bad + $(echo "$vague" | wc -l))); }
typedefs=$(files | grep -E '\.[ch]$' | tr '\n' '\0' | xargs -0 grep -HnE '^typedef (struct|union|enum)\b[^(]*$')
[ -z "$typedefs" ] || { echo "typedefs of structs:"; echo "$typedefs"; bad=$((bad + $(echo "$typedefs" | wc -l))); }
top=$(files | grep / | cut -d/ -f1 | sort -u | grep -vE '^(prefill|decode|kvtransfer|scheduler|kernels|shared|deploy|tests|docs|\..*)$')
[ -z "$top" ] || { echo "folders that do not belong at the top: $top"; bad=$((bad + 1)); }

echo "$bad found"
[ $bad = 0 ]

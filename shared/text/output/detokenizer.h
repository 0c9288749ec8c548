/* detokenizer.h - turns token ids into text as they arrive, and matches stop strings.
 *
 * Bytes are held back while they may be the beginning of a UTF-8 character (at most 3 bytes) or of
 * a stop string; an invalid sequence becomes U+FFFD at once. The text equals that of decoding all
 * tokens at once and cutting it at the stop string that ends first; if several end at the same
 * byte, the longest wins. Unlike in tokenizer_decode, a leading space is kept.
 * Life cycle: init, push per token, finish once, release.
 * Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_DETOKENIZER_H
#define BATON_TEXT_OUTPUT_DETOKENIZER_H

#include "shared/text/tokenizer/tokenizer.h"

enum { DETOKENIZER_STOPS_MAX = 16 };

struct detokenizer {
    const struct tokenizer *tok; /* borrowed until release */
    struct buf pending;          /* bytes not yet emitted */
    struct str stops[DETOKENIZER_STOPS_MAX];
    size_t n_stops;
    size_t stop_max; /* longest stop string, bytes */
    int stop_index;  /* of the matched stop string, -1: none */
    bool skip_special;
    bool include_stop;
};

/* `stops` are borrowed until release; at most DETOKENIZER_STOPS_MAX. Empty ones match nothing. */
void detokenizer_init(struct detokenizer *d, const struct tokenizer *tok, bool skip_special,
                      const struct str *stops, size_t n_stops, bool include_stop);
/* Appends the text that can no longer become part of a stop string to `out`. True when this token
 * completes a stop string: the text before it (include_stop: and it) has been emitted, and further
 * pushes add nothing. */
bool detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out);
/* Emits the pending bytes (an incomplete character as U+FFFD). */
void detokenizer_finish(struct detokenizer *d, struct buf *out);
void detokenizer_release(struct detokenizer *d);

#endif

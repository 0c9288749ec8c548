/* batch_tally.c - see batch_tally.h. */
#include "deploy/generate/batch_tally.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"

enum { REASONS_SHOWN = 5 };

static const struct {
    const char *word, *text;
} FINISHES[BATCH_FINISHES_MAX] = {
    { "stop", "by itself (stop)" },
    { "tool_calls", "with tool calls" },
    { "length", "cut by max_tokens or --max-model-len (length)" },
};

/* No text of an answer can spell this: the quotes in a JSON string have a backslash before them. */
#define FINISH_MEMBER "\"finish_reason\":\""

void batch_finishes_count(struct batch_finishes *f, struct str lines)
{
    for (size_t at; (at = str_find(lines, STR(FINISH_MEMBER))) != SIZE_MAX;) {
        lines = str_sub(lines, at + strlen(FINISH_MEMBER), SIZE_MAX);
        struct str word = str_sub(lines, 0, str_find_char(lines, '"'));
        for (size_t i = 0; i < COUNT_OF(FINISHES); i++)
            if (str_eq_c(word, FINISHES[i].word)) f->n[i]++;
    }
}

void batch_finishes_add(struct batch_finishes *to, const struct batch_finishes *from)
{
    for (size_t i = 0; i < COUNT_OF(FINISHES); i++) to->n[i] += from->n[i];
}

void batch_tally_failure(struct batch_tally *t, const char *sentence, uint64_t number)
{
    char text[BATCH_REASON_MAX];
    size_t i = 0;
    snprintf(text, sizeof text, "%s", sentence);
    t->n_failed++;
    while (i < t->n_reasons && strcmp(t->reasons[i].text, text) != 0) i++;
    if (i == BATCH_REASONS_MAX) {
        t->n_other++;
        return;
    }
    struct batch_reason *r = &t->reasons[i];
    if (i == t->n_reasons) {
        memcpy(r->text, text, sizeof text);
        t->n_reasons++;
    }
    if (r->n++ == 0 || number < r->first_line) r->first_line = number;
}

static void add_reasons(const struct batch_tally *t, struct buf *out)
{
    bool shown[BATCH_REASONS_MAX] = { false };
    uint64_t n_left = t->n_failed;
    for (int line = 0; line < REASONS_SHOWN; line++) {
        const struct batch_reason *most = NULL;
        for (size_t i = 0; i < t->n_reasons; i++)
            if (!shown[i] && (!most || t->reasons[i].n > most->n)) most = &t->reasons[i];
        if (!most) break;
        shown[most - t->reasons] = true;
        n_left -= most->n;
        buf_printf(out, "\nfailed %" PRIu64 " x: %s (first in line %" PRIu64 ")", most->n,
                   most->text, most->first_line);
    }
    if (n_left)
        buf_printf(out, "\nfailed %" PRIu64 " x: other reasons, each in \"error\" of its line",
                   n_left);
}

void batch_tally_summary(const struct batch_tally *t, struct buf *out)
{
    buf_printf(out, "%" PRIu64 " answered, %" PRIu64 " failed", t->n_ok, t->n_failed);
    for (size_t i = 0; i < COUNT_OF(FINISHES); i++)
        if (t->finishes.n[i])
            buf_printf(out, "\nended %" PRIu64 " x: %s", t->finishes.n[i], FINISHES[i].text);
    add_reasons(t, out);
}

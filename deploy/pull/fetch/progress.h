/* progress.h - says on standard error how far a pull is: on a terminal one line that changes, else
 * a line of the log every ten seconds. Thread: main. */
#ifndef BATON_DEPLOY_PULL_FETCH_PROGRESS_H
#define BATON_DEPLOY_PULL_FETCH_PROGRESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PROGRESS_SAMPLES = 16 };

struct progress {
    bool quiet, terminal;
    uint64_t total;    /* bytes of all files */
    uint64_t shown_ms; /* when the last line was shown */
    bool line_is_open; /* on the terminal */
    struct {
        uint64_t ms, bytes;
    } samples[PROGRESS_SAMPLES]; /* of the last seconds, in a ring */
    size_t n_samples;
};

void progress_init(struct progress *p, bool quiet);
/* `done` bytes are here, of which `checked` are hashed; `name`: the file that the front is in. */
void progress_show(struct progress *p, uint64_t done, uint64_t checked, const char *name);
/* Ends the terminal's line, so that another may follow. */
void progress_end_line(struct progress *p);
/* "1.5 GiB" */
enum { PROGRESS_SIZE_TEXT = 32 };
const char *progress_size(uint64_t bytes, char out[PROGRESS_SIZE_TEXT]);

#endif

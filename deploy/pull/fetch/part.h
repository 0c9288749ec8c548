/* part.h - a file in the making: its bytes come in chunks, in any order, and are hashed in order
 * behind them.
 *
 *     part_begin      reads the journal: which bytes an earlier pull has left
 *     part_open       opens the file
 *     part_write      adds bytes of a chunk
 *     part_hash       computes the sum of what is there without a hole       (checker's thread)
 *     part_settle     brings bytes to the disk, then writes the journal      (checker's thread)
 *     part_check      the whole file is hashed: is it what the source said?
 *
 * The journal never says more than the disk has, so after a crash or a loss of power nothing is
 * trusted that was not written. It belongs to one content: of another one it is forgotten. Without
 * a sum and a version nothing is kept for a later pull.
 * Thread: main; the checker's for one job of each kind at a time. */
#ifndef BATON_DEPLOY_PULL_FETCH_PART_H
#define BATON_DEPLOY_PULL_FETCH_PART_H

#include <stdatomic.h>

#include "deploy/pull/folder.h"
#include "shared/base/hash/digest.h"

enum { PART_CHUNKS_MAX = 1 << 16 };

struct part_chunk {
    uint64_t done; /* bytes from its begin */
    bool in_flight;
    uint32_t n_failures; /* in a row */
    uint64_t next_ms;    /* not asked for before */
};

struct part {
    const struct pull_file *file;
    struct buf path, journal; /* of the file, and of its journal */
    const char *url;          /* of the caller: where the source has it */
    bool in_place;            /* `path` is at its place and only checked */
    bool whole;               /* the source serves no ranges: one chunk */
    bool must_restart;        /* as soon as nothing works on it */
    uint32_t n_restarts;      /* because it broke off and could not go on */
    int fd;                   /* -1: not open */
    uint64_t size, done;
    uint64_t chunk_bytes;
    uint32_t n_chunks;
    struct part_chunk *chunks;
    uint32_t first_open;    /* all chunks before it are done */
    uint32_t n_mismatches;  /* times that it was whole and wrong */
    bool hashing, settling; /* a job of the checker */
    uint64_t settled_ms;    /* when the journal was last written */
    uint64_t settled_done;  /* and the bytes that were done then */
    struct digest *sha256, *git;
    uint64_t n_hashed;  /* of the checker while it hashes */
    uint64_t n_checked; /* the same as main saw it last */
    struct sum sum;     /* the SHA-256, once all is hashed */
    char *direct;       /* where the source's address led to; NULL: not known */
};

/* Sets a part of `file`, whose size is known, up: as far as an earlier pull of this content came.
 * Very large files get larger chunks, at most PART_CHUNKS_MAX. */
void part_begin(struct part *p, const struct pull_folder *folder, const struct pull_file *file,
                uint64_t chunk_bytes);
/* The same of a file at its place, which is only to be hashed. */
void part_begin_in_place(struct part *p, const struct pull_folder *folder,
                         const struct pull_file *file);
/* ERR_IO. */
enum status part_open(struct part *p, struct err *err) MUST_CHECK;
void part_close(struct part *p);

/* Where chunk i begins, and how long it is. */
uint64_t part_chunk_begin(const struct part *p, uint32_t i);
uint64_t part_chunk_length(const struct part *p, uint32_t i);
bool part_chunk_is_done(const struct part *p, uint32_t i);
/* Appends to chunk i. ERR_FULL: the disk is; ERR_IO. */
enum status part_write(struct part *p, uint32_t i, const char *bytes, size_t n,
                       struct err *err) MUST_CHECK;
static inline bool part_is_filled(const struct part *p) { return p->done == p->size; }
/* How many bytes there are without a hole. */
uint64_t part_front(struct part *p);
/* Forgets everything: begins from nothing, in one chunk if `whole`. ERR_IO. */
enum status part_restart(struct part *p, bool whole, struct err *err) MUST_CHECK;
/* Appends the text of the journal as it is now; nothing where none is kept. */
void part_journal(const struct part *p, struct buf *out);

/* Checker: hashes up to the byte `to`, until *stop. ERR_IO, ERR_CANCELED. */
enum status part_hash(struct part *p, uint64_t to, const atomic_bool *stop,
                      struct err *err) MUST_CHECK;
/* Checker: the journal's text, taken before, is written once the bytes are on the disk. ERR_IO. */
enum status part_settle(struct part *p, struct str journal, struct err *err) MUST_CHECK;

/* All bytes are hashed: sets `sum`. ERR_CHECKSUM: the source said another one. */
enum status part_check(struct part *p, struct err *err) MUST_CHECK;

#endif

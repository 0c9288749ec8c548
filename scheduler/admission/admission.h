/* admission.h - admission at an entry node: what admit.h decides, done to requests.
 *
 * It asks for the verdict on a request that comes, holds the others in the line, gives them to
 * placement in their order, ends those that waited too long, and exchanges use with the directory
 * in the background. Owner: the scheduler. Thread: loop. */
#ifndef BATON_SCHEDULER_ADMISSION_ADMISSION_H
#define BATON_SCHEDULER_ADMISSION_ADMISSION_H

#include "scheduler/admission/admit.h"
#include "scheduler/admission/fill.h"
#include "scheduler/directory/directory.h"
#include "shared/base/metrics.h"

struct entry;
struct request;
struct view;

struct admission_metrics {
    struct metrics *registry;                               /* borrowed */
    struct counter *refused[ADMIT_N_REASONS], *returned[2]; /* refused again, taken */
    struct histogram *wait_s;
    struct {
        struct counter *requests, *refused, *prompt_tokens, *output_tokens;
        struct gauge *waiting, *running;
        uint64_t n_prompt_tokens, n_output_tokens; /* counted so far */
    } * tenants;                                   /* [n] */
};

struct admission {
    struct admit *admit;
    struct fill fill;
    struct tenants open; /* without options.tenants */
    struct directory *directory;
    uint64_t entry; /* for meter_report */
    bool reporting; /* directory_meter has not answered */
    uint64_t t_gauges_ms;
    struct admission_metrics metrics;
};

struct admission_options {
    const struct tenants *tenants; /* borrowed until admission_stop; NULL: "default" alone */
    uint32_t max_queue_ms;
    struct directory *directory; /* borrowed until it is closed */
    struct metrics *metrics;
};

void admission_start(struct admission *d, const struct admission_options *o);
/* After the directory is closed. */
void admission_stop(struct admission *d);
/* Reports to the directory when that is due, and ends who waited too long. */
void admission_tick(struct entry *e);
/* The view is a fresh one: how fast are its nodes? */
void admission_on_view(struct admission *d, const struct view *v);

/* ---- requests ---- */

/* May the request come in? Not OK: `why` is for its client. n_max: as in struct admit_ask; when
 * there is no room one that waits may give way, which ends in the next turn of the loop. */
enum status admission_ask(struct entry *e, const struct gen_request *g, uint32_t n_max,
                          struct gen_refusal *why) MUST_CHECK;
/* The same of one whose client comes back for its answer: only those of its tenant that look for
 * one count, since what a node has kept was admitted before. */
enum status admission_ask_kept(struct entry *e, const struct gen_request *g,
                               struct gen_refusal *why) MUST_CHECK;
/* It is to be placed: into the line, unless it has been there. In ATTACH it is only counted. */
void admission_push(struct entry *e, struct request *r);
/* A node had kept its answer and goes on with it, so it was admitted before. */
void admission_adopt(struct entry *e, struct request *r);
/* None had: it is a request like any other now, whatever its client says. True: it is over a limit
 * of its tenant, and gone. */
bool admission_refuses_to_compute(struct entry *e, struct request *r);
bool admission_is_waiting(const struct request *r);
/* As admit_goes_first. */
bool admission_goes_first(struct entry *e, const struct request *r);
/* Gives those to placement whose turn it is, as long as there is room. */
void admission_place_line(struct entry *e);
/* Milliseconds until the line is to be looked at again; 0: there is nothing to wait for. */
uint32_t admission_next_ms(const struct entry *e);
/* Out of the line, or over. */
void admission_take(struct entry *e, struct request *r);
void admission_leave(struct entry *e, struct request *r);
/* Ends requests that have waited too long, for their turn or for a node, or gave way. True: `r` is
 * gone. */
bool admission_ends(struct entry *e, struct request *r);
/* Sets when a request that is refused now is to come again. */
void admission_set_retry(struct entry *e, struct request *r);
/* Output token `index` is delivered. */
void admission_on_token(struct entry *e, struct request *r, uint32_t index);

/* ---- a second attempt beside the first (hedge.h) ---- */

/* Does nobody wait in line, and have the tenant's limits room for the prompt of `r` once more? */
bool admission_has_room_again(struct entry *e, const struct request *r);
void admission_charge_again(struct entry *e, const struct request *r);
/* `to` goes on in place of `from`. */
void admission_hand_over(struct request *from, struct request *to);

/* ---- prompts at nodes (fill.h) ---- */

/* Nodes are chosen; tokens: that it has to compute; step_us: of the one that decodes. */
void admission_fill(struct entry *e, struct request *r, const struct node_record *computes,
                    uint32_t tokens, uint32_t step_us);
/* The attempt is over, or (computed) its first token has come. */
void admission_unfill(struct entry *e, struct request *r, bool computed);

/* Appends the member "tenants" of GET /cluster, with a comma before it. */
void admission_describe(struct entry *e, struct buf *out);

#endif

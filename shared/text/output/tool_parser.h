/* tool_parser.h - finds the tool calls in a model's answer while it is generated.
 *
 * Model families write calls in different formats, listed in tool_formats.c. A parser takes the
 * answer in pieces of any size and returns text and calls. The result does not depend on the
 * pieces: the conformance test cuts the examples of every format at every byte.
 * Invariants:
 * 1. A call's arguments grow only by bytes that keep them the beginning of a JSON object, so they
 *    can be streamed at once.
 * 2. Nothing is lost: what turns out not to be a call is text, as the model wrote it. Blanks next
 *    to a call belong to the call.
 * 3. A call that was streamed and then turns out malformed stays in its place, marked `broken`,
 *    and is text as well.
 * Life cycle: init, push per piece, finish once, release. Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_TOOL_PARSER_H
#define BATON_TEXT_OUTPUT_TOOL_PARSER_H

#include "shared/base/json/json.h"
#include "shared/text/output/json_scan.h"

struct tool_parser;

enum tool_step {
    TOOL_MORE,     /* needs more text */
    TOOL_CONTINUE, /* something was taken or the state has changed: call again */
    TOOL_BAD       /* what was read since the call began is no call */
};

enum { TOOL_MARKERS_MAX = 6, TOOL_NAME_MAX = 256, TOOL_STATE_BAD = -1 };
/* The parser states that all formats share; a format's own follow TOOL_STATE_BEGIN. */
enum { TOOL_STATE_TEXT, TOOL_STATE_BEGIN };

/* One format of calls. */
struct tool_format {
    const char *name;
    const char *aliases;                  /* names that peers use, separated by spaces */
    struct str open[2];                   /* what begins a call (or a list of them) anywhere in
                                           * the text; n 0: none */
    struct str markers[TOOL_MARKERS_MAX]; /* tags that may be special tokens and must show in the
                                           * text that is parsed */
    bool bare;                            /* an answer may also begin with a call's JSON, without
                                           * a tag */
    bool short_ids;                       /* ids of calls are nine letters and digits: the
                                           * template refuses others */
    /* Whether the source of a chat template describes this format. */
    bool (*matches_template)(struct str template);
    /* Parse more of a call with the tool_* functions below. The state is TOOL_STATE_BEGIN after the
     * opening tag; TOOL_STATE_TEXT ends the call. `last`: no more text will come. */
    enum tool_step (*step)(struct tool_parser *p, bool last);
    /* Append what a call begins with, up to its name (name NULL) or up to its arguments. */
    void (*begin)(struct str name, struct buf *out);
};

const struct tool_format *tool_format_at(size_t i); /* entry i, NULL after the last */
/* by name or alias ('-', '_' and '.' do not count), or NULL */
const struct tool_format *tool_format_find(struct str name);
/* NULL: the template has no tools, or none of these formats */
const struct tool_format *tool_format_of_template(struct str source);

struct tool_call {
    struct buf name, arguments;
    bool named; /* the name is known and the call may be passed on */
    bool complete;
    bool broken; /* see invariant 3 */
};

struct tool_parser {
    const struct tool_format *f;
    const cJSON *tools; /* of the request, borrowed; NULL: any name is a tool's */
    uint32_t max_calls; /* 0: any number */
    struct tool_call *calls;
    uint32_t n_calls, calls_cap;
    bool full;     /* more than max_calls came: the rest of the answer is
                    * dropped */
    struct buf in; /* not read yet, from `at` on */
    size_t at;
    struct buf raw;        /* the call being read as the model wrote it */
    int state;             /* TOOL_STATE_*, then the format's own */
    int i_open_tag;        /* which of f->open began it, -1: a bare call */
    bool started;          /* text other than blanks, or a call, has come */
    bool after_call;       /* only blanks since a call */
    bool text_emitted;     /* text was emitted */
    bool closing;          /* a call is whole, and what is read since then are its
                            * closing tags */
    bool open;             /* a call is being read: the last of calls */
    struct json_scan scan; /* of the JSON being read */
    int key;               /* formats: which member is being read */
    struct buf word;       /* formats: a key, a name, a value */
};

void tool_parser_init(struct tool_parser *p, const struct tool_format *f, const cJSON *tools,
                      uint32_t max_calls);
/* Append text that is no call to `text`; calls grow in p->calls. */
void tool_parser_push(struct tool_parser *p, struct str piece, struct buf *text);
/* No more comes. cut: the answer was ended from outside (length, stop string), so an unfinished
 * call stays a call as far as it came; otherwise it is malformed. */
void tool_parser_finish(struct tool_parser *p, bool cut, struct buf *text);
void tool_parser_release(struct tool_parser *p);
/* Number of calls that are not broken. */
uint32_t tool_parser_n_good(const struct tool_parser *p);

/* ---- for formats ---- */

struct str tool_rest(const struct tool_parser *p); /* not read yet */
void tool_consume(struct tool_parser *p, size_t n);
/* Begin the next call; false when max_calls is reached. */
bool tool_call_begin(struct tool_parser *p);
struct tool_call *tool_call_current(struct tool_parser *p);
/* The name is known. TOOL_BAD when it is empty, too long or has control characters. */
enum tool_step tool_call_name(struct tool_parser *p, struct str name);
/* Mark the current call complete. */
void tool_call_end(struct tool_parser *p);
/* Take blanks, then `tag` if it is there: state becomes `then`, else `otherwise`; TOOL_STATE_BAD
 * stands for no call. */
enum tool_step tool_expect(struct tool_parser *p, struct str tag, int then, int otherwise);
/* Text up to `tag` into *out (valid until the next push), taken with the tag. At most TOOL_NAME_MAX
 * bytes, else TOOL_BAD. */
enum tool_step tool_read_until(struct tool_parser *p, struct str tag, struct str *out, int then);
/* Read the JSON object of the arguments into the call; then set the state to `then`. */
enum tool_step tool_read_arguments(struct tool_parser *p, int then);
/* Read an object with members name and arguments (or parameters); then set the
 * state. strict: other members make it no call. */
enum tool_step tool_read_call(struct tool_parser *p, bool strict, int then);
/* Whether the request has a tool of this name. */
bool tool_is_known(const struct tool_parser *p, struct str name);
/* The JSON schema of parameter `key` of tool `name`, or NULL. */
const cJSON *tool_schema(const struct tool_parser *p, struct str name, struct str key);

#endif

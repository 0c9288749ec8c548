/* tool_parser.h - finds the tool calls in a model's answer while it is generated.
 *
 * Model families write calls in different formats (tool_formats.c). A parser takes the answer in
 * pieces of any size and returns text and calls; the result does not depend on the pieces.
 * 1. A call's arguments are always a prefix of a JSON object, so they can be streamed at once.
 * 2. Nothing is lost: what turns out not to be a call is text, as the model wrote it. Blanks next
 *    to a call belong to the call.
 * 3. A call names a tool of the request; what names another one is text.
 * 4. A call that was streamed and turns out malformed stays in its place, marked `broken`, and is
 *    emitted as text too.
 * Life cycle: init, push per piece, finish once, release.
 * Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_TOOL_PARSER_H
#define BATON_TEXT_OUTPUT_TOOL_PARSER_H

#include "shared/base/json/json.h"
#include "shared/text/output/json_scan.h"

struct tool_parser;

enum tool_step {
    TOOL_MORE,     /* needs more text */
    TOOL_CONTINUE, /* text was consumed or the state has changed: call again */
    TOOL_BAD       /* the text since the call began is not a call */
};

enum { TOOL_MARKERS_MAX = 6, TOOL_NAME_MAX = 256, TOOL_STATE_BAD = -1 };
/* Parser states that all formats share; a format's own states follow TOOL_STATE_BEGIN. */
enum { TOOL_STATE_TEXT, TOOL_STATE_BEGIN };

/* One format of calls. */
struct tool_format {
    const char *name;
    const char *aliases; /* names in other servers, separated by spaces */
    struct str open[2];  /* tags that open a call, or a list of them; n 0: none */
    /* Tags that may be special tokens and must be visible in the parsed text. */
    struct str markers[TOOL_MARKERS_MAX];
    bool bare;      /* an answer may also begin with a call's JSON, without a tag */
    bool short_ids; /* call ids are nine letters and digits: the template refuses others */
    /* Does the source of a chat template describe this format? */
    bool (*matches_template)(struct str template);
    /* Parses more of a call with the tool_* functions below. The state is TOOL_STATE_BEGIN after
     * the opening tag; TOOL_STATE_TEXT ends the call. `last`: no more text will come. */
    enum tool_step (*step)(struct tool_parser *p, bool last);
    /* Appends the beginning of a call, up to its name (name NULL) or up to its arguments. */
    void (*begin)(struct str name, struct buf *out);
};

/* Entry i of the table; NULL after the last. */
const struct tool_format *tool_format_at(size_t i);
/* Finds a format by name or alias ('-', '_' and '.' do not count); NULL: unknown. */
const struct tool_format *tool_format_find(struct str name);
/* May --tool-call-parser say it: "auto", "none" or a format? */
bool tool_parser_is_known(struct str name);
/* Finds the format that a chat template describes; NULL: no tools, or another format. */
const struct tool_format *tool_format_of_template(struct str source);

struct tool_call {
    struct buf name, arguments;
    bool named; /* the name is known, and the call may be streamed */
    bool complete;
    bool broken; /* see invariant 4 */
};

struct tool_parser {
    const struct tool_format *f;
    const cJSON *tools; /* of the request, borrowed; NULL: every name is accepted */
    uint32_t max_calls; /* 0: any number */
    struct tool_call *calls;
    uint32_t n_calls, calls_cap;
    bool full;     /* max_calls exceeded: the remaining answer is dropped */
    struct buf in; /* unread from `at` on */
    size_t at;
    struct buf raw;        /* the current call as the model wrote it */
    int state;             /* TOOL_STATE_* or a state of the format */
    int i_open_tag;        /* index in f->open of the tag that opened the call; -1: bare */
    bool started;          /* text other than blanks, or a call, has come */
    bool after_call;       /* only blanks since a call */
    bool text_emitted;     /* text was emitted */
    bool closing;          /* the call is complete: its closing tags are being read */
    bool open;             /* the last of `calls` is being read */
    struct json_scan scan; /* state of the JSON being read */
    int key;               /* used by formats: the member being read */
    struct buf word;       /* used by formats: a key, a name or a value */
};

void tool_parser_init(struct tool_parser *p, const struct tool_format *f, const cJSON *tools,
                      uint32_t max_calls);
/* Parses a piece: appends text outside calls to `text`; calls grow in p->calls. */
void tool_parser_push(struct tool_parser *p, struct str piece, struct buf *text);
/* The answer has ended. cut: by its length or a stop string, so an incomplete call stays a call;
 * otherwise it is malformed. */
void tool_parser_finish(struct tool_parser *p, bool cut, struct buf *text);
void tool_parser_release(struct tool_parser *p);
/* Number of calls that are not broken. */
uint32_t tool_parser_n_good(const struct tool_parser *p);

/* ---- for formats ---- */

struct str tool_rest(const struct tool_parser *p); /* the unread text */
void tool_consume(struct tool_parser *p, size_t n);
/* Begins the next call; false when max_calls is reached. */
bool tool_call_begin(struct tool_parser *p);
struct tool_call *tool_call_current(struct tool_parser *p);
/* Sets the call's name. TOOL_BAD when it is empty, too long, has control characters or is not one
 * of the request's tools. */
enum tool_step tool_call_name(struct tool_parser *p, struct str name);
/* Marks the current call complete. */
void tool_call_end(struct tool_parser *p);
/* Skips blanks. If `tag` follows, skips it and goes to `then`, else goes to `otherwise`;
 * TOOL_STATE_BAD gives TOOL_BAD. */
enum tool_step tool_expect(struct tool_parser *p, struct str tag, int then, int otherwise);
/* Consumes text up to `tag`, and the tag; *out is the text, valid until the next push. TOOL_BAD
 * when it has more than TOOL_NAME_MAX bytes. */
enum tool_step tool_read_until(struct tool_parser *p, struct str tag, struct str *out, int then);
/* Reads the JSON object of the arguments into the call; then sets the state to `then`. */
enum tool_step tool_read_arguments(struct tool_parser *p, int then);
/* Reads an object with the members name and arguments (or parameters); then sets the state. strict:
 * other members give TOOL_BAD. */
enum tool_step tool_read_call(struct tool_parser *p, bool strict, int then);
/* The JSON schema of parameter `key` of tool `name`, or NULL. */
const cJSON *tool_schema(const struct tool_parser *p, struct str name, struct str key);

#endif

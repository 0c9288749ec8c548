/* json_scan.h - checks byte by byte that a streamed text is the prefix of a JSON object.
 *
 * The text is not kept: bytes that were emitted as valid stay valid. The root must be
 * an object; the grammar is RFC 8259 with at most JSON_DEPTH_MAX levels; UTF-8 is not looked at
 * (the detokeniser gives nothing else). Life cycle: { 0 } or init, a call per byte until it says
 * other than MORE. Thread: its owner's. */
#ifndef BATON_TEXT_OUTPUT_JSON_SCAN_H
#define BATON_TEXT_OUTPUT_JSON_SCAN_H

#include <stdbool.h>
#include <stdint.h>

enum json_scan_result {
    JSON_SCAN_MORE,
    JSON_SCAN_DONE, /* this byte closed the root */
    JSON_SCAN_BAD   /* this byte makes the text invalid JSON */
};

/* What the next byte belongs to. */
enum json_scan_mode {
    SCAN_ROOT,
    SCAN_VALUE,        /* a value begins */
    SCAN_VALUE_OR_END, /* after [ */
    SCAN_KEY,          /* after , in an object */
    SCAN_KEY_OR_END,   /* after { */
    SCAN_COLON,
    SCAN_AFTER, /* a value has ended */
    SCAN_STRING,
    SCAN_ESCAPE,
    SCAN_HEX,
    SCAN_NUMBER,
    SCAN_WORD, /* true, false, null */
    SCAN_CLOSED
};

struct json_scan {
    enum json_scan_mode mode;
    int depth;        /* open objects and arrays */
    uint64_t objects; /* bit i: level i is an object */
    bool is_key;      /* the string being read */
    uint8_t number;   /* where in a number */
    uint8_t n_hex;
    const char *word; /* what must still come of a word */
};

enum json_scan_result json_scan_byte(struct json_scan *s, char c);

#endif

/* json_scan.h - checks byte by byte that a streamed text is the prefix of a JSON object.
 *
 * The grammar is RFC 8259 with at most JSON_DEPTH_MAX levels; the root must be an object. UTF-8 is
 * not checked: the detokenizer emits nothing else. The text is not kept.
 * Life cycle: { 0 }, a call per byte until the result is not JSON_SCAN_MORE.
 * Thread: its owner's. */
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
    bool is_key;      /* the string being read is a key */
    uint8_t number;   /* state within a number, see json_scan.c */
    uint8_t n_hex;    /* hex digits read of \uXXXX */
    const char *word; /* remaining letters of true, false or null */
};

enum json_scan_result json_scan_byte(struct json_scan *s, char c);

#endif

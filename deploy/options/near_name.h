/* near_name.h - which known name somebody may have meant who typed another one, for flags,
 * environment variables and commands.
 *
 * A wrong suggestion is worse than none, so a name is near only
 * 1. by its letters: one is added, missing, wrong or swapped with its neighbour; two in names of 6
 *    letters or more and three in names of 11 or more, if the first letter is right, or
 * 2. by its words: all words that were typed are in the name, in order, whole or shortened
 *    ("max-seqs" is near max-num-seqs). A lone word must have five letters, and be the name's word
 *    or its beginning.
 * Letters go before words. When two things are equally near, neither is suggested. '_' equals '-',
 * and case does not count.
 * Life cycle: near_begin, near_offer per known name, near_found. Thread: any. */
#ifndef BATON_DEPLOY_OPTIONS_NEAR_NAME_H
#define BATON_DEPLOY_OPTIONS_NEAR_NAME_H

#include <stdbool.h>
#include <stddef.h>

#include "shared/base/str.h"

enum { NEAR_NAME_MAX = 64 }; /* letters; a longer name is near to nothing */

struct near_search {
    char typed[NEAR_NAME_MAX];
    size_t n_typed;
    size_t cost;      /* of the best name so far */
    struct str found; /* the best name; n 0: none, or several that are equally near */
    size_t i_found;
};

void near_begin(struct near_search *s, struct str typed);
/* `name` is borrowed until the search is read. Names of one thing have the same index i. */
void near_offer(struct near_search *s, struct str name, size_t i);
/* The name that was most likely meant; n 0: none is near, or it cannot be told which. */
struct str near_found(const struct near_search *s);

#endif

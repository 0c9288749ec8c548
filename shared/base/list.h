/* list.h - an intrusive doubly linked list. The head is a node; nodes are members of their owners.
 * Thread: its owner's. */
#ifndef BATON_BASE_LIST_H
#define BATON_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
    struct list *next, *prev;
};

static inline void list_init(struct list *l) { l->next = l->prev = l; }
static inline bool list_empty(const struct list *l) { return l->next == l; }
static inline void list_insert_after(struct list *at, struct list *n)
{
    n->next = at->next;
    n->prev = at;
    at->next->prev = n;
    at->next = n;
}
/* Appends at the end. */
static inline void list_push(struct list *head, struct list *n)
{
    list_insert_after(head->prev, n);
}
static inline void list_push_front(struct list *head, struct list *n)
{
    list_insert_after(head, n);
}
/* Unlinks; n becomes a list of its own, so removing twice is harmless. */
static inline void list_remove(struct list *n)
{
    n->prev->next = n->next;
    n->next->prev = n->prev;
    list_init(n);
}

#define LIST_ENTRY(node, type, member) ((type *)(void *)((char *)(node)-offsetof(type, member)))
#define LIST_FIRST(head, type, member) LIST_ENTRY((head)->next, type, member)
/* Iterate; the loop may remove the current entry. */
#define LIST_FOREACH(it, head, type, member)                                                       \
    for (type *it = LIST_FIRST(head, type, member), *it##_next_;                                   \
         &it->member != (head) && (it##_next_ = LIST_ENTRY(it->member.next, type, member), 1);     \
         it = it##_next_)

#endif

/* mailbox.h - how threads talk: a bounded queue of small messages by value, with a wake-up.
 *
 * Many threads post, one thread (the owner) takes. The messages of one poster stay in order.
 * mailbox_post never blocks: a full mailbox is ERR_FULL and the sender decides what to do. A post
 * into an empty mailbox calls `wake` on the poster's thread, so `wake` must be safe there:
 * uv_async_send, an eventfd write, or NULL and the condition variable of mailbox_wait.
 * Life cycle: create, post and take, close (later posts fail with ERR_CANCELED; remaining messages
 * can still be taken), free by the owner after all posters have stopped. */
#ifndef BATON_BASE_MAILBOX_H
#define BATON_BASE_MAILBOX_H

#include <stdbool.h>
#include <stddef.h>

#include "shared/base/status.h"

struct mailbox;

/* `item_size` bytes per message, at most `capacity` messages. `wake` may be NULL: the owner polls
 * or uses mailbox_wait. */
struct mailbox *mailbox_create(size_t item_size, size_t capacity, void (*wake)(void *arg),
                               void *arg);
void mailbox_free(struct mailbox *m);
/* Copies one message in. ERR_FULL or ERR_CANCELED (closed); any thread. */
enum status mailbox_post(struct mailbox *m, const void *item) MUST_CHECK;
/* Copies the oldest message out; false when empty. Owner only. */
bool mailbox_take(struct mailbox *m, void *item);
/* Sleeps until the mailbox has a message, is closed, or timeout_ms have passed (-1: no limit). True
 * when it has a message. Owner only. */
bool mailbox_wait(struct mailbox *m, int timeout_ms);
void mailbox_close(struct mailbox *m);
size_t mailbox_len(struct mailbox *m);

#endif

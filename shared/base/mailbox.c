/* mailbox.c - a ring of fixed-size messages behind one mutex.
 *
 * The lock is held for one memcpy at most, so posters wait nanoseconds and never for the owner.
 * `wake` is called after the lock is released: it may be slow, or may use the mailbox itself.
 * Invariants under the lock: len <= capacity; the i-th oldest message is at
 * (first + i) % capacity.
 * Thread: see mailbox.h. */
#include "shared/base/mailbox.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"

struct mailbox {
    pthread_mutex_t lock;
    pthread_cond_t filled; /* a message came in or the mailbox was closed; monotonic clock */
    char *items;
    size_t item_size, capacity, first, len;
    bool closed;
    void (*wake)(void *arg);
    void *arg;
};

struct mailbox *mailbox_create(size_t item_size, size_t capacity, void (*wake)(void *arg),
                               void *arg)
{
    ASSERT(item_size > 0);
    ASSERT(capacity > 0);
    struct mailbox *m = MEM_NEW(struct mailbox);
    m->items = mem_calloc(capacity, item_size);
    m->item_size = item_size;
    m->capacity = capacity;
    m->wake = wake;
    m->arg = arg;
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&m->filled, &attr);
    pthread_condattr_destroy(&attr);
    pthread_mutex_init(&m->lock, NULL);
    return m;
}

void mailbox_free(struct mailbox *m)
{
    if (!m) return;
    pthread_cond_destroy(&m->filled);
    pthread_mutex_destroy(&m->lock);
    mem_free(m->items);
    mem_free(m);
}

enum status mailbox_post(struct mailbox *m, const void *item)
{
    pthread_mutex_lock(&m->lock);
    enum status st = m->closed ? ERR_CANCELED : m->len == m->capacity ? ERR_FULL : OK;
    bool was_empty = m->len == 0;
    if (st == OK) {
        size_t at = (m->first + m->len) % m->capacity;
        memcpy(m->items + at * m->item_size, item, m->item_size);
        m->len++;
        /* Only the owner waits, and it checks before it sleeps: only the first message must
         * signal. */
        if (was_empty) pthread_cond_signal(&m->filled);
    }
    pthread_mutex_unlock(&m->lock);
    if (st == OK && was_empty && m->wake) m->wake(m->arg);
    return st;
}

bool mailbox_take(struct mailbox *m, void *item)
{
    pthread_mutex_lock(&m->lock);
    bool taken = m->len > 0;
    if (taken) {
        memcpy(item, m->items + m->first * m->item_size, m->item_size);
        m->first = (m->first + 1) % m->capacity;
        m->len--;
    }
    pthread_mutex_unlock(&m->lock);
    return taken;
}

bool mailbox_wait(struct mailbox *m, int timeout_ms)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    if (timeout_ms > 0) {
        until.tv_sec += timeout_ms / 1000;
        until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
        if (until.tv_nsec >= 1000000000) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000;
        }
    }
    pthread_mutex_lock(&m->lock);
    int rc = timeout_ms == 0 ? ETIMEDOUT : 0;
    while (m->len == 0 && !m->closed && rc != ETIMEDOUT)
        rc = timeout_ms < 0 ? pthread_cond_wait(&m->filled, &m->lock)
                            : pthread_cond_timedwait(&m->filled, &m->lock, &until);
    bool filled = m->len > 0;
    pthread_mutex_unlock(&m->lock);
    return filled;
}

void mailbox_close(struct mailbox *m)
{
    pthread_mutex_lock(&m->lock);
    m->closed = true;
    pthread_cond_broadcast(&m->filled);
    pthread_mutex_unlock(&m->lock);
}

size_t mailbox_len(struct mailbox *m)
{
    pthread_mutex_lock(&m->lock);
    size_t len = m->len;
    pthread_mutex_unlock(&m->lock);
    return len;
}
